"""No table misleads: significance, protocol, what is not shown, clients that diverge."""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fedgkd_pl import FedAvg, LocalEngine, RunFiles
from fedgkd_pl.experiments.draw import participation
from fedgkd_pl.experiments.groups import make_groups
from fedgkd_pl.experiments.overview import overview
from fedgkd_pl.experiments.page import write_page
from fedgkd_pl.experiments.paper import paper_row
from fedgkd_pl.experiments.protocol import Footnotes, differences, plain_settings
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.experiments.significance import lead
from fedgkd_pl.experiments.study import Cell
from fedgkd_pl.experiments.table import Table as Laid
from fedgkd_pl.experiments.tables import make_tables
from fedgkd_pl.federation.divergence import Divergence
from fedgkd_pl.methods import title_of
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from torch.optim import SGD

from tests.conftest import REPO, Table, fit, linear, quiet_trainer
from tests.support.faults import Fault, inject
from tests.support.shipped import COUNTS, Parse, cells, words
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


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_explodes_is_told_once(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = huge(engine=LocalEngine(workers))
    files = RunFiles(str(tmp_path))
    fit(model, Table(), 4, callbacks=[files])
    assert files.rows[1]["client/loss_mean"] < 3 < 1e10 < files.rows[2]["client/loss_mean"]
    (line,) = told(caplog)
    assert line.startswith("round 2: clients diverge: the clients' mean loss is ")
    assert line.endswith("; try --trainer.gradient_clip_val 10 or a smaller learning rate")
    assert summary_of(tmp_path)["diverged_round"] == 2


def test_a_plain_trainer_tells_it_too_and_a_sound_run_says_nothing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fit(huge(), Table(), 2)  # no RunFiles
    assert len(told(caplog)) == 1
    caplog.clear()
    fit(huge(lr=1e8), Table(), 3, callbacks=[RunFiles(str(tmp_path))])  # grows by 1e8 only
    assert told(caplog) == [] and summary_of(tmp_path)["diverged_round"] is None


def test_a_first_round_that_explodes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = FedAvg(linear(), local_steps=3, optimizer=partial(SGD, lr=1e12), engine=LocalEngine(1))
    fit(model, Table(), 1)
    assert told(caplog)[0].startswith("round 1: ")


@pytest.mark.parametrize("kind", ["nan", "inf", "loss"])
def test_a_client_left_out_as_not_finite_is_told(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = inject(huge(lr=0.1), [Fault(2, 1, kind), Fault(3, 0, kind)])
    fit(model, Table(), 3, callbacks=[RunFiles(str(tmp_path))])
    (line,) = told(caplog)
    assert line.startswith("round 2: clients diverge: of client 1, its "), line
    assert summary_of(tmp_path)["diverged_round"] == 2
    caplog.clear()
    other = inject(huge(lr=0.1), [Fault(2, 1, "raise"), Fault(3, 0, "shape")])
    fit(other, Table(), 3, callbacks=[RunFiles(str(tmp_path / "other"))])
    assert told(caplog) == [] and summary_of(tmp_path / "other")["diverged_round"] is None


@pytest.mark.parametrize("stop", [1, 2, 3])
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


def test_the_first_loss_is_that_of_a_round_that_counted() -> None:
    """A round that changed nothing is no measure; losses below 1e-10 count as 1e-10."""

    class Server:
        def __init__(self, round: int, loss: float | None, failed: list[int]) -> None:
            self.round, self.failed_rounds = round, failed
            self.report = {} if loss is None else {"client/loss_mean": loss}

    def rounds(*losses: float | None, failed: tuple[int, ...] = ()) -> int | None:
        watch = Divergence()
        for number, loss in enumerate(losses, 1):
            watch.on_train_batch_end(None, Server(number, loss, list(failed)))  # type: ignore[arg-type]
        return watch.round

    assert rounds(1e-9, 2.0, 2e10, failed=(1,)) == 3
    assert rounds(None, 2.0, 1.9e10, 2e10) == 4
    assert rounds(0.0, 0.5, 0.99) is None and rounds(0.0, 0.5, 1.0) == 3
    assert rounds(-3.0, -3e10) == 2 and rounds(2.0, float("inf")) == 2


def test_the_digits_are_clipped_as_the_protocol_says() -> None:
    import yaml

    for name in ("protocols/digits.yaml", "quickstart.yaml", "smoke.yaml"):
        file = REPO / "configs" / name
        assert yaml.safe_load(file.read_text())["trainer"] == {"gradient_clip_val": 10}, file.name


# -- significance --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        # the differences 1 and 1 + 2e-15 gave p = 0.000
        ([0.3, 0.7], [-0.7, -0.3], "a is ahead of b by 1.00 ± 0.00 points in each of 2 seeds"),
        ([12, 11], [10, 10], "a is ahead of b by 1.50 ± 0.71 points over 2 seeds; a test needs 3"),
        (
            [50 + 1e-13, 60, 70],
            [40, 50, 60],
            "a is ahead of b by 10.00 ± 0.00 points in each of 3 seeds; "
            "without any spread there is no test",
        ),
        ([1, 3], [3, 1], "a and b are level: 0.00 ± 2.83 points apart over 2 seeds"),
        ([1, 3.002], [3, 1], "a and b are level: 0.00 ± 2.83 points apart over 2 seeds"),
        ([1, 2.999], [3, 1], "a and b are level: 0.00 ± 2.83 points apart over 2 seeds"),
        ([1 + 1e-14, 3], [1, 3], "a and b are equal"),
        ([2], [1], "a is ahead of b by 1.00 points; one seed says nothing of its significance"),
    ],
)
def test_no_test_of_nothing(one: list[float], other: list[float], text: str) -> None:
    assert lead("a", dict(enumerate(one)), "b", dict(enumerate(other))) == text
    assert "significant at" not in text and "p =" not in text


