"""No table misleads: significance, protocol, what is not shown, clients that diverge."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedAvg, LocalEngine, RunFiles
from fedgkd_pl.errors import SettingError
from fedgkd_pl.experiments.paper import UNKNOWN, differences, paper_row
from fedgkd_pl.experiments.report import participation
from fedgkd_pl.experiments.runs import Run, make_groups
from fedgkd_pl.experiments.study import Cell
from fedgkd_pl.experiments.tables import Footnotes, lead, make_tables, overview
from fedgkd_pl.experiments.tables import Table as Laid
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer
from tests.support.faults import Fault, inject
from tests.support.shipped import COUNTS, Parse, Settings, cells, words
from tests.support.shipped import study as study_file
from tests.support.studies import fake, grouped, results, study

Command = Callable[..., tuple[int, str, str]]

# -- clients that diverge ------------------------------------------------------------------------


def huge(lr: float = 1e12, engine: LocalEngine | None = None) -> FedAvg:
    """A linear model whose loss is ln 3 or so in round 1 and about the rate in round 2."""
    return FedAvg(
        linear(), local_steps=1, optimizer=partial(SGD, lr=lr), engine=engine or LocalEngine(1)
    )


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if r.name == "fedgkd_pl"]
    return [line for line in lines if "clients diverge" in line]


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def test_a_loss_that_explodes_is_told_once_and_a_sound_run_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = RunFiles(str(tmp_path / "a"))
    fit(huge(engine=LocalEngine(2)), Table(), 4, callbacks=[files])
    assert files.rows[1]["client/loss_mean"] < 3 < 1e10 < files.rows[2]["client/loss_mean"]
    (line,) = told(caplog)
    assert line.startswith("round 2: clients diverge: ")
    assert summary_of(tmp_path / "a")["diverged_round"] == 2
    fit(huge(), Table(), 2)  # no RunFiles
    assert len(told(caplog)) == 2
    caplog.clear()
    fit(huge(lr=1e8), Table(), 3, callbacks=[RunFiles(str(tmp_path / "b"))])  # grows by 1e8 only
    assert told(caplog) == [] and summary_of(tmp_path / "b")["diverged_round"] is None


def test_a_client_left_out_as_not_finite_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = inject(huge(lr=0.1), [Fault(2, 1, "nan"), Fault(3, 0, "loss")])
    fit(model, Table(), 3, callbacks=[RunFiles(str(tmp_path))])
    (line,) = told(caplog)
    assert line.startswith("round 2: clients diverge: client 1: its "), line
    assert summary_of(tmp_path)["diverged_round"] == 2
    caplog.clear()
    other = inject(huge(lr=0.1), [Fault(2, 1, "raise"), Fault(3, 0, "shape")])
    fit(other, Table(), 3, callbacks=[RunFiles(str(tmp_path / "other"))])
    assert told(caplog) == [] and summary_of(tmp_path / "other")["diverged_round"] is None


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resume_neither_repeats_nor_forgets_it(
    stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first loss and the round told travel in the checkpoint."""
    save = ModelCheckpoint(str(tmp_path), "{step}", save_top_k=-1)
    fit(huge(), Table(), stop, callbacks=[save, RunFiles(str(tmp_path))], enable_checkpointing=True)
    before = len(told(caplog))
    assert before == (stop >= 2)
    caplog.clear()
    model = huge()
    trainer = quiet_trainer(max_epochs=4, callbacks=[RunFiles(str(tmp_path / "on"))])
    trainer.fit(model, Table(), ckpt_path=str(tmp_path / f"step={stop}.ckpt"))
    assert len(told(caplog)) == 1 - before
    assert summary_of(tmp_path / "on")["diverged_round"] == 2


# -- significance --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        # the differences 1 and 1 + 2e-15 gave p = 0.000
        (
            [0.3, 0.7, 5],
            [-0.7, -0.3, 4],
            "a is ahead of b by 1.00 ± 0.00 points over 3 seeds; with",
        ),
        ([12, 11], [10, 10], "a is ahead of b by 1.50 ± 0.71 points over 2 seeds; a test needs 3"),
        ([2], [1], "a is ahead of b by 1.00 points over 1 seed; a test needs 3"),
    ],
)
def test_no_test_of_nothing(one: list[float], other: list[float], text: str) -> None:
    told = lead("a", dict(enumerate(one)), "b", dict(enumerate(other)))
    assert told.startswith(text) and "p " not in told


