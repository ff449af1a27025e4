"""``make screenshots``: the docs' pictures of the report page, of TensorBoard and of feature maps.

Trains a small study of the digits, opens what it leaves in a headless Chromium, and writes
docs/images/{report,tensorboard,features}.png. ``--runs FOLDER`` keeps the runs, and goes on
with those that are there.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from socket import create_server
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from fedgkd_pl import compare
from fedgkd_pl.experiments.report import draw
from fedgkd_pl.plots.style import save
from PIL import Image

from examples.toy import toy_figure
from tools import REPO

NAMES = ("chromium", "chromium-browser", "google-chrome")
CALLBACKS = ("AveragedModel", "ClientDrift", "LocalModels", "TeacherAgreement", "Forgetting")
MAP: dict[str, Any] = {"class_path": "FeatureMap", "init_args": {"every_n_rounds": 100}}
STUDY: dict[str, Any] = {
    "name": "digits",
    "title": "Four methods on scikit-learn's digits, α=0.1, 20 rounds",
    "config": "protocols/digits.yaml",
    "seeds": [0, 1],
    "measures": ["at_best_val", "best", "final", "last10"],
    "rows": ["method"],
    "columns": ["measure"],
    "set": {
        "rounds": 20,
        "model.local_epochs": 5,
        "model.engine.workers": 1,
        "trainer.callbacks": [*({"class_path": name} for name in CALLBACKS), MAP],
    },
    "axes": {"method": ["FedAvg", "FedGKD", "FedGKD-Vote", "SCAFFOLD"]},
}
WIDTH = 1000  # of a picture, in pixels
SECONDS = 60  # for TensorBoard to answer


def take(browser: str, address: str, target: Path, size: tuple[int, int], wait: int) -> None:
    """A picture of a page as a window of some size shows it.

    Args:
        wait: milliseconds that the page's own clock may run before.
    """
    with TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"),
                *("--blink-settings=preferredColorScheme=1", f"--virtual-time-budget={wait}"),
                *(f"--screenshot={target}", address),
            ],
            check=True,
            capture_output=True,
            timeout=180,
        )
    shrink(target)


def shrink(file: Path) -> None:
    """Makes a picture as wide as a page shows it, with as many colours as it needs."""
    with Image.open(file) as image:
        ground = Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image.convert("RGBA"))
    height = round(ground.height * WIDTH / ground.width)
    small = ground.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
    small.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def tensorboard(browser: str, logs: Path, target: Path) -> None:
    """A picture of Custom Scalars, from a TensorBoard that ends with it."""
    with create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "tensorboard.main", "--logdir", logs.name, "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, *words],
        cwd=logs.parent,  # the page shows the folder as it is named
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + SECONDS
        while not answers(f"http://localhost:{port}/data/runs"):
            if time.monotonic() > end:
                raise TimeoutError(f"no answer of TensorBoard within {SECONDS} s")
            time.sleep(1)
        address = f"http://localhost:{port}/#custom_scalars"
        take(browser, address, target, (1300, 1060), 30_000)
    finally:
        server.terminate()
        server.wait(10)


def answers(address: str) -> bool:
    """Whether a TensorBoard has read runs."""
    try:
        with urlopen(address, timeout=5) as answer:
            return answer.read().strip() not in (b"", b"[]")
    except (URLError, OSError):
        return False


def main(argv: Sequence[str]) -> int:
    """Trains, draws and takes all pictures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots")
    parser.add_argument("--runs", type=Path, help="where the study is kept (nowhere)")
    runs = parser.parse_args(argv).runs
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        print("error: no Chromium on this machine: apt-get install chromium", file=sys.stderr)
        return 2
    images = REPO / "docs" / "images"
    with TemporaryDirectory() as folder:
        top = (runs or Path(folder)).resolve()
        result = compare(STUDY, output_dir=top)
        if result.failed:
            return result.show()
        study = top / STUDY["name"]
        page = (study / "report.html").as_uri()
        take(browser, page, images / "report.png", (1200, 1340), 5_000)
        two = Path(folder) / "runs"  # FedAvg and FedGKD alone, by plain names
        for method in ("FedAvg", "FedGKD"):
            shutil.copytree(study / f"{method}-seed0" / "version_0", two / method)
        tensorboard(browser, two, images / "tensorboard.png")
        three = [str(study / f"{name}-seed0") for name in ("FedAvg", "FedGKD", "SCAFFOLD")]
        draw("features", three, str(images / "features.png"))
        save(toy_figure()[0], images / "toy.png")
        for name in ("features", "toy"):
            shrink(images / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
