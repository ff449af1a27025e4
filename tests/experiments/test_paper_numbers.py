"""The paper's numbers are those of its TeX, and every one of them has a run that would make it."""

import csv
import re
from itertools import product

import pytest
from fedgkd_pl.experiments.study import read_study

from tests.conftest import REPO
from tests.support.shipped import CONFIGS, COUNTS, Parse, Row, Settings, cells, one, study, words

CSV = REPO / "fedgkd_pl" / "experiments" / "paper.csv"
TEX = REPO / "tests" / "fixtures" / "paper_tables.tex"
COLUMNS = "table,dataset,alpha,participation,buffer_size,loss,method,measure,mean,std".split(",")
METHODS = [method for method in CONFIGS if method != "FedDistill"]


def rows() -> list[Row]:
    with CSV.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(table: str, **wanted: str) -> tuple[str, str]:
    """The one mean and standard deviation with these labels."""
    ((mean, std),) = [
        (row["mean"], row["std"])
        for row in rows()
        if row["table"] == table and wanted.items() <= row.items()
    ]
    return mean, std


# The TeX, read as it is laid out: the labels of a number are those of its row and its column.
BEST = {"measure": "best"}
CIFAR10 = {"dataset": "CIFAR-10"}
HALF = CIFAR10 | {"alpha": "0.5"}
HARD = {"alpha": "0.1"}
GKD = {"method": "FedGKD"}
VOTE = {"method": "FedGKD-Vote"}
LAYOUT: dict[str, tuple[str, list[str], list[str], Row]] = {  # label, rows, columns, all
    "overview": ("table_compare", ["dataset", "alpha"], ["method"], BEST),
    "text": ("table_nlp", ["dataset", "alpha"], ["method"], BEST),
    "participation": ("table1_complete", ["method"], ["participation", "measure"], HALF),
    "rounds": ("acc_straggler", ["method"], ["caption", "measure"], CIFAR10 | HARD),
    "buffer": ("avg_teacher_buffer", ["dataset", "buffer_size"], ["alpha"], BEST | GKD),
    "buffer_vote": ("buffer_length", ["buffer_size"], ["alpha"], BEST | CIFAR10 | VOTE),
    "loss": ("loss_type", ["loss"], ["dataset"], BEST | HARD),
}


def plain(cell: str) -> str:
    """What a cell shows."""
    macros = {
        r"\systemled": "FedGKD-Vote",
        r"\systemplus": "FedGKD+",
        r"\system": "FedGKD",
        "$^{+}$": "+",
        r"$\pm$": "±",
        r"$\alpha$": "alpha",
    }
    for macro, text in macros.items():
        cell = cell.replace(macro, text)
    cell = re.sub(r"\\(hline|toprule|bottomrule|cline\{.*?\})", "", cell)
    cell = re.sub(r"\\(bf|textbf|underline|multirow\{\d\}\{\*\})\{(.*?)\}", r"\2", cell)
    return re.sub(r"\s+", " ", cell).strip()


def grid(label: str) -> list[list[str]]:
    """A table's cells; a wide one is repeated, a high one fills those below it."""
    tex = TEX.read_text(encoding="utf-8")
    (table,) = [
        part
        for part in re.findall(r"\\begin\{tabular\}\{\w+\}(.*?)\\end\{table", tex, re.DOTALL)
        if f"\\label{{tbl:{label}}}" in part
    ]
    lines: list[list[str]] = []
    for line in table.split(r"\end{tabular}")[0].split(r"\\"):
        cells: list[str] = []
        for cell in map(plain, line.split("&")):
            wide = re.fullmatch(r"\\multicolumn\{(\d)\}\{c\}\{(.*)\}", cell)
            cells += [wide[2]] * int(wide[1]) if wide else [cell]
        if any(cells):
            cells[0] = cells[0] or lines[-1][0]
            lines.append(cells)
    return lines


def printed(table: str) -> list[Row]:
    """The rows that a table of the TeX amounts to."""
    label, row_names, column_names, all_ = LAYOUT[table]
    lines = grid(label)
    heads, body = lines[: len(column_names)], lines[len(column_names) :]
    found = []
    for line in body:
        assert len(line) == len(heads[0])
        for place in range(len(row_names), len(line)):
            row = dict.fromkeys(COLUMNS, "") | all_ | {"table": table}
            row |= dict(zip(row_names, line, strict=False))
            row |= {name: head[place] for name, head in zip(column_names, heads, strict=True)}
            row.pop("caption", None)
            row |= {name: row[name].split("=")[-1] for name in ("alpha", "participation")}
            row |= {name: row[name].lower() for name in ("loss", "measure")}
            if table == "rounds":
                row["measure"] = f"round{row['measure']}"
            if table == "loss":
                row["method"] = "FedAvg" if row["loss"] == "none" else "FedGKD"
            row["mean"], row["std"] = (text.strip() for text in line[place].split("±"))
            found.append(row)
    return found