def test_the_lead_is_a_paired_t_test() -> None:
    # differences 3, 2, 1: t = 2 / (1/√3) = 2√3; with two degrees of freedom p = 1 - t/√(t² + 2)
    p = 1 - math.sqrt(12 / 14)
    text = lead("a", {0: 13, 1: 12, 2: 11}, "b", {0: 10, 1: 10, 2: 10})
    assert text == (
        "a is ahead of b by 2.00 ± 1.00 points over 3 seeds, "
        f"paired t-test p = {p:.3f}: not significant at 5 %"
    )
    text = lead("a", {0: 9.9, 1: 10.0, 2: 10.1}, "b", dict.fromkeys(range(3), 0.0))
    assert text.endswith("paired t-test p < 0.001: significant at 5 %"), "p = 3.3e-5"


def only(*methods: str, seeds: tuple[int, ...] = (0, 1, 2), **kwargs: Any) -> Any:
    axes = {"alpha": {"1": {}}, "method": {method: {} for method in methods}}
    return study(axes=axes, seeds=list(seeds), **({"measures": ["best"]} | kwargs))


def by(table: Laid) -> list[tuple[str, int]]:
    """The texts of the first row, with their ranks."""
    texts = table.frame.iloc[0, 1:]
    return [(text, table.ranks.get((0, str(name)), 0)) for name, text in texts.items()]


def test_a_value_that_is_no_number_is_missing_and_no_best_is_marked_over_other_seeds() -> None:
    it = only("A", "B", seeds=(0, 1))
    values = {("1", "A"): [[0.9], [float("nan")]], ("1", "B"): [[0.8], [0.8]]}
    (table,) = make_tables(it, results(it, values))
    assert by(table) == [("90.00 †", 0), ("80.00 ± 0.00", 0)]
    assert table.notes == [
        "† of seed 0 only",
        "best: no best is marked, as not all have the same seeds",
    ]
    assert "nan" not in table.to_markdown()
    runs = [grouped("FedAvg", seed, 0.1) for seed in (0, 1)]
    for run, acc in zip(runs, (0.9, float("inf")), strict=True):
        run.summary["best_test_acc"] = acc
    (group,) = make_groups(runs)
    assert overview([group], Footnotes())["best"].tolist() == ["90.00 †"]


@pytest.mark.parametrize(
    ("bests", "ranks"), [((0.9, 0.9, 0.8), [1, 1, 0]), ((0.9, 0.8, 0.8), [1, 2, 2])]
)
def test_two_best_leave_no_second(bests: tuple[float, ...], ranks: list[int]) -> None:
    values = {("1", name): [[best]] for name, best in zip("ABC", bests, strict=True)}
    it = only("A", "B", "C", seeds=(0,))
    assert [rank for _, rank in by(make_tables(it, results(it, values))[0])] == ranks


# -- the paper's protocol ------------------------------------------------------------------------

DATA = {"CIFAR10": "CIFAR-10", "CIFAR100": "CIFAR-100", "TinyImageNet": "Tiny-ImageNet"}
DATA |= {"AGNews": "AG News", "SST5": "SST-5"}


def made_by(settings: Settings) -> Settings:
    """What is compared with the paper of a run with these settings."""
    method = settings["model"]["class_path"].rpartition(".")[2]
    run = Run(Path(), {"method": method, "dataset": "", "rounds": settings["rounds"]})
    run.__dict__["settings"] = settings
    return run.facts


def check_cell(name: str, labels: dict[str, str], parse: Parse) -> int:
    """A shipped study's cell is the paper's protocol, for every number of the paper; how many."""
    ours = made_by(parse(words(name, **labels)))
    ours["dataset"] = DATA[ours["data"]]
    found = [
        (measure, row)
        for measure in study_file(name)["measures"]
        if (row := paper_row(name, {"dataset": ours["dataset"]} | labels, measure))
    ]
    for measure, row in found:
        assert differences(row, ours, measure) == {}, (name, labels)
    return len(found)


