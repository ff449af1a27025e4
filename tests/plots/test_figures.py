"""Figures: what is drawn is the data, worked out here in NumPy; what looks on changes nothing."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from fedgkd_pl import MLP, FedAvg, FedGKD, LocalEngine, RunFiles
from fedgkd_pl.callbacks.feature_map import FeatureMap, embed
from fedgkd_pl.methods import discover
from fedgkd_pl.plots import figures as draw
from fedgkd_pl.plots import style
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch.optim import SGD

from examples.toy import toy_figure
from tests.conftest import Table, fit, quiet_trainer, same

# -- colours ---------------------------------------------------------------------------------------

RGB_TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
PAGES = ("#FFFFFF", "#F7F8FA", "#16181B", "#1E1E1E")


def linear_rgb(value: str) -> Any:
    c = np.array([int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2's."""
    dark, light = sorted(float(linear_rgb(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light + 0.05) / (dark + 0.05)


# Machado, Oliveira, Fernandes: A physiologically-based model (2009), severity 1, of linear RGB
BLIND = {
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
OKABE_ITO = "#000000 #E69F00 #56B4E9 #009E73 #F0E442 #0072B2 #D55E00 #CC79A7".split()


def least_distance(palette: Any, eyes: Any) -> float:
    """Of two colours in CIELAB, for some eyes."""
    seen = np.clip([np.array(eyes) @ linear_rgb(value) for value in palette], 0, 1)
    xyz = seen @ np.array(RGB_TO_XYZ).T / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1)
    return float(apart[np.triu_indices(len(lab), 1)].min())


def test_colour_blind_eyes_tell_the_palette_apart_as_okabe_and_itos() -> None:
    ours, theirs = (
        min(least_distance(palette, eyes) for eyes in BLIND.values())
        for palette in (style.PALETTE, OKABE_ITO)
    )
    assert ours >= theirs > 16


def test_colours_can_be_told_apart_on_light_and_dark_pages() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert {each.colour for each in style.STYLES} == set(style.PALETTE)
    assert len(set(style.PALETTE)) == len({each.symbol for each in style.STYLES}) == 9
    for page in PAGES:
        assert contrast(style.TEXT, page) > 3.8
        assert all(contrast(value, page) >= 3 for value in style.PALETTE)
    names = ["FedGKD", *(f"γ = {gamma}" for gamma in range(8))]
    chosen = style.colours(names)
    assert list(chosen) == names and sorted(chosen.values()) == sorted(style.PALETTE)
    assert chosen["FedGKD"] == "#2070B0"
    assert len(style.colours(str(number) for number in range(30))) == 30


def test_a_method_has_one_colour_however_it_is_written() -> None:
    assert style.style("FedGKD").colour == "#2070B0"
    for name in ("FedGKD-Vote", "FedGKDVote", "fedgkd_vote", "fedgkd vote"):
        assert style.style(name).colour == "#40A070"
    assert style.style("FedGKDPlus").colour == style.style("FedGKD+").colour == "#B84810"
    assert (
        style.style("FedDistillPlus").colour
        == style.style("FedDistill+").colour
        != style.style("FedDistill").colour
    )
    titles = [each.title for each in discover().values()]
    assert len({style.style(title)[:2] for title in titles}) == len(titles) > 9
    assert style.style("mine").colour == style.style("mine").colour in style.PALETTE


# -- files -----------------------------------------------------------------------------------------


def small() -> Figure:
    return draw.learning_curves({"FedAvg": [{1: 10.0, 2: 20.0}, {1: 12.0, 2: 28.0}]}, "α = 0.1")


def test_files_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    for kind in ("svg", "png", "pdf"):
        for name in "ab":
            style.save(small(), tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert "α = 0.1</text>" in text and "communication round</text>" in text
    assert "<dc:date>" not in text
    from PIL import Image

    image = np.array(Image.open(tmp_path / "a.png"))
    assert image.shape[2] == 4 and image[0, 0, 3] == 0, "the background is transparent"
    assert dict(mpl.rcParams) == before


def test_figures_of_one_page_do_not_share_ids() -> None:
    one, two = (style.to_svg(small(), prefix) for prefix in ("one", "two"))
    assert one.startswith('<svg id="one" ') and "<metadata>" not in one
    found = []
    for text, prefix in (one, "one"), (two, "two"):
        elements = list(ElementTree.fromstring(text).iter())
        ids = {element.get("id") for element in elements if element.get("id")}
        assert all(name == prefix or name.startswith(f"{prefix}-") for name in ids)
        links = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
        assert links and set(links) <= ids
        assert f"#{prefix} *{{" in text and ">*{" not in text
        found.append(ids)
    assert not found[0] & found[1]
    assert two.replace("two", "one") == one


# -- curves ----------------------------------------------------------------------------------------


def vertices(band: Any) -> set[tuple[float, float]]:
    return {(round(float(x), 6), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}


def points(x: Any, y: Any) -> set[tuple[float, float]]:
    pairs = zip(x, y, strict=True)
    return {(round(float(a), 6), round(float(b), 6)) for a, b in pairs}


def test_learning_curves_are_mean_and_deviation_over_seeds() -> None:
    values = np.random.default_rng(0).normal(50, 5, (3, 4))
    rounds = [2, 4, 6, 8]
    seeds = [dict(zip(rounds, row.tolist(), strict=True)) for row in values]
    seeds[0] |= {10: 99.0}  # which the others have not reached
    curves = {"FedGKD": seeds, "FedProx": [{2: 1.0, 4: 3.0}], "nothing": [{}]}
    figure = draw.learning_curves(curves, "title", ylabel="%")
    (axes,) = figure.axes
    gkd, prox = axes.get_lines()
    assert gkd.get_label() == "FedGKD" and prox.get_label() == "FedProx"
    assert list(gkd.get_xdata()) == rounds
    mean, std = values.mean(0), values.std(0, ddof=1)
    np.testing.assert_allclose(gkd.get_ydata(), mean)
    assert (gkd.get_color(), prox.get_color()) == ("#2070B0", "#8080E8")
    assert (gkd.get_linestyle(), prox.get_linestyle()) == ("-", "--")
    (band,) = axes.collections  # none for one seed
    expected = points(rounds * 2, [*(mean - std), *(mean + std)])
    assert expected <= vertices(band)
    assert (min(y for _, y in vertices(band)), max(y for _, y in vertices(band))) == pytest.approx(
        ((mean - std).min(), (mean + std).max()), abs=1e-5
    )
    assert axes.get_title() == "title" and axes.get_ylabel() == "%"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedGKD", "FedProx"]


def test_panels_share_the_y_axis_and_one_legend() -> None:
    panels = {f"α = {a}": {"FedAvg": [{1: a, 2: 10 * a}], "FedGKD": [{1: 2 * a}]} for a in (1, 2)}
    panels["α = 4"] = {"MOON": [{1: 4.0, 2: 40.0}]}
    figure = draw.curve_panels(panels, columns=2)
    assert [axes.get_title() for axes in figure.axes] == list(panels)
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    for axes, (name, a) in zip(figure.axes, zip(panels, (1, 2, 4), strict=True), strict=True):
        assert list(axes.get_lines()[0].get_ydata()) == [a, 10 * a], name
    assert [axes.get_ylabel() != "" for axes in figure.axes] == [True, False, True]
    assert [axes.get_xlabel() != "" for axes in figure.axes] == [False, True, True]
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"FedAvg", "FedGKD", "MOON"}


def test_error_bars_are_mean_and_deviation_over_seeds() -> None:
    shares = {1.0: [70.0], 0.1: [80.0, 100.0]}
    (axes,) = draw.participation_panels({"": {"FedGKD": shares}}).axes
    line = axes.containers[0][0]
    assert list(line.get_xdata()) == list(axes.get_xticks()) == [0.1, 1.0]
    assert list(line.get_ydata()) == [90, 70]
    assert (line.get_color(), line.get_marker()) == ("#2070B0", ">")
    segment = axes.containers[0][2][0].get_segments()[0]  # type: ignore[index]
    np.testing.assert_allclose(segment[:, 1], [90 - 200**0.5, 90 + 200**0.5])
    curves = {"a": [{1: 0.0}, {1: 20.0}]}
    for axes in draw.task_panels({"accuracy": curves, "forgetting": curves}).axes:
        (segment,) = axes.containers[0][2][0].get_segments()  # type: ignore[index]
        np.testing.assert_allclose(segment[:, 1], [10 - 200**0.5, 10 + 200**0.5], atol=1e-9)


def test_clients_from_worst_to_best() -> None:
    values = np.random.default_rng(2).uniform(0, 1, (4, 3))
    rows = [(2 * t + 2, values[t, c]) for c in range(3) for t in range(4)]
    (axes,) = draw.client_accuracies(pd.DataFrame(rows, columns=["round", "acc"])).axes
    rounds = [2, 4, 6, 8]
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == rounds
    values *= 100
    np.testing.assert_allclose(line.get_ydata(), values.mean(1))
    band, dots = axes.collections
    assert points(rounds * 2, [*values.min(1), *values.max(1)]) <= vertices(band)
    drawn = points(*dots.get_offsets().T)  # type: ignore[union-attr]
    assert drawn == points(np.repeat(rounds, 3), values.ravel())


# -- tables ----------------------------------------------------------------------------------------


def test_bars_are_sorted_with_the_papers_numbers_beside() -> None:
    values = {"FedAvg": [50.0, 54.0], "FedGKD": [71.0, 73.0], "MOON": [60.0], "none": []}
    figure = draw.bar_panels(
        {"": values}, paper={"": {"FedAvg": 51.5, "FedGKD": 70.0, "other": 3.0}}
    )
    (axes,) = figure.axes
    patches = axes.patches
    assert [patch.get_width() for patch in patches] == [52, 60, 72]  # type: ignore[attr-defined]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["FedAvg", "MOON", "FedGKD"]
    drawn = [to_hex(patch.get_facecolor()).upper() for patch in patches]
    assert drawn == [style.style(name).colour for name in names]
    markers = next(c for c in axes.collections if c.get_label() == "paper")
    assert points(*markers.get_offsets().T) == {(51.5, 0), (70.0, 2)}  # type: ignore[union-attr]
    errors = [c for c in axes.collections if hasattr(c, "get_segments")]  # one seed: none
    ends = [s[:, 0].tolist() for each in errors for s in each.get_segments()]
    # deviations with ddof 1: of 50 and 54 √8, of 71 and 73 √2
    np.testing.assert_allclose(ends, [[52 - 8**0.5, 52 + 8**0.5], [72 - 2**0.5, 72 + 2**0.5]])
    written = [text.get_text() for text in axes.texts]
    assert written == ["52.00 ± 2.83", "60.00", "72.00 ± 1.41"]
    assert axes.get_xlim()[0] == 0
    assert not draw.bar_panels({"": {"a": [1.0]}}).legends
    assert [t.get_text() for t in draw.bar_panels({"": {"a": [12345.6]}}).axes[0].texts] == [
        "12,346"
    ]


def test_confusion_is_normalised_by_row() -> None:
    matrix = torch.tensor([[6, 2, 0], [0, 0, 0], [1, 1, 2]])
    figure = draw.confusion_chart(matrix, "round 3", names=["cat", "dog", "owl"])
    axes = figure.axes[0]
    shares = [[0.75, 0.25, 0], [0, 0, 0], [0.25, 0.25, 0.5]]
    np.testing.assert_allclose(axes.images[0].get_array(), shares)
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written[0, 0] == "75" and written[1, 0] == "25" and written[2, 2] == "50"
    assert written[0, 2] == "25" and written[1, 1] == "0" and len(written) == 9
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["cat", "dog", "owl"]
    many = draw.confusion_chart(np.eye(13), "")
    assert not many.axes[0].texts


# -- points in the plane ---------------------------------------------------------------------------


def a_map(**kwargs: Any) -> draw.FeatureMapData:
    rng = np.random.default_rng(3)
    data = draw.FeatureMapData(
        *(rng.normal(size=(40, 2)), rng.normal(size=(40, 2)), rng.permutation(40) % 10),
        *(0.9031, 0.4473, 4, 30),
    )
    return replace(data, **kwargs)


def test_feature_maps_show_each_class_in_its_colour() -> None:
    data = a_map()
    figure = draw.feature_map([data])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["global, round 30: 90.3 %", "client 4: 44.7 %"]
    for axes, where in zip(figure.axes, (data.global_points, data.local_points), strict=True):
        assert len(axes.collections) == 10
        for number, dots in enumerate(axes.collections):
            mine = where[data.labels == number]
            np.testing.assert_allclose(dots.get_offsets(), mine)
            assert to_hex(dots.get_facecolor()[0]).upper() == style.PALETTE[number % 9]
    first, last = (figure.axes[0].collections[k].get_paths()[0].vertices for k in (0, 9))
    assert len(first) != len(last), "the tenth class has the first one's colour, not its marker"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [str(k) for k in range(10)]
    names = ("FedAvg", "FedProx", "FedGKD")
    paper = draw.feature_map([a_map(name=name) for name in names])
    titles = [axes.get_title() for axes in paper.axes]
    assert titles[:3] == [f"{name}, global, round 30: 90.3 %" for name in names]
    assert titles[3:] == [f"{name}, client 4: 44.7 %" for name in names]


# -- the callback ----------------------------------------------------------------------------------

SIZES = (9, 5, 7, 6)


def server(method: Any = FedAvg, **kwargs: Any) -> Any:
    seed_everything(0, verbose=False)
    net = MLP(in_features=4, hidden=[6], num_classes=3)
    return method(
        net, optimizer=partial(SGD, lr=0.3), engine=LocalEngine(workers=1), local_epochs=2, **kwargs
    )


class Answers(Callback):
    """What the clients answered, by round and client."""

    def __init__(self) -> None:
        self.models: dict[tuple[int, int], Any] = {}
        self.after: dict[int, Any] = {}

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any, size: int) -> None:
        weights = {name: tensor.clone() for name, tensor in update.weights.items()}
        self.models[pl_module.round, update.client] = weights

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        state = pl_module.global_state()
        self.after[pl_module.round] = {name: t.clone() for name, t in state.items()}


def by_hand(state: Any, x: Any) -> tuple[Any, Any]:
    """Features and predictions of the net of :func:`server`, in NumPy."""
    w1, b1, w2, b2 = (tensor.numpy() for tensor in state.values())
    features = np.maximum(x @ w1.T + b1, 0)
    return features, (features @ w2.T + b2).argmax(1)


def test_a_map_is_of_the_round_and_of_the_first_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_two(features: Any, seed: int) -> Any:
        """t-SNE of a handful of points turns on their last bits."""
        return features[:, :2]

    monkeypatch.setattr("fedgkd_pl.callbacks.feature_map.embed", first_two)
    data, answers = Table(sizes=SIZES, participation=0.5), Answers()
    callbacks = [FeatureMap(every_n_rounds=2, max_samples=5), answers, RunFiles(str(tmp_path))]
    fit(server(), data, 5, callbacks=callbacks)
    files = sorted(tmp_path.glob("features-*"))
    assert [file.name for file in files] == [f"features-round00{n}.npz" for n in (2, 4, 5)]
    x, y = data.x[:6], data.y[:6]  # the test set
    rows = np.random.default_rng(0).permutation(6)[:5]
    for file, number in zip(files, (2, 4, 5), strict=True):
        found = draw.read_feature_map(file, "FedAvg")
        first = min(client for at, client in answers.models if at == number)
        assert (found.round, found.client, found.name) == (number, first, "FedAvg")
        assert found.labels.tolist() == y[rows].tolist()
        for which, state in (
            ("global", answers.after[number]),
            ("local", answers.models[number, first]),
        ):
            features, guess = by_hand(state, x)
            assert getattr(found, f"{which}_acc") == pytest.approx((guess == y).mean())
            placed = getattr(found, f"{which}_points")
            np.testing.assert_allclose(placed, features[rows, :2], rtol=1e-5, atol=1e-6)


def test_nobody_notices_that_somebody_looks(tmp_path: Path) -> None:
    class Noisy(MLP):
        """Draws numbers whenever it is called."""

        def forward(self, x: Any) -> Any:
            return super().forward(x) + 1e-3 * torch.randn(3)

    def run(*callbacks: Any) -> Any:
        seed_everything(0, verbose=False)
        net = Noisy(in_features=4, hidden=[6], num_classes=3)
        model = FedGKD(net, gamma=1.0, optimizer=partial(SGD, lr=0.3), engine=LocalEngine(1))
        fit(model, Table(sizes=SIZES), 3, callbacks=[*callbacks])
        modes = [module.training for module in net.modules()]
        return model.global_state(), modes, torch.get_rng_state(), np.random.get_state()[1]

    alone, watched = run(), run(FeatureMap(every_n_rounds=1), RunFiles(str(tmp_path)))
    assert len(list(tmp_path.glob("features-*"))) == 3
    assert same(alone[0], watched[0]) and alone[1] == watched[1]
    assert torch.equal(alone[2], watched[2]) and np.array_equal(alone[3], watched[3])


def test_a_resumed_run_writes_the_maps_of_an_unbroken_one(tmp_path: Path) -> None:
    def run(name: str, rounds: int, ckpt: Any = None, *more: Any) -> None:
        files = RunFiles(str(tmp_path / name))
        callbacks = [FeatureMap(every_n_rounds=2), files, *more]
        trainer = quiet_trainer(max_epochs=rounds, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(server(FedGKD), Table(sizes=SIZES, participation=0.5), ckpt_path=ckpt)

    save = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=False)
    run("whole", 4, None, ModelCheckpoint(tmp_path / "unused"))
    run("begun", 2, None, save)
    run("resumed", 4, tmp_path / "last.ckpt", ModelCheckpoint(tmp_path / "unused"))
    whole, resumed = (tmp_path / name / "features-round004.npz" for name in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()
    assert len(list((tmp_path / "resumed").glob("features-*"))) == 1


def test_the_embedding_keeps_clusters_apart_and_repeats() -> None:
    rng = np.random.default_rng(4)
    labels = np.repeat([0, 1, 2], 20)
    features = 20 * np.eye(3, 8)[labels] + rng.normal(size=(60, 8))
    state = np.random.get_state()[1].copy()
    one = embed(features)
    assert np.array_equal(one, embed(features))
    assert np.array_equal(state, np.random.get_state()[1])
    far = np.linalg.norm(one[:, None] - one, axis=-1) + np.where(np.eye(60), np.inf, 0)
    assert (labels[far.argmin(1)] == labels).all(), "everyone's nearest is of its class"
    assert embed(features[:, :1]).shape == (60, 2)


@pytest.mark.parametrize("features", [np.full((40, 8), 3.0), np.full((40, 8), np.nan)])
def test_features_of_a_collapsed_net_are_one_point(features: Any) -> None:
    """sklearn's t-SNE ends the process (SIGSEGV) where all features are alike."""
    assert np.array_equal(embed(features), np.zeros((40, 2)))
    other = features.copy()
    other[:, 0] = np.arange(40.0)
    assert np.isnan(other).any() or np.unique(embed(other), axis=0).shape[0] == 40


def test_a_run_that_diverges_does_not_hide_the_others() -> None:
    calm = {n: 1.0 + n / 10 for n in range(1, 11)}
    figure = draw.learning_curves({"FedAvg": [calm], "MOON": [calm | {10: 1e9}]})
    assert figure.axes[0].get_yscale() == "log" and figure.axes[0].get_ylim() == (0.55, 2e9)
    assert draw.learning_curves({"FedAvg": [calm]}).axes[0].get_yscale() == "linear"
    figure = draw.learning_curves({"FedAvg": [calm | {1: 0.0}], "MOON": [calm | {10: 1e9}]})
    assert figure.axes[0].get_yscale() == "linear", "nothing to take the logarithm of"


def test_the_toys_two_methods_differ_in_the_distillation_alone() -> None:
    figure, numbers = toy_figure(rounds=2, gamma=0.0, local_epochs=1)
    assert numbers["FedGKD"] == numbers["FedAvg"]
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:4] == titles[4:]
    for axes, other in zip(figure.axes[:4], figure.axes[4:], strict=True):
        assert np.array_equal(axes.images[0].get_array(), other.images[0].get_array())