@pytest.mark.parametrize("table", COUNTS)
def test_the_numbers_are_those_of_the_tex(table: str) -> None:
    ours = {tuple(row.items()) for row in rows() if row["table"] == table}
    theirs = {tuple((column, row[column]) for column in COLUMNS) for row in printed(table)}
    assert len(theirs) == COUNTS[table]
    assert ours == theirs


def test_every_number_of_the_paper_has_a_cell_and_every_cell_a_number() -> None:
    for name, count in COUNTS.items():
        content = study(name)
        assert content["name"] == content["paper"] == name
        axes = [*content["axes"], "measure"]
        printed_ = [tuple(row[axis] for axis in axes) for row in rows() if row["table"] == name]
        of_paper = {row["measure"] for row in rows() if row["table"] == name}
        ours = {
            (*cell.values(), measure)
            for cell, measure in product(cells(name), content["measures"])
            if measure in of_paper
        }
        assert len(printed_) == len(ours) == count and set(printed_) == ours, name
        assert of_paper <= set(content["measures"])


@pytest.mark.parametrize("method", METHODS)
def test_overview_on_cifar10_is_the_shipped_config(method: str, parse: Parse) -> None:
    ours = words("overview", dataset="CIFAR-10", alpha="0.1", method=method)
    assert parse(ours) == parse(["--config", f"cifar10_{CONFIGS[method]}.yaml"])


@pytest.mark.parametrize("method", CONFIGS)
def test_digits_are_the_shipped_configs(method: str, parse: Parse) -> None:
    assert list(read_study("studies/digits.yaml").axes["method"])[:9] == list(CONFIGS)
    ours = parse(words("digits", method=method))
    theirs = parse(["--config", f"digits/{CONFIGS[method]}.yaml"])
    assert len(ours["trainer"].pop("callbacks")) == 7 and not theirs["trainer"].pop("callbacks")
    public, none = (settings["data"]["init_args"].pop("public") for settings in (ours, theirs))
    assert public["class_path"].endswith("HeldOut") and none is None  # one split for all methods
    assert ours == theirs


HEAD = {"net.projection": 256}
NO_HEAD = {"net.projection": None}
BY_HAND: dict[str, dict[str, Settings]] = {  # the paper's section on parameters
    "Tiny-ImageNet": {
        "FedAvg": NO_HEAD | {"net.norm": "group", "net.num_classes": 200},
        "FedProx": {"mu": 0.001},
        "MOON": HEAD | {"mu": 1, "tau": 0.5, "net.norm": "batch"},
        "FedDistill+": NO_HEAD | {"coefficient": 0.1},
        "FedGen": NO_HEAD | {"hidden": 2048},
        "FedGKD": NO_HEAD | {"gamma": 0.1, "net.norm": "group"},
        "FedGKD-Vote": NO_HEAD | {"lam": 0.1, "buffer_size": 5, "net.norm": "group"},
        "FedGKD+": HEAD | {"gamma": 0.1, "net.norm": "batch"},
    },
    "SST-5": {
        "MOON": HEAD | {"mu": 0.1, "tau": 0.5},
        "FedGen": NO_HEAD | {"hidden": 768, "optimizer.weight_decay": 0},
        "FedGKD-Vote": NO_HEAD | {"lam": 0.1, "buffer_size": 3, "local_epochs": 3},
    },
}


@pytest.mark.parametrize("dataset", BY_HAND)
def test_settings_of_the_paper(dataset: str, parse: Parse) -> None:
    name = "text" if dataset == "SST-5" else "overview"
    for method, expected in BY_HAND[dataset].items():
        settings = parse(words(name, dataset=dataset, alpha="0.1", method=method))
        class_name = CONFIGS[method].replace("_", "")
        assert settings["model"]["class_path"].lower() == f"fedgkd_pl.{class_name}"
        found = {key: one(settings, f"model.{key}") for key in expected}
        assert found == expected, method


def test_fedgkd_has_the_buffer_of_the_number_beside_it(parse: Parse) -> None:
    def buffer(name: str, **labels: str) -> str:
        return str(one(parse(words(name, method="FedGKD", **labels)), "model.buffer_size"))

    for dataset, alpha in product(("CIFAR-10", "CIFAR-100"), ("1", "0.5", "0.1")):
        labels = {"dataset": dataset, "alpha": alpha}
        once = number("overview", method="FedGKD", **labels)
        size = buffer("overview", **labels)
        assert number("buffer", buffer_size=size, **labels) == once, labels
    at_half = number("participation", method="FedGKD", participation="0.2", measure="best")
    size = buffer("participation", participation="0.2")
    assert number("buffer", buffer_size=size, dataset="CIFAR-10", alpha="0.5") == at_half