def test_a_small_p_is_no_zero() -> None:
    """t = 10 / (0.1/√3) = 173 with two degrees of freedom: p = 1 - t/√(t² + 2) = 3.3e-5."""
    text = lead("a", {0: 9.9, 1: 10.0, 2: 10.1}, "b", dict.fromkeys(range(3), 0.0))
    assert text.endswith("over 3 seeds, paired t-test p < 0.001: significant at 5 %")


def only(*methods: str, seeds: tuple[int, ...] = (0, 1, 2), **kwargs: Any) -> Any:
    axes = {"alpha": {"1": {}}, "method": {method: {} for method in methods}}
    return study(axes=axes, seeds=list(seeds), **({"measures": ["best"]} | kwargs))


def by(table: Laid) -> list[tuple[str, int]]:
    return [(value.text, value.rank) for value in table.rows[0][1:]]


def test_no_best_is_marked_over_other_seeds() -> None:
    """B has the harder seed alone: its mean is no worse method's."""
    it = only("A", "B", "C")
    values = {("1", "A"): [[0.9], [0.5]], ("1", "B"): [[0.8]], ("1", "C"): [[0.1], [0.1]]}
    (table,) = make_tables(it, results(it, values))
    assert [rank for _, rank in by(table)] == [0, 0, 0]
    assert [text for text, _ in by(table)] == ["70.00 ± 28.28 †", "80.00 ‡", "10.00 ± 0.00 †"]
    assert table.notes == [
        "† of seeds 0, 1 only",
        "‡ of seed 0 only",
        "best: A is ahead of B by 10.00 points; one seed says nothing of its significance; "
        "no best is marked, as not all have the same seeds",
    ]


