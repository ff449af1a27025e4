"""What TensorBoard shows of a run, asked of TensorBoard's own server over its HTTP API."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
import yaml
from fedgkd_pl import Digits, Dirichlet, FedAvg, FedDistill, FedGKD, LocalEngine
from fedgkd_pl.callbacks import dashboard
from fedgkd_pl.callbacks.agreement import TeacherAgreement
from fedgkd_pl.callbacks.dashboard import Dashboard, even_sample
from fedgkd_pl.callbacks.drift import ClientDrift
from fedgkd_pl.cli.main import main
from fedgkd_pl.data.partition import ClientIndex
from fedgkd_pl.errors import SettingError
from fedgkd_pl.runs.keep import LastRound
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same

OTHERS = ("drift.ClientDrift", "local_models.LocalModels", "forgetting.Forgetting")
OTHERS += ("agreement.TeacherAgreement", "communication.Communication", "averaged.AveragedModel")
OTHERS += ("client_evaluation.ClientEvaluation",)
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


@pytest.fixture(scope="module", params=["whole", "resumed"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds; one of them was ended after round 2 and resumed."""
    parent: Path = tmp_path_factory.mktemp(request.param)
    words = ["fit", "--config", "quickstart.yaml", "--output_dir", str(parent)]
    words += ["--model.local_epochs", "1", "--data.client_test_fraction", "0.2"]
    for name in (*OTHERS, "dashboard.Dashboard"):
        words.append(f"--trainer.callbacks+=fedgkd_pl.callbacks.{name}")
    words += ["--trainer.callbacks.every_n_rounds", "2", "--trainer.callbacks.samples", "50"]
    run = parent / "quickstart" / "version_0"
    if request.param == "whole":
        assert main([*words, "--rounds", "3"]) == 0
    else:
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


PERCENTILES = "mean, 10th to 90th percentile"
PLAIN = {
    "accuracy": {"global model": {"val/acc", "test/acc"}},
    "losses": {
        "clients: the whole and its parts": {"client/loss_mean", "client/ce_mean"},
        "global model": {"val/loss", "test/loss"},
    },
    "client spread": {
        f"acc: {PERCENTILES}": {"client/acc_mean", "client/acc_p10", "client/acc_p90"},
        f"loss: {PERCENTILES}": {"client/loss_mean", "client/loss_p10", "client/loss_p90"},
    },
    "bytes": {"of a round": {"comm/bytes_down", "comm/bytes_up"}},
}


def test_charts_of_what_belongs_together(ask: Ask) -> None:
    expected: Any = deepcopy(PLAIN)
    expected["losses"]["clients: the whole and its parts"].add("client/kd_mean")
    spread = {"local/acc_mean", "local/acc_min", "local/acc_max"}
    expected["accuracy"]["local models: mean, worst to best"] = spread
    names = [f"{kind}_acc_{what}" for kind in ("global", "local") for what in ("mean", "worst10")]
    own = {f"clients/{name}" for name in names}
    expected["accuracy"]["clients' own samples: mean, worst tenth"] = own
    expected["accuracy"]["averaged model"] = {"average/acc", "average/val_acc"}
    expected["losses"]["averaged model"] = {"average/loss", "average/val_loss"}
    expected["bytes"]["so far, in 10⁶"] = {"comm/total_mb_down", "comm/total_mb_up"}
    expected["drift"] = {
        "how far clients move": {"drift/norm_mean", "drift/norm_max"},
        "in how different directions": {"drift/cosine", "drift/diversity"},
    }
    expected["forgetting"] = {"over classes": {"forgetting/mean", "forgetting/max"}}
    agreement = {"teacher/agreement_mean", "teacher/agreement_min"}
    expected["teacher"] = {"agreement of clients": agreement, "accuracy": {"teacher/acc"}}
    expected["seconds"] = {"of a round": {"time/clients", "time/evaluation"}}
    assert shown(ask) == expected
    charts = [c for category in ask("custom_scalars/layout")["category"] for c in category["chart"]]
    margins = {c["title"]: c["margin"]["series"] for c in charts if "margin" in c}
    names = [f"client/acc_{part}" for part in ("mean", "p10", "p90")]
    places = ("value", "lower", "upper")
    assert margins[f"acc: {PERCENTILES}"] == [dict(zip(places, names, strict=True))]


