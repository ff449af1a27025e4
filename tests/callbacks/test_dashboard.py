"""What TensorBoard shows of a run, asked of TensorBoard's own server over its HTTP API."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlencode

import numpy as np
import pytest
import yaml
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.callbacks.dashboard import CHARTS, Dashboard, layout
from fedgkd_pl.cli.main import main
from fedgkd_pl.plots import figures
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear

OTHERS = ("ClientDrift", "LocalModels", "Forgetting", "TeacherAgreement", "Communication")
OTHERS += ("AveragedModel", "ClientEvaluation")
Ask = Callable[..., Any]


def tensorboard(folder: Path) -> Ask:
    """TensorBoard's server on a folder, in process; to be asked by plugin and route."""
    from tensorboard import default, program
    from tensorboard.backend import application
    from tensorboard.backend.event_processing.data_ingester import LocalDataIngester
    from werkzeug.test import Client

    board = program.TensorBoard(default.get_plugins())
    once = ("--load_fast=false", "--reload_task=blocking", "--reload_interval=0")
    board.configure(argv=["tensorboard", "--logdir", str(folder), *once])
    data = LocalDataIngester(board.flags)
    data.start()
    app = application.TensorBoardWSGIApp(
        board.flags, board.plugin_loaders, data.data_provider, None, data.deprecated_multiplexer
    )
    client = Client(app)

    def ask(route: str, post: Any = None, **query: Any) -> Any:
        address = f"/data/plugin/{route}?{urlencode(query)}"
        answer = client.get(address) if post is None else client.post(address, json=post)
        assert answer.status_code == 200, (address, answer.get_data(as_text=True))
        return answer.get_json() if answer.mimetype == "application/json" else answer.get_data()

    return ask


@pytest.fixture
def _no_pictures() -> None:
    """They are drawn here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds, which was ended after round 2 and resumed."""
    parent: Path = tmp_path_factory.mktemp("resumed")
    words = ["fit", "--config", "quickstart.yaml", "--output_dir", str(parent)]
    words += ["--model.local_epochs", "1", "--data.client_test_fraction", "0.2"]
    for name in (*OTHERS, "Dashboard"):
        words.append(f"--trainer.callbacks+=fedgkd_pl.{name}")
    words += ["--trainer.callbacks.every_n_rounds", "2"]
    run = parent / "quickstart" / "version_0"
    assert main([*words, "--rounds", "2"]) == 0
    assert main(["fit", "--resume", str(run), "--rounds", "3"]) == 0
    return run


@pytest.fixture(scope="module")
def ask(folder: Path) -> Ask:
    return tensorboard(folder.parent)


RUN = "version_0"


def tags_of(chart: dict[str, Any]) -> Iterator[str]:
    yield from chart.get("multiline", {}).get("tag", [])
    for series in chart.get("margin", {}).get("series", []):
        yield from (series["value"], series["lower"], series["upper"])


def shown(ask: Ask, run: str = RUN) -> dict[str, dict[str, set[str]]]:
    """By category and chart the tags that TensorBoard finds; each that is named finds some."""
    charts: dict[str, dict[str, set[str]]] = {}
    for category in ask("custom_scalars/layout")["category"]:
        for chart in category["chart"]:
            found = charts.setdefault(category["title"], {}).setdefault(chart["title"], set())
            for tag in tags_of(chart):
                answer = ask("custom_scalars/scalars", run=run, tag=tag)
                assert answer["regex_valid"] and answer["tag_to_events"], f"{chart}: {tag}"
                found.update(answer["tag_to_events"])
    return charts


def test_charts_of_what_belongs_together(ask: Ask) -> None:
    charts = shown(ask)
    assert {(category, name) for category in charts for name in charts[category]} == {
        (category, name) for _, category, name, _ in CHARTS
    }
    losses = {"client/loss_mean", "client/ce_mean", "client/kd_mean"}
    assert charts["losses"]["clients: the whole and its parts"] == losses
    parts = {"test": ("test/", "average/"), "validation": ("val/", "average/val_")}
    for split, tags in parts.items():  # apart: a run has one colour
        for category, value in (("accuracy", "acc"), ("losses", "loss")):
            for model, tag in zip(("global", "averaged"), tags, strict=True):
                assert charts[category][f"{model} model, {split}"] == {f"{tag}{value}"}
    names = [f"{kind}_acc_{what}" for kind in ("global", "local") for what in ("mean", "worst10")]
    assert charts["accuracy"]["clients' own samples"] == {f"clients/{name}" for name in names}
    assert charts["forgetting"] == {"over classes": {"forgetting/mean", "forgetting/max"}}
    found = [c for category in ask("custom_scalars/layout")["category"] for c in category["chart"]]
    margins = {c["title"]: c["margin"]["series"] for c in found if "margin" in c}
    names = [f"client/acc_{part}" for part in ("mean", "p10", "p90")]
    places = ("value", "lower", "upper")
    expected = [dict(zip(places, names, strict=True))]
    assert margins["acc: mean, 10th to 90th percentile"] == expected


def test_the_settings_are_shown_once(ask: Ask) -> None:
    assert ask("text/tags") == {RUN: ["config/text_summary"]}
    (text,) = ask("text/text", run=RUN, tag="config/text_summary")
    code = re.search(r"<code[^>]*>(.*)</code>", text["text"], re.DOTALL)
    assert code is not None
    settings = yaml.safe_load(code[1].replace("&quot;", '"'))
    assert settings["model.init_args.gamma"] == 0.2
    assert settings["data.class_path"] == "fedgkd_pl.Digits"


def test_the_confusion_matrix_is_an_image(ask: Ask) -> None:
    from PIL import Image

    assert ask("images/tags")[RUN].keys() == {"partition", "test/confusion"}
    images = ask("images/images", run=RUN, tag="test/confusion", sample=0)
    assert [image["step"] for image in images] == [2, 3]
    pictures = [ask(f"images/individualImage?{image['query']}&") for image in images]
    assert all(min(Image.open(BytesIO(picture)).size) > 100 for picture in pictures)
    assert pictures[0] != pictures[1]


def logger_of(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(folder, "", "")


def server(net: nn.Module, **kwargs: Any) -> FedAvg:
    return FedAvg(net, optimizer=partial(SGD, lr=0.5), engine=LocalEngine(workers=1), **kwargs)


def test_the_test_sets_confusion_with_the_truth_in_rows(tmp_path: Path) -> None:
    data, model = Table(val_fraction=0.2), server(linear())
    callback = Dashboard(every_n_rounds=2)
    with patch.object(figures, "confusion_chart", wraps=figures.confusion_chart) as drawn:
        trainer = fit(model, data, 5, callbacks=[callback], logger=logger_of(tmp_path))
        trainer.validate(model, data, verbose=False)
        trainer.test(model, data, verbose=False)
    titles = [call.args[1] for call in drawn.call_args_list]
    assert titles == [f"table, round {number}" for number in (2, 4, 5)]
    state = {name: t.numpy() for name, t in model.net.state_dict().items()}
    guesses = (data.x[:6] @ state["weight"].T + state["bias"]).argmax(1)
    counts = np.zeros((3, 3))
    np.add.at(counts, (data.y[:6], guesses), 1)
    assert not np.array_equal(counts, counts.T), "rows and columns could be exchanged unseen"
    np.testing.assert_array_equal(drawn.call_args.args[0], counts)


def test_no_chart_of_what_is_not_measured() -> None:
    found = {name for charts in layout(()).values() for name in charts}
    assert found == {name for needed, _, name, _ in CHARTS if not needed}