def test_a_cell_of_every_shipped_study_has_the_papers_protocol(parse: Parse) -> None:
    for name in COUNTS:
        assert check_cell(name, cells(name)[-1], parse) > 0


@pytest.mark.nightly
def test_every_cell_has_the_papers_protocol(parse: Parse) -> None:
    counts = {n: sum(check_cell(n, labels, parse) for labels in cells(n)) for n in COUNTS}
    assert counts == COUNTS, "each of the paper's 229 numbers"


def test_what_differs_is_told(parse: Parse) -> None:
    row = paper_row("overview", {"dataset": "CIFAR-10", "alpha": "0.1", "method": "FedGKD"}, "best")
    assert row is not None
    flags = "--rounds 30 --data.partition.alpha 1 --model.net.norm batch --model.local_steps 5 "
    flags += "--model.buffer_size 1 --trainer.gradient_clip_val null"
    ours = made_by(parse(["--config", "cifar10_fedgkd.yaml", *flags.split()]))
    assert set(differences(row, ours | {"dataset": "CIFAR-10"}, "best").values()) == {
        "rounds 30 instead of 100",
        "partition.alpha 1.0 instead of 0.1",
        "net.norm batch instead of group",
        "local_steps 5 instead of none",
        "buffer_size 1 instead of 5",
        "gradient_clip_val none instead of 10",
    }
    assert "rounds" not in differences(row, ours, "round10"), "an earlier round of it"
    assert [*differences(row, {"rounds": 100}, "best").values()] == [UNKNOWN]


def test_marks_in_every_format() -> None:
    axes = {"dataset": {"CIFAR-10": {}}, "alpha": {"0.1": {}}, "method": {"FedAvg": {}}}
    it = study(axes=axes, rows=["dataset", "alpha"], measures=["best"], paper="overview")
    runs = []
    for cell in it.cells():
        run = grouped("FedAvg", cell.seed, 0.1)
        run.summary.update({"rounds": 50, "diverged_round": 28 if cell.seed else None})
        runs.append((cell, run))
    (table,) = make_tables(it, runs)
    assert "| 50.00 ± 0.00 † (69.22 ± 0.91 ‡) |" in table.to_markdown()
    cure = "† clients diverged: seed 1 from round 28 on; try --trainer.gradient_clip_val 10"
    for text in (table.to_latex(), table.to_html(), repr(table), table.to_markdown()):
        assert "0.00 † (69.22 ± 0.91 ‡)" in text and "‡ rounds 50 instead of 100" in text
        assert cure in text.replace("\\_", "_")


# -- what is not shown ---------------------------------------------------------------------------


def finished(folder: Path, seed: int = 0, settings: bool = True, **extra: Any) -> None:
    folder.mkdir(parents=True)
    summary = fake("FedAvg", seed, [0.5] * 10, **extra).summary
    (folder / "summary.json").write_text(json.dumps(summary))
    if settings:
        text = f"seed_everything: {seed}\nmodel: {{class_path: FedAvg}}\n"
        (folder / "config.yaml").write_text(text)


def test_report_says_what_it_does_not_show(run: Command, tmp_path: Path) -> None:
    for number in range(4):
        finished(tmp_path / "runs" / "x" / f"version_{number}", number)
    finished(tmp_path / "runs" / "y" / "version_0")
    begun = tmp_path / "runs" / "x" / "version_9"
    begun.mkdir()
    (begun / "config.yaml").write_text("rounds: 3")
    code, out, _ = run("report", "runs/x", "runs/y")
    assert code == 0 and out.count("FedAvg") == 5
    assert out.splitlines()[-1] == "not shown: 1 unfinished of runs/x"
    code, out, _ = run("report", "--over_seeds", "runs")
    assert code == 0 and "not shown: 1 with settings and seed of another" in out
    assert run("report", "--format", "html", "runs")[0] == 0
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert "<li>not shown: 1 unfinished of runs</li>" in page
    assert "not shown" not in run("report", "runs/y")[1]


