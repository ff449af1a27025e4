"""The code of the README and of docs/ runs as it is."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fedgkd_pl
import numpy as np
import pytest
import torch
import torchvision
import yaml
from fedgkd_pl import FederatedData
from fedgkd_pl.experiments.study import read_study
from PIL import Image

from tests.conftest import REPO
from tests.support import lit
from tests.support.datasets import WORDS
from tests.support.runs import Run as Command
from tests.support.sources import table_rows, write_config, write_csv, write_images, write_leaf

NEEDS = {"from_parquet": "pyarrow", "from_huggingface": "datasets", "onnx": "onnxscript"}
ALONE = "# without fedgkd_pl"


def page(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


def blocks(name: str, kind: str = "python") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page(f"docs/{name}.md"), re.DOTALL)


def own_files(folder: Path) -> None:
    """What the examples of docs/data.md read."""
    rows = [[*row[:2], row[2], f"garage{n % 3}"] for n, row in enumerate(table_rows(60))]
    write_csv(folder / "fleet.csv", ["a", "b", "kind", "garage"], rows)
    write_csv(folder / "cars.csv", ["a", "b", "kind"], table_rows(60))
    kinds = [["a very good film", "good"], ["bad news", "bad"]] * 12
    write_csv(folder / "reviews.csv", ["text", "label"], kinds)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    write_images(folder / "photos", 10)
    for number, name in enumerate(("ann", "bob", "eve")):
        write_csv(folder / "hospitals" / f"{name}.csv", ["a", "b", "kind"], table_rows(20, number))
    for split in ("train", "test"):
        users = {f"f{n}": ([[n, 0.5, 1, 0]] * 9, [0, 1, 2] * 3) for n in range(3)}
        write_leaf(folder / "femnist" / split / "all.json", users)
    np.save(folder / "x.npy", np.random.default_rng(0).random((80, 4), np.float32))
    np.save(folder / "y.npy", np.arange(80) % 2)
    if find_spec("pyarrow"):
        from pyarrow import csv, parquet

        parquet.write_table(csv.read_csv(folder / "cars.csv"), folder / "cars.parquet")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the working directory; what a session changes is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # which seed_everything sets
    monkeypatch.setitem(sys.modules, "my_lit", lit)
    return tmp_path


def session(name: str) -> dict[str, Any]:
    """The names that a page's Python blocks leave, run in one session."""
    names: dict[str, Any] = {"__name__": name}
    for block in blocks(name):
        if all(find_spec(package) for word, package in NEEDS.items() if word in block):
            exec(compile(block, f"docs/{name}.md", "exec"), names)
    return names


@pytest.mark.parametrize("name", ["python", "extending", "data", "modules", "nets", "experiments"])
def test_the_python_of_a_page(name: str, here: Path) -> None:
    """Most blocks end with an assertion."""
    own_files(here)
    if name == "modules":
        torch.save(torchvision.models.resnet18().state_dict(), "resnet18.pth")
    names = session(name)
    if name == "data":
        sources = [source for source in vars(FederatedData) if source.startswith("from_")]
        assert len(sources) >= 10 and all(
            f"`{source}`" in page("docs/data.md") for source in sources
        )
    if name == "experiments":
        assert len(names["gains"]) == 20 and len(list(here.rglob("personalized.*"))) == 2