def test_a_value_that_is_no_number_is_missing() -> None:
    it = only("A", "B", seeds=(0, 1))
    values = {("1", "A"): [[0.9], [float("nan")]], ("1", "B"): [[0.8], [0.8]]}
    (table,) = make_tables(it, results(it, values))
    assert by(table) == [("90.00 †", 0), ("80.00 ± 0.00", 0)]
    assert "nan" not in table.to_markdown()
    (group,) = make_groups([fake("A", seed, [acc]) for seed, acc in enumerate([0.9, float("inf")])])
    assert overview([group])[0]["best"] == "90.00 (1 of 2)"


def test_two_best_leave_no_second() -> None:
    it = only("A", "B", "C", seeds=(0,))
    values = {("1", "A"): [[0.9]], ("1", "B"): [[0.9]], ("1", "C"): [[0.8]]}
    (table,) = make_tables(it, results(it, values))
    assert [rank for _, rank in by(table)] == [1, 1, 0]
    values = {("1", "A"): [[0.9]], ("1", "B"): [[0.8]], ("1", "C"): [[0.8]]}
    (table,) = make_tables(it, results(it, values))
    assert [rank for _, rank in by(table)] == [1, 2, 2]


def test_many_tests_are_told_to_be_many() -> None:
    it = study(measures=["best"], seeds=[0, 1, 2])
    values = {
        (alpha, method): [[base], [base + 0.01], [base + 0.005 * n]]
        for alpha in ("1", "0.1")
        for n, (method, base) in enumerate({"FedAvg": 0.5, "FedGKD": 0.6}.items(), 1)
    }
    (table,) = make_tables(it, results(it, values))
    assert sum("t-test" in note for note in table.notes) == 2
    assert table.notes[-1] == "2 tests, not corrected for their number"


def test_ten_rounds_are_ten() -> None:
    it = only("A", "B", seeds=(0,), measures=["last10"])
    values = {("1", "A"): [[0.5] * 9], ("1", "B"): [[0.5] * 10]}
    (table,) = make_tables(it, results(it, values))
    assert [text for text, _ in by(table)] == ["50.00 †", "50.00"]
    assert table.notes[0] == "† the mean of 9 rounds: no more were tested"


# -- the paper's protocol ------------------------------------------------------------------------

DATA = {"CIFAR10": "CIFAR-10", "CIFAR100": "CIFAR-100", "TinyImageNet": "Tiny-ImageNet"}
DATA |= {"AGNews": "AG News", "SST5": "SST-5"}


def check_cell(name: str, labels: dict[str, str], parse: Parse) -> int:
    """A shipped study's cell is the paper's protocol, for every number of the paper; how many."""
    ours = plain_settings(parse(words(name, **labels)))
    ours["dataset"] = DATA[ours["data"]]
    ours["method"] = title_of(ours["model"])
    found = [
        (measure, row)
        for measure in study_file(name)["measures"]
        if (row := paper_row(name, {"dataset": ours["dataset"]} | labels, measure))
    ]
    for measure, row in found:
        assert differences(row, ours, measure) == [], (name, labels)
    return len(found)


@pytest.mark.parametrize("name", COUNTS)
def test_the_shipped_studies_have_the_papers_protocol(name: str, parse: Parse) -> None:
    every = cells(name)
    for labels in (every[0], every[-1]):
        assert check_cell(name, labels, parse) > 0