def test_runs_of_unknown_settings_are_marked_and_told_apart() -> None:
    runs = [
        Run(Path(f"run{number}"), fake("FedAvg", seed, [0.5] * 10).summary)
        for number, seed in enumerate((0, 0, 1))
    ]
    groups = make_groups(runs)
    assert [group.name for group in groups] == ["FedAvg, run0", "FedAvg, run1", "FedAvg, run2"]
    notes = Footnotes()
    marked = overview(groups, notes)["method"].tolist()
    assert marked == ["FedAvg, run0 †", "FedAvg, run1 †", "FedAvg, run2 †"]
    assert notes.lines == ["† settings not known (no config.yaml): not averaged with others"]


def test_a_point_over_c_is_of_one_kind_of_run() -> None:
    one, other = grouped("FedAvg", 0, 0.1), grouped("FedAvg", 1, 0.1)
    participation(make_groups([one, other]))
    other.settings["data"]["init_args"]["num_clients"] = 100
    with pytest.raises(SettingError, match="differ in more than the seed"):
        participation(make_groups([one, other]))


# -- groups of runs that differ in the seed -------------------------------------------------------


def test_groups_are_told_apart_by_what_differs() -> None:
    runs = [
        grouped("FedGKDVote", 0, 0.1, buffer_size=3),
        grouped("FedGKDVote", 1, 0.1, buffer_size=3),
        grouped("FedGKDVote", 0, 0.1, buffer_size=5),
        grouped("FedAvg", 0, 0.1),
        grouped("FedAvg", 0, 1),
    ]
    runs[1].summary["seed"] = 0  # data.seed may be the same in all
    groups = make_groups(runs)
    assert [(g.name, g.panel, sorted(g.runs)) for g in groups] == [
        ("FedGKD-Vote, M 3", "CIFAR-10, α 0.1", [0, 1]),
        ("FedGKD-Vote, M 5", "CIFAR-10, α 0.1", [0]),
        ("FedAvg", "CIFAR-10, α 0.1", [0]),
        ("FedAvg", "CIFAR-10, α 1", [0]),
    ]
    assert groups[3].paper and groups[3].paper["mean"] == "77.30"
    rows = overview(groups, Footnotes()).to_dict("records")
    assert rows[0]["paper's best"] == "72.99 †" and rows[0]["best"] == "50.00 ± 0.00", "M is 5"
    assert rows[2]["paper's best"] == "69.22", "FedAvg's protocol is the paper's"


def test_another_protocol_stands_not_beside_the_papers_numbers() -> None:
    for change in ({"clients": 500}, {"local_epochs": 1}, {"local_steps": 5}):
        (group,) = make_groups([grouped("FedAvg", 0, 1, **change)])
        assert group.paper is None, change
    more = grouped("FedAvg", 0, 1)
    more.settings["data"]["init_args"]["participation"] = 0.4
    assert make_groups([more])[0].paper is None
    short = grouped("FedAvg", 0, 1)
    short.summary["rounds_asked"] = 10
    assert make_groups([short])[0].paper is None


def test_seeds_that_a_callback_ends_early_are_one_line() -> None:
    runs = [grouped("FedAvg", seed, 0.1) for seed in range(3)]
    for number, run in enumerate(runs):
        run.summary["rounds"] = 12 + number
    (group,) = make_groups(runs)
    assert sorted(group.runs) == [0, 1, 2]
    assert overview([group], Footnotes())["rounds"].tolist() == ["12–14"]
    it = only("A", "B", seeds=(0,))
    lengths = [("A", 4), ("B", 2)]
    cells_ = [(Cell({"alpha": "1", "method": m}, 0, ()), n) for m, n in lengths]
    (table,) = make_tables(it, [(cell, fake("x", 0, [0.5], rounds_asked=n)) for cell, n in cells_])
    assert table.notes[0] == "the runs have different numbers of rounds: 2, 4"