def test_the_ten_lines(here: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", page("README.md"), re.DOTALL)
    assert blocks("start")[0] == lines
    assert len([line for line in lines.splitlines() if line.strip()]) <= 10
    exec(lines, {})
    assert list(here.rglob("*.ckpt")), "the stock ModelCheckpoint wrote nothing"


def test_the_method_in_thirty_lines(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)  # of another test
    text = blocks("start")[1]
    assert len([line for line in text.splitlines() if line.strip()]) <= 30
    (tmp_path / "my_methods.py").write_text(text)
    words = "fit --import my_methods --config quickstart.yaml --model Smooth --model.epsilon 0.2"
    assert words in page("docs/start.md").replace("\n", " ")
    code, _, err = run(*words.split(), "--rounds", "1", "--model.local_steps", "1")
    assert code == 0, err
    client = sys.modules["my_methods"].SmoothClient(torch.nn.Linear(2, 2), None, epsilon=0.5)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    p = client.net(x).log_softmax(1)
    expected = -(0.5 * p[range(4), y] + 0.5 * p.mean(1)).mean()  # half of the label, half of all
    assert client.training_step((x, y), 0).item() == pytest.approx(expected.item())


STEP = ("--model.local_steps", "1")
CONFIGS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {  # block, words before, after
    "data": (0, (), ()),
    "modules": (0, ("--import", "tests.support.lit"), ()),
    "nets": (0, (), ()),
    "tasks": (0, ("--config", "protocols/digits.yaml"), STEP),
    "extending": (0, ("--import", "my_methods", "--config", "protocols/digits.yaml"), STEP),
    "callbacks": (1, ("--config", "quickstart.yaml"), STEP),
    "clients": (2, ("--config", "quickstart.yaml"), STEP),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_page(
    name: str, run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)  # of another test
    number, before, after = CONFIGS[name]
    where = name if (REPO / f"docs/{name}.md").exists() else "experiments"
    config = blocks(where, "yaml")[number].replace("my_lit", "tests.support.lit")
    config = config.replace(": Anchored", ": my_methods.Anchored")  # another test has one, too
    own_files(tmp_path)
    (tmp_path / "my_methods.py").write_text(blocks("extending")[0], encoding="utf-8")
    (tmp_path / "page.yaml").write_text(config, encoding="utf-8")
    words = (*before, "--config", "page.yaml", "--rounds", "1", "--model.engine.workers", "1")
    code, _, err = run("fit", *words, *after)
    assert code == 0, err
    text = next(tmp_path.rglob("metrics.csv")).read_text(encoding="utf-8")
    logs = {"nets": "nets/MLP1_test_acc", "extending": "client/anchor_mean", "callbacks": "drift/"}
    assert logs.get(name, "test/") in text


def test_the_explained_config_and_study(run: Command, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(blocks("experiments", "yaml")[0])
    assert len(read_study(str(tmp_path / "study.yaml")).cells()) == 2 * 3 * 3
    (tmp_path / "page.yaml").write_text(blocks("start", "yaml")[0])
    ours = run("fit", "--config", "page.yaml", "--print_config")
    shipped = run("fit", "--config", "cifar10_fedgkd.yaml", "--print_config")
    assert ours[0] == shipped[0] == 0, ours[2]
    assert yaml.safe_load(ours[1]) == yaml.safe_load(shipped[1])


def test_own_images_in_a_new_project(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("new", "my-project")[0] == 0
    project = tmp_path / "my-project"
    monkeypatch.chdir(project)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    block, start = blocks("start", "yaml")[1], page("docs/start.md")
    (project / "photos.yaml").write_text(block, encoding="utf-8")
    write_images(project / "photos", 40)
    text = start[start.index(block) :]
    partition, fit, compare, figure = re.findall(r"^fedgkd-pl (\w+ .*?) +#", text, re.MULTILINE)
    study = (project / "study.yaml").read_text(encoding="utf-8")
    config = "config: [config.yaml, photos.yaml]"
    assert f"`{config}`" in text and study.count("config: config.yaml") == 1
    (project / "study.yaml").write_text(study.replace("config: config.yaml", config))
    assert "runs/study " in figure  # which a dry run does not make
    figure = figure.replace("runs/study", "runs/my-project")
    for words in (partition, f"{fit} --rounds 1", f"{compare} --dry_run", figure):
        code, _, err = run(*words.split())
        assert code == 0, err
    assert (project / "curves.png").is_file()


def test_the_examples_of_model(run: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order; the last blocks work without the package, on what was exported."""
    names: dict[str, Any] = {"__name__": "model"}
    write_images(here / "photos", 10)
    settings = {"path": "photos", "size": 5, "num_clients": 2}
    config = write_config(here, "ImageFolders", 75, **settings)
    assert run("fit", "--config", config, "--name", "photos")[0] == 0
    noise = np.random.default_rng(0).integers(0, 256, (31, 45, 3))
    Image.fromarray(noise.astype(np.uint8)).save(here / "photo.jpg")
    have_onnx = find_spec("onnxscript") is not None
    for kind, block in re.findall(r"```(sh|python)\n(.*?)```", page("docs/model.md"), re.DOTALL):
        if "onnx" in block and not find_spec("onnxruntime"):
            ours = "onnx.reference import ReferenceEvaluator as"
            block = block.replace("onnxruntime import", ours)
        if kind == "sh":
            for line in block.splitlines():
                if line and (have_onnx or "onnx" not in line):
                    short = ("--model.local_epochs", "1") if " fit " in line else ()
                    code, _, err = run(*line.split()[1:], *short)
                    assert code == 0, err
        elif have_onnx or "onnx" not in block:
            assert ALONE not in block or "fedgkd_pl" not in block.replace(ALONE, "")
            exec(compile(block, "docs/model.md", "exec"), names)
    labels = names["found"].labels.tolist()
    assert len(names["logits"]) == 5
    if have_onnx:
        found = fedgkd_pl.load_run("runs/photos/version_0").predict(Path("photo.jpg"))
        scores = torch.from_numpy(names["scores"]).softmax(1)
        torch.testing.assert_close(scores, found.probabilities, atol=1e-5, rtol=0)
    assert all((here / name).is_file() for name in ("digit.png.predictions.csv", "digits.csv"))
    words = page("docs/model.md").partition("three files are enough: ")[2]
    (here / "few").mkdir()
    for name in re.findall("`(.*?)`", words)[:3]:
        (here / "runs/quickstart/version_0" / name).rename(here / "few" / name)
    assert fedgkd_pl.load_run("few").predict(names["images"]).labels.tolist() == labels