@pytest.mark.slow
def test_every_cell_has_the_papers_protocol(parse: Parse) -> None:
    counts = {n: sum(check_cell(n, labels, parse) for labels in cells(n)) for n in COUNTS}
    assert counts == COUNTS, "each of the paper's 229 numbers"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--rounds 30 --model.local_epochs 10", "rounds 30 instead of 100, local_epochs 10 inst"),
        ("--data.num_clients 10", "num_clients 10 instead of 20"),
        ("--data.participation 0.4", "participation 0.4 instead of 0.2"),
        ("--data.batch_size 32", "batch_size 32 instead of 64"),
        ("--data.partition.alpha 1", "partition.alpha 1.0 instead of 0.1"),
        ("--data.partition.balanced false", "partition.balanced False instead of True"),
        ("--data.partition IID", "partition IID instead of Dirichlet"),
        ("--data.augment false", "augment False instead of True"),
        ("--model.optimizer.lr 0.01", "optimizer.lr 0.01 instead of 0.05"),
        ("--model.optimizer torch.optim.Adam", "optimizer Adam instead of SGD"),
        ("--model.server_optimizer.lr 0.5", "server_optimizer.lr 0.5 instead of 1"),
        ("--model.net fedgkd_pl.ResNet20", "net ResNet20 instead of ResNet8"),
        ("--model.net.norm batch", "net.norm batch instead of group"),
        ("--model.buffer_size 1", "buffer_size 1 instead of 5"),
        ("--model.gamma 0.1", "gamma 0.1 instead of 0.2"),
        ("--model.local_steps 5", "local_steps 5 instead of none"),
        ("--trainer.gradient_clip_val null", "gradient_clip_val none instead of 10"),
        ("--trainer.precision bf16-mixed", "precision bf16-mixed instead of 32-true"),
    ],
)
def test_what_differs_is_told(flags: str, told: str, parse: Parse) -> None:
    row = paper_row("overview", {"dataset": "CIFAR-10", "alpha": "0.1", "method": "FedGKD"}, "best")
    assert row is not None
    settings = parse(["--config", "cifar10_fedgkd.yaml", *flags.split()])
    ours = plain_settings(settings) | {"dataset": "CIFAR-10", "method": "FedGKD"}
    found = ", ".join(differences(row, ours, "best"))
    assert told in found
    if "--model.optimizer torch" not in flags and "IID" not in flags:  # which bring settings along
        assert found.count("instead") == flags.count("--")


def test_the_length_matters_where_it_matters() -> None:
    ours = {"data": "", "model": "", "rounds": 10}
    row = {"table": "rounds", "dataset": "CIFAR-10", "method": "FedAvg", "alpha": "0.1"}
    row |= {"participation": "", "buffer_size": "", "loss": ""}
    assert "rounds 10 instead of 100" in differences(row, ours, "best")
    assert not [each for each in differences(row, ours, "round10") if each.startswith("rounds")]
    assert differences(row, {"rounds": 100}, "best") == [
        "settings not known: the run has no config.yaml"
    ]


def short_table() -> Laid:
    """Three seeds of FedAvg with half of the rounds, two of FedProx that are the paper's."""
    axes = {"dataset": {"CIFAR-10": {}}, "alpha": {"0.1": {}}, "method": {"FedAvg": {}, "MOON": {}}}
    it = study(axes=axes, rows=["dataset", "alpha"], measures=["best"], paper="overview")
    runs = []
    for seed in (0, 1):
        for method in ("FedAvg", "MOON"):
            run = grouped(method, seed, 0.1, **({"mu": 5, "tau": 0.5} if method == "MOON" else {}))
            if method == "MOON":
                run.settings["model"]["init_args"]["net"]["init_args"]["projection"] = 256
                run.summary["diverged_round"] = 28 if seed else None
            else:
                run.summary["rounds"] = 50
                run.settings["data"]["init_args"]["batch_size"] = 32
            labels = {"dataset": "CIFAR-10", "alpha": "0.1", "method": method}
            runs.append((Cell(labels, seed, ()), run))
    return make_tables(it, runs)[0]


DIFFERS = "rounds 50 instead of 100"
SMALLER = "batch_size 32 instead of 64"


