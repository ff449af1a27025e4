"""The report's page of made-up runs: 4 methods, 3 α, 2 seeds; what a browser shows of it."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fedgkd_pl.experiments.report import CURVES, Section, figures, write_page
from fedgkd_pl.experiments.runs import find_runs, make_groups
from fedgkd_pl.plots.figures import FeatureMapData, encode_feature_map
from fedgkd_pl.runs.folder import accuracy_summary
from matplotlib.colors import to_hex

from tests.support.browser import CHROMIUM, MISSING, look

METHODS = {"FedAvg": "FedAvg", "FedGKD": "FedGKD", "SCAFFOLD": "SCAFFOLD"}
METHODS["FedGKDVote"] = "FedGKD-Vote"
ALPHAS = (10.0, 0.5, 2.0)
PANELS = ["digits, α 0.5", "digits, α 2", "digits, α 10"]
ROUNDS = 12


def write_run(folder: Path, method: str, alpha: float, seed: int, tested: Sequence[int]) -> None:
    """A folder with all that a page shows."""
    rng = np.random.default_rng([seed, round(10 * alpha), len(method)])
    distils = method.startswith("FedGKD")
    columns = [column for column, *_ in CURVES if distils or column != "client/kd_mean"]
    rows = [
        {"round": n} | {column: rng.uniform(0.2, 0.9) for column in columns}
        for n in range(1, ROUNDS + 1)
    ]
    for row in rows:
        if row["round"] not in tested:
            del row["test/acc"]
    cut = {"class_path": "fedgkd_pl.Dirichlet", "init_args": {"alpha": alpha}}
    settings = {
        "seed_everything": seed,
        "model": {"class_path": f"fedgkd_pl.{method}", "init_args": {"local_epochs": 2}},
        "data": {"class_path": "fedgkd_pl.Digits", "init_args": {"partition": cut}},
        "rounds": ROUNDS,
    }
    summary = accuracy_summary([dict(row) for row in rows]) | {
        **{"method": method, "dataset": "digits", "seed": seed, "wall_seconds": 30 + seed},
        **{"bytes_down": 2_000_000 + 500_000 * distils, "bytes_up": 2_000_000},
    }
    counts = np.random.default_rng(round(10 * alpha)).integers(1, 40, (5, 10)).tolist()
    names = [str(number) for number in range(10)]
    partition = {"dataset": "digits", "counts": counts, "class_names": names}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "partition.json").write_text(json.dumps(partition))
    write_csv(folder / "metrics.csv", rows)
    if alpha == 2 and distils:
        write_clients(folder, rng)


def write_clients(folder: Path, rng: np.random.Generator) -> None:
    """What some callbacks leave, and ``fedgkd-pl personalize``."""
    points = [rng.normal(size=(60, 2)) for _ in range(2)]
    seen = FeatureMapData(*points, np.arange(60) % 10, 0.5, 0.4, 1, ROUNDS)  # type: ignore[arg-type]
    (folder / f"features-round{ROUNDS:03d}.npz").write_bytes(encode_feature_map(seen))
    each = [{"round": n, "client": k} for n in range(1, ROUNDS + 1) for k in range(5)]
    write_csv(folder / "local_models.csv", [row | {"acc": rng.uniform()} for row in each])
    own = [row | {"global_acc": rng.uniform(), "local_acc": rng.uniform()} for row in each]
    write_csv(folder / "clients.csv", own)
    tuned = [{"client": k, "acc_before": 0.5, "acc_after": rng.uniform()} for k in range(5)]
    write_csv(folder / "personalized.csv", tuned)


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("page")
    for method in METHODS:
        for alpha in ALPHAS:
            for seed in (0, 1):
                name = f"{method}-{alpha}-{seed}"
                write_run(top / name / "version_0", method, alpha, seed, (4, 8, 12))
    write_page(find_runs([str(top)]), top / "report.html", "Four methods")
    return top


@pytest.fixture(scope="module")
def sections(folder: Path) -> dict[str, Section]:
    groups = make_groups(find_runs([str(folder)]))
    return {section.name: section for section in figures(groups)}


def test_every_figure_of_several_panels_has_all_of_them_by_size(
    sections: dict[str, Section],
) -> None:
    for name in ("best", "seconds", "bytes", *(name for _, name, *_ in CURVES)):
        titles = [axes.get_title() for axes in sections[name].figure.axes]
        assert titles == PANELS, name
    for axes in sections["bytes"].figure.axes:
        written = sorted(text.get_text() for text in axes.texts)
        assert written == ["4.00 ± 0.00", "4.00 ± 0.00", "4.50 ± 0.00", "4.50 ± 0.00"]


def drawn(section: Section) -> Iterator[tuple[str, str]]:
    """The methods of a figure and their colours."""
    for axes in section.figure.axes:
        for line in axes.get_lines():
            if not line.get_label().startswith("_"):  # type: ignore[union-attr]
                yield str(line.get_label()), to_hex(line.get_color())
        names = [text.get_text() for text in section.figure.axes[0].get_yticklabels()]
        for patch in axes.patches:
            row = round(patch.get_y() + patch.get_height() / 2)  # type: ignore[attr-defined]
            yield names[row], to_hex(patch.get_facecolor())


def test_a_method_has_one_colour_in_all_figures_of_a_page(sections: dict[str, Section]) -> None:
    """SCAFFOLD has none of its own, and the distillation's figure is without it."""
    found: dict[str, set[str]] = {}
    for name in ("best", "bytes", "seconds", *(name for _, name, *_ in CURVES)):
        for method, colour in drawn(sections[name]):
            found.setdefault(method, set()).add(colour)
    assert set(found) == set(METHODS.values())
    assert all(len(colours) == 1 for colours in found.values()), found
    assert len(set.union(*found.values())) == 4


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.parametrize(
    ("width", "dark"), [(1400, False), (1400, True), (400, False), (400, True)]
)
def test_the_page_reads_in_a_browser(folder: Path, tmp_path: Path, width: int, dark: bool) -> None:
    facts = look(folder / "report.html", tmp_path / "browser", width, dark)
    assert facts["problems"] == []
    assert (facts["width"], facts["dark"]) == (width, dark)
    assert facts["needed"] <= width, "the page scrolls sideways"
    shown = {figure["name"]: figure for figure in facts["figures"]}
    assert {"curves", "best", "bytes", "features", "partition1", "clients1", "tuned1"} <= set(shown)
    for name, figure in shown.items():
        assert figure["size"][0] > 250 and figure["size"][1] > 100, name
        assert figure["marks"] and min(figure["marks"]) > 0, f"{name} has an empty panel"
        assert figure["backgrounds"] == 0, f"{name} has a background of its own"
        assert figure["buttons"] == 2, name