def test_a_point_for_every_round_and_no_more(ask: Ask, folder: Path) -> None:
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    tags = ask("scalars/tags")[RUN]
    assert {"test/acc", "val/loss", "client/acc_p10", "test/class_acc/3"} <= tags.keys()
    for tag in tags:
        if tag.startswith("hp/"):
            continue
        points = ask("scalars/scalars", run=RUN, tag=tag)
        # in round 1 nobody teaches, and there is nothing to forget
        rounds = [2, 3] if tag.startswith(("client/kd", "forgetting/")) else [1, 2, 3]
        assert [step for _, step, _ in points] == rounds, tag
        if tag in rows[0]:
            told = [float(rows[step - 1][tag]) for step in rounds]
            assert [value for *_, value in points] == pytest.approx(told), tag


def test_one_layout_and_one_text_after_a_resume_too(ask: Ask, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted(folder.glob("events.*"))
    assert len(files) == (2 if "resumed" in str(folder) else 1)
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    tags = [(value.tag, event.step) for event in events for value in event.summary.value]
    assert len(set(tags)) == len(tags)
    assert [tag for tag, _ in tags].count("custom_scalars__config__") == 1
    assert ask("text/tags") == {RUN: ["config/text_summary"]}
    (text,) = ask("text/text", run=RUN, tag="config/text_summary")
    code = re.search(r"<code[^>]*>(.*)</code>", text["text"], re.DOTALL)
    assert code is not None
    settings = yaml.safe_load(code[1].replace("&quot;", '"'))
    assert settings["model.init_args.gamma"] == 0.2
    assert settings["data.class_path"] == "fedgkd_pl.Digits"
    assert settings["model.init_args.net.init_args.hidden"] == [64]
    assert settings["model.init_args.local_steps"] is None


def test_the_confusion_matrix_is_an_image(ask: Ask) -> None:
    from PIL import Image

    assert ask("images/tags")[RUN].keys() == {"partition", "test/confusion"}
    images = ask("images/images", run=RUN, tag="test/confusion", sample=0)
    assert [image["step"] for image in images] == [2, 3]
    pictures = [ask(f"images/individualImage?{image['query']}&") for image in images]
    assert all(min(Image.open(BytesIO(picture)).size) > 100 for picture in pictures)
    assert pictures[0] != pictures[1]


def test_the_projector_shows_the_final_model(ask: Ask, folder: Path) -> None:
    assert ask("projector/runs") == [RUN]
    (embedding,) = ask("projector/info", run=RUN)["embeddings"]
    assert (embedding["tensorName"], embedding["tensorShape"]) == ("features", [50, 64])
    answer = ask("projector/tensor", run=RUN, name="features")
    features = np.frombuffer(answer, dtype=np.float32).reshape(50, 64)
    header, *rows = ask("projector/metadata", run=RUN, name="features").decode().splitlines()
    assert header == "label\tclient"

    # 50 of 20 clients: 2 of each and a third of every second, evenly spread over what it has
    cut = Dirichlet(alpha=0.1, balanced=True)
    data = Digits(num_clients=20, partition=cut, seed=0, client_test_fraction=0.2)
    data.setup()
    parts = [
        (client, part, 2 + (client % 2 == 0)) for client, part in enumerate(data.client_data.index)
    ]
    drawn = [(c, part[k * len(part) // share]) for c, part, share in parts for k in range(share)]
    examples = data.client_data.examples
    assert rows == [f"{examples.targets[row]}\t{client}" for client, row in drawn]
    taken = examples[torch.tensor([row for _, row in drawn])]
    x = taken.transform(taken.inputs, None).flatten(1).numpy()
    state = {name: t.numpy() for name, t in load_file(folder / "global.safetensors").items()}
    hidden = x @ state["features.1.weight"].T + state["features.1.bias"]
    np.testing.assert_allclose(features, np.maximum(hidden, 0), atol=1e-5)

    kept = {
        file.name for file in folder.iterdir() if file.name.startswith(("features", "proj", "0"))
    }
    assert kept == {"features.tsv", "features_of.tsv", "projector_config.pbtxt"}


def test_hparams_show_the_final_accuracies(ask: Ask, folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    experiment = ask("hparams/experiment", {"experimentName": ""})
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"model.init_args.gamma", "data.init_args.partition.init_args.alpha"} <= names
    metrics = [info["name"] for info in experiment["metricInfos"]]
    asked: dict[str, Any] = {
        "experimentName": "",
        "allowedStatuses": statuses,
        "startIndex": 0,
        "sliceSize": 9,
    }
    columns = [{"metric": name} for name in metrics] + [{"hparam": "model.init_args.gamma"}]
    asked["colParams"] = [column | {"includeInResult": True} for column in columns]
    (group,) = ask("hparams/session_groups", asked)["sessionGroups"]
    assert group["hparams"]["model.init_args.gamma"] == 0.2
    values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
    for name in ("best_test_acc", "final_test_acc", "mean_last_10_test_acc"):
        assert values[f"hp/{name}"] == pytest.approx(summary[name]), name


class Net(nn.Module):
    """Features with places, dropout, and layers in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(6).eval()
        self.classifier = nn.Linear(3, 3)

    def features(self, x: Tensor) -> Tensor:
        noise = 0 * torch.rand(1)  # takes from the random numbers in eval mode, too
        return self.drop(self.frozen(self.wide(x))).view(-1, 3, 2, 1) + noise

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


class StopAfter(Callback):
    """Ends a run after a round, as EarlyStopping does; or as a kill does, when all is committed."""

    def __init__(self, number: int, kill: bool = False) -> None:
        self.number, self.kill = number, kill

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = pl_module.round >= self.number

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.kill:
            raise InterruptedError


class Finish(Callback):
    """What the command line adds to a resume of a run that a callback had ended."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """The matrices and titles of what is drawn."""
    import fedgkd_pl.plots.figures as figures

    charts: list[tuple[Any, str]] = []
    real = figures.confusion_chart

    def chart(matrix: Any, title: str, names: Any) -> Any:
        charts.append((np.array(matrix), title))
        return real(matrix, title, names)

    monkeypatch.setattr(figures, "confusion_chart", chart)
    return charts


def steps(folder: Path, tag: str) -> list[int]:
    images = tensorboard(folder)("images/images", run=".", tag=tag, sample=0)
    return [image["step"] for image in images]


def logger_of(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(folder, "", "")


def server(net: nn.Module, **kwargs: Any) -> FedAvg:
    return FedAvg(net, optimizer=partial(SGD, lr=0.5), engine=LocalEngine(workers=1), **kwargs)


def test_the_test_sets_confusion_with_the_truth_in_rows(tmp_path: Path, drawn: Any) -> None:
    data, model = Table(val_fraction=0.2), server(linear())
    callback = Dashboard(every_n_rounds=2, samples=0)
    trainer = fit(model, data, 5, callbacks=[callback], logger=logger_of(tmp_path))
    assert [title for _, title in drawn] == [f"table, round {number}" for number in (2, 4, 5)]
    state = {name: t.numpy() for name, t in model.net.state_dict().items()}
    guesses = (data.x[:6] @ state["weight"].T + state["bias"]).argmax(1)
    counts = np.zeros((3, 3))
    np.add.at(counts, (data.y[:6], guesses), 1)
    assert not np.array_equal(counts, counts.T), "rows and columns could be exchanged unseen"
    np.testing.assert_array_equal(drawn[-1][0], counts)
    trainer.validate(model, data, verbose=False)
    trainer.test(model, data, verbose=False)
    assert len(drawn) == 3
    assert steps(tmp_path, "test/confusion") == [2, 4, 5]
    assert not list(tmp_path.glob("proj*"))


def test_the_last_round_is_drawn_where_a_callback_ends_the_run(tmp_path: Path, drawn: Any) -> None:
    callbacks = [Dashboard(samples=3), StopAfter(2)]
    fit(server(linear()), Table(), 5, callbacks=callbacks, logger=logger_of(tmp_path))
    assert [title for _, title in drawn] == ["table, round 2"]


def test_and_where_it_is_killed_before_that(tmp_path: Path, drawn: Any) -> None:
    settings: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    last = LastRound()
    last.dirpath = str(tmp_path)
    killed = [Dashboard(), StopAfter(2, kill=True), last]
    with pytest.raises(InterruptedError):
        fit(server(linear()), Table(), 5, callbacks=killed, logger=logger_of(tmp_path), **settings)
    assert drawn == []
    callbacks = [Dashboard(), Finish(), LastRound()]
    settings |= {"max_epochs": 5, "callbacks": callbacks, "logger": logger_of(tmp_path)}
    quiet_trainer(**settings).fit(server(linear()), Table(), ckpt_path=tmp_path / "last.ckpt")
    assert [title for _, title in drawn] == ["table, round 2"]
    assert steps(tmp_path, "test/confusion") == [2]
    assert (tmp_path / "features.tsv").exists()


def test_features_are_the_final_nets_and_nothing_else_changes(tmp_path: Path) -> None:
    def trained(*callbacks: Callback) -> tuple[nn.Module, Tensor, Table]:
        torch.manual_seed(3)
        net, data = Net(), Table(sizes=(4, 3), val_fraction=0.2)
        fit(server(net), data, 3, callbacks=list(callbacks), logger=logger_of(tmp_path))
        return net, torch.get_rng_state(), data

    without, random, _ = trained()
    net, random_after, data = trained(Dashboard())
    assert same(without.state_dict(), net.state_dict()) and torch.equal(random, random_after)
    assert [m.training for m in net.modules()] == [m.training for m in without.modules()]
    assert any(m.training for m in net.modules())
    state = {name: t.numpy().astype(float) for name, t in net.state_dict().items()}
    (first, second) = data.client_data.index
    rows = [*first, *second]
    wide = data.x[rows] @ state["wide.weight"].T + state["wide.bias"]
    normal = (wide - state["frozen.running_mean"]) / np.sqrt(state["frozen.running_var"] + 1e-5)
    normal = normal * state["frozen.weight"] + state["frozen.bias"]
    pooled = normal.reshape(7, 3, 2).mean(2)
    np.testing.assert_allclose(np.loadtxt(tmp_path / "features.tsv"), pooled, atol=1e-5)
    labels = [f"{y}\t{client}" for y, client in zip(data.y[rows], [0] * 4 + [1] * 3, strict=True)]
    assert (tmp_path / "features_of.tsv").read_text().splitlines() == ["label\tclient", *labels]


def test_a_net_that_hides_its_features_shows_logits(tmp_path: Path) -> None:
    data, model = Table(sizes=(8, 5)), server(linear())
    settings = {"logger": logger_of(tmp_path), "precision": "bf16-mixed"}
    fit(model, data, 1, callbacks=[Dashboard(samples=4)], **settings)
    first, second = data.client_data.index  # 8 and 5 samples
    rows = [first[0], first[4], second[0], second[2]]
    state = {name: t.numpy() for name, t in model.net.state_dict().items()}
    logits = data.x[rows] @ state["weight"].T + state["bias"]
    np.testing.assert_allclose(np.loadtxt(tmp_path / "features.tsv"), logits, atol=0.05)


def test_two_fits_with_one_logger_are_one_entry(tmp_path: Path) -> None:
    logger, model = logger_of(tmp_path), server(linear())
    for _ in range(2):
        fit(model, Table(), 2, callbacks=[Dashboard(samples=5)], logger=logger)
    ask = tensorboard(tmp_path)
    (embedding,) = ask("projector/info", run=".")["embeddings"]
    assert embedding["tensorShape"] == [5, 3]
    assert len(ask("text/tags")) == 0, "there are no settings without RunFiles"


def test_samples_are_drawn_evenly_of_clients() -> None:
    index = ClientIndex([np.arange(8), np.arange(8, 13), np.array([], int), np.array([13])])
    rows, owners = even_sample(index, 7)  # 3 of each; of the last its only one
    assert owners.tolist() == [0, 0, 0, 1, 1, 1, 3]
    assert rows.tolist() == [0, 2, 5, 8, 9, 11, 13]  # 0, 8/3, 16/3 and 8 + (0, 5/3, 10/3)
    rows, owners = even_sample(index, 99)
    assert rows.tolist() == list(range(14))
    rows, owners = even_sample(ClientIndex([np.array([k]) for k in range(100)]), 4)
    assert rows.tolist() == owners.tolist() == [0, 25, 50, 75]


def test_other_loggers_are_left_alone(tmp_path: Path, drawn: Any) -> None:
    callback = Dashboard(every_n_rounds=1)
    fit(server(linear()), Table(), 2, callbacks=[callback], logger=False)
    boards = [logger_of(tmp_path / "a"), logger_of(tmp_path / "b")]
    tables = CSVLogger(tmp_path / "c", "", "")
    assert drawn == [] and callback.state_dict() == {}
    fit(server(linear()), Table(), 2, callbacks=[callback], logger=[tables, *boards])
    assert len(drawn) == 4
    assert {file.name for file in (tmp_path / "c").iterdir()} == {"metrics.csv"}
    for name in "ab":
        ask = tensorboard(tmp_path / name)
        assert ask("projector/runs") == ["."] and steps(tmp_path / name, "test/confusion") == [1, 2]
        expected: Any = deepcopy(PLAIN)
        expected["accuracy"]["global model"] = {"test/acc"}
        expected["losses"]["global model"] = {"test/loss"}
        assert shown(ask, ".") == expected


def test_methods_that_are_compared_share_their_charts(tmp_path: Path) -> None:
    """TensorBoard merges layouts; a chart that differs would be there twice, once without lines."""
    settings: Any = {"optimizer": partial(SGD, lr=0.5), "engine": LocalEngine(workers=1)}
    models = FedAvg(linear(), **settings), FedGKD(linear(), **settings)
    for model in models:
        callbacks = [Dashboard(samples=0), ClientDrift(), TeacherAgreement()]
        logger = logger_of(tmp_path / "compared" / type(model).__name__)
        fit(model, Table(val_fraction=0.2), 2, callbacks=callbacks, logger=logger)
    ask = tensorboard(tmp_path / "compared")
    titles = [c["title"] for c in ask("custom_scalars/layout")["category"]]
    assert titles == [*PLAIN, "drift", "teacher"]
    drift, teacher = (ask("custom_scalars/layout")["category"][place]["chart"] for place in (4, 5))
    assert (len(drift), len(teacher)) == (2, 2)
    for model in models:
        shown(ask, type(model).__name__)

    callbacks = [Dashboard(samples=0), ClientDrift(), TeacherAgreement()]
    alone = FedDistill(linear(), **settings)
    logger = logger_of(tmp_path / "alone")
    fit(alone, Table(val_fraction=0.2), 2, callbacks=callbacks, logger=logger)
    assert list(shown(tensorboard(tmp_path / "alone"), ".")) == list(PLAIN)


def test_event_files_are_read_once_a_session(
    tmp_path: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading takes as long as the run is old: one for every drawing would be quadratic."""
    read: list[Path] = []
    points = dashboard._points
    monkeypatch.setattr(dashboard, "_points", lambda at: (read.append(at), points(at))[1])
    callback, model = Dashboard(every_n_rounds=1, samples=0), server(linear())
    for sessions in (1, 2):
        fit(model, Table(), 3, callbacks=[callback], logger=logger_of(tmp_path))
        assert read == [tmp_path] * sessions
        assert len(drawn) == 3, "the second session finds the first's"


def test_bad_settings() -> None:
    with pytest.raises(SettingError, match="every_n_rounds"):
        Dashboard(every_n_rounds=0)
    with pytest.raises(SettingError, match="samples"):
        Dashboard(samples=-1)


class Layers(nn.Module):
    """A net that means something else by ``features``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList([nn.Linear(4, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features[0](x)  # type: ignore[no-any-return]


def test_a_net_that_means_something_else_by_features(tmp_path: Path) -> None:
    net = Layers()
    fit(server(net), Table(), 1, callbacks=[Dashboard()], logger=logger_of(tmp_path))
    written = np.loadtxt(tmp_path / "features.tsv", delimiter="\t")
    assert written.shape == (13, 3), "the logits of all samples"


def test_what_a_killed_session_drew_is_not_drawn_again(tmp_path: Path, drawn: Any) -> None:
    """Killed when a callback had ended the run and its last round was drawn."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = Dashboard(every_n_rounds=10)
    confusion = torch.eye(3, dtype=torch.int64)
    for _ in range(2):
        callback.undrawn = {"round": 4, "confusion": confusion}
        logger = logger_of(tmp_path)
        model = server(linear())
        fit(model, Table(), 1, logger=logger)
        callback._draw(model.trainer, model)
        logger.experiment.flush()
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=False)
    events.Reload()
    assert [event.step for event in events.Images("test/confusion")] == [4]