def test_marks_in_every_format() -> None:
    table = short_table()
    markdown = table.to_markdown()
    assert "(69.22 ± 0.91 †)" in markdown and "(71.12 ± 0.69)" in markdown, "MOON's is the paper's"
    assert re.search(rf"- † .*{SMALLER}.*{DIFFERS}|- † .*{DIFFERS}.*{SMALLER}", markdown)
    assert "50.00 ± 0.00 ‡" in markdown
    cure = "clients diverged: seed 1 from round 28 on; try --trainer.gradient_clip_val 10"
    assert f"- ‡ {cure}" in markdown
    latex = table.to_latex()
    assert r"(69.22$\pm$0.91 \dag{})" in latex and r"0.00 \ddag{}" in latex
    assert r"\small \dag{} " in latex and r"batch\_size 32 instead of 64" in latex
    page = table.to_html()
    assert "<small>paper 69.22 ± 0.91 †</small>" in page and "<li>† " in page and SMALLER in page
    assert "<small>paper 71.12 ± 0.69</small>" in page and "<li>‡ clients diverged" in page
    screen = io.StringIO()
    Console(file=screen, width=140).print(table.to_rich())
    assert "(69.22 ± 0.91 †)" in screen.getvalue() and "± 0.00 ‡" in screen.getvalue()


def test_a_number_we_have_not_is_not_compared() -> None:
    axes = {"method": {"FedAvg": {}}}
    columns = {"rows": ["method"], "columns": ["measure"], "measures": ["round1", "round10"]}
    it = study(axes=axes, seeds=[0], paper="rounds", **columns)
    (table,) = make_tables(it, [(Cell({"method": "FedAvg"}, 0, ()), fake("FedAvg", 0, [0.1]))])
    assert "| FedAvg | 10.00 | - (36.30 ± 1.24) |" in table.to_markdown()
    assert table.notes == ["round 10: no run has so many rounds, the longest 1"]


def test_marks_in_the_report(tmp_path: Path) -> None:
    runs = [grouped("FedAvg", seed, 0.1) for seed in (0, 1)]
    for run in runs:
        run.settings["data"]["init_args"]["batch_size"] = 32
    runs[1].summary["diverged_round"] = 7
    notes = Footnotes()
    (row,) = overview(make_groups(runs), notes)
    assert row["method"] == "FedAvg †" and row["paper's best"] == "69.22 ‡"
    assert notes.lines[1] == "‡ batch_size 32 instead of 64"
    write_page(runs, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<td>69.22 ‡</td>" in page and "<li>‡ batch_size 32 instead of 64</li>" in page
    assert "<li>† clients diverged: seed 1 from round 7 on; try --trainer." in page
    assert "averaged model" not in page  # there is none


def test_sst5_stands_beside_the_papers_number() -> None:
    """Its four clients a round are 0.4 of ten."""
    run = grouped("FedAvg", 0, 0.1, clients=10)
    run.summary.update({"dataset": "sst5", "rounds": 10, "rounds_asked": 10})
    run.settings["model"]["init_args"]["local_epochs"] = 3
    assert make_groups([run])[0].paper is None, "two clients a round"
    run.settings["data"]["init_args"]["participation"] = 0.4
    row = paper_row("text", {"dataset": "SST-5", "alpha": "0.1", "method": "FedAvg"}, "best")
    assert row is not None
    (group,) = make_groups([run])
    assert group.paper == (float(row["mean"]), float(row["std"]))
    assert "net ResNet8 instead of TextClassifier" in group.differs


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
    assert code == 0 and out.count("FedAvg") == 2
    assert out.splitlines()[-2:] == [
        "3 older runs of runs/x not shown: --all",
        "1 unfinished run of runs/x not shown",
    ]
    code, out, _ = run("report", "--all", "runs/x", "runs/y")
    assert code == 0 and out.count("FedAvg") == 5 and "older" not in out
    for words_ in (("--over_seeds",), ("--format", "md")):
        code, out, _ = run("report", *words_, "runs")
        assert code == 0 and "1 run with settings and seed of another not shown" in out
        assert "1 unfinished run of runs not shown" in out and "older" not in out
    assert run("report", "--format", "html", "runs")[0] == 0
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert "<li>1 unfinished run of runs not shown</li>" in page
    shutil.rmtree(begun)
    assert "not shown" not in run("report", "runs/y")[1]


def test_report_tells_of_clients_that_diverged(run: Command, tmp_path: Path) -> None:
    finished(tmp_path / "runs" / "x" / "version_0", diverged_round=3)
    code, out, _ = run("report", "runs")
    assert code == 0 and "FedAvg †" in out
    assert "† clients diverged from round 3 on; try --trainer.gradient_clip_val 10" in out
    code, out, _ = run("report", "--format", "md", "runs")
    assert "| FedAvg † |" in out and "- † clients diverged: seed 0 from round 3 on; try" in out
    file = tmp_path / "runs" / "x" / "version_0" / "summary.json"
    file.write_text(file.read_text().replace('"diverged_round": 3', '"diverged_round": "x"'))
    assert run("report", "runs")[0] == 2


def test_runs_of_unknown_settings_are_marked_and_told_apart() -> None:
    runs = [
        Run(Path(f"run{number}"), fake("FedAvg", seed, [0.5] * 10).summary)
        for number, seed in enumerate((0, 0, 1))
    ]
    groups = make_groups(runs)
    assert [group.name for group in groups] == ["FedAvg, run0", "FedAvg, run1", "FedAvg, run2"]
    notes = Footnotes()
    marked = [row["method"] for row in overview(groups, notes)]
    assert marked == ["FedAvg, run0 †", "FedAvg, run1 †", "FedAvg, run2 †"]
    assert notes.lines == ["† settings not known (no config.yaml): not averaged with others"]


def test_runs_of_different_length_are_not_one_number() -> None:
    runs = [fake("FedAvg", seed, [0.5] * (seed + 12), rounds_asked=30) for seed in range(2)]
    assert overview(make_groups(runs))[0]["rounds"] == "12–13"


def test_a_point_over_c_is_of_one_kind_of_run() -> None:
    from fedgkd_pl.errors import SettingError

    one, other = grouped("FedAvg", 0, 0.1), grouped("FedAvg", 1, 0.1)
    participation(make_groups([one, other]))
    other.settings["data"]["init_args"]["num_clients"] = 100
    with pytest.raises(SettingError, match="differ in more than the seed"):
        participation(make_groups([one, other]))


# -- too few rounds ------------------------------------------------------------------------------

STUDY = """
# A small study
seeds: [0]
config: digits/fedavg.yaml
set: {rounds: 1, model.local_steps: 1, data.participation: 0.1}
measures: [MEASURES]
rows: []
axes:
  method:
    FedAvg: {model: FedAvg}
""".lstrip()


def test_a_study_that_cannot_be_measured_is_refused(run: Command, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(STUDY.replace("MEASURES", "round10, round20"))
    told = "error: rounds: the study measures only round10, round20, and no cell has so many rounds"
    for flags in (("--rounds", "2"), ("--dry_run", "--rounds", "2")):
        code, _, err = run("compare", "s.yaml", *flags)
        assert (code, err) == (2, f"{told} (got 2)\n")
    assert not (tmp_path / "runs").exists()
    code, _, err = run("compare", "s.yaml", "--dry_run", "--rounds", "10")
    assert code == 0 and err == "warning: round20: 1 of 1 cells have fewer rounds\n"


def test_measures_that_are_not_to_be_had_are_told(run: Command, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(STUDY.replace("MEASURES", "best, last10, round1, round10"))
    code, out, err = run("compare", "s.yaml")
    assert code == 0, err
    warned = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert warned == [
        "warning: round10: 1 of 1 cells have fewer rounds",
        "warning: last10: the mean of all rounds where there are fewer than ten",
    ]
    assert "round 10: no run has so many rounds, the longest 1" in out
    row = next(csv.DictReader((tmp_path / "runs" / "s" / "results.csv").open()))
    assert row["round10"] == "" and row["best"] == row["round1"] == row["last10"]
