"""Figures: what is drawn is the data, worked out here in NumPy; what looks on changes nothing."""

import re
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from fedgkd_pl import MLP, FedAvg, FedGKD, LocalEngine, RunFiles
from fedgkd_pl.callbacks.feature_map import FeatureMap, embed
from fedgkd_pl.errors import SettingError, StorageError
from fedgkd_pl.experiments.toy import sector, toy_figure
from fedgkd_pl.methods import MethodInfo, discover
from fedgkd_pl.plots import figures as draw
from fedgkd_pl.plots import plane, style
from fedgkd_pl.plots.feature_maps import read_feature_map
from fedgkd_pl.plots.partition import bubble_chart
from fedgkd_pl.plots.tasks import task_panels
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import nn
from torch.optim import SGD

from tests.conftest import Table, fit, linear, quiet_trainer, same

# -- colours ---------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes, 2009: how the severely colour-blind see linear RGB.
EYES = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
PAGES = ("#FFFFFF", "#F7F8FA", "#16181B", "#1E1E1E")
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")


@pytest.fixture
def _no_pictures() -> None:
    """They are drawn here."""


def linear_rgb(value: str) -> Any:
    c = np.array([int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2's."""
    dark, light = sorted(float(linear_rgb(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: Any) -> Any:
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
         [0.0193339, 0.1191920, 0.9503041]]
    )  # fmt: skip
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(a: str, b: str) -> float:
    """The distance in CIELAB to the eyes that see the smallest."""
    seen = [[lab(np.array(eye) @ linear_rgb(c)) for c in (a, b)] for eye in EYES.values()]
    return float(min(np.linalg.norm(x - y) for x, y in seen))


def test_colours_can_be_told_apart_on_light_and_dark_pages() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert {each.colour for each in style.STYLES} == set(style.PALETTE)
    assert len(set(style.PALETTE)) == len({each.symbol for each in style.STYLES}) == 9
    for page in PAGES:
        assert contrast(style.TEXT, page) > 3.8
        assert all(contrast(value, page) >= 3 for value in style.PALETTE)
    okabe_ito = min(apart(a, b) for a, b in combinations(OKABE_ITO, 2))
    for one, other in combinations(style.STYLES, 2):
        far = apart(one.colour, other.colour)
        assert far >= okabe_ito > 16
        assert far >= 18 or one.dash != other.dash, (one, other)


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
    assert style.style("mine").colour == style.style("mine").colour in style.PALETTE


def test_further_methods_have_colours_again_with_other_dashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tenth to the eighteenth are those of the first nine, but not the same line."""
    more = {
        f"New{n}": MethodInfo(f"New{n}", "somewhere", f"new method {n}", "", n)
        for n in range(9, 40)
    }
    known = discover()
    first = {name: info for name, info in known.items() if info.colour < 9}
    monkeypatch.setattr(style, "discover", lambda: first | more)
    assert style.style("New9") == style.style("new method 9") == ("#707070", "--", "*")
    assert style.style("New10") == ("#8080E8", ":", "X")
    again = [*first, *(f"New{n}" for n in range(9, 18))]
    assert len({style.style(name)[:2] for name in again}) == 18
    assert all(style.style(name).colour in style.PALETTE for name in more)
    chosen = style.colours(["New9", "FedAvg", "New10"])
    assert chosen["FedAvg"] == "#707070" and len(set(chosen.values())) == 3


def test_labels_of_one_figure_have_different_colours() -> None:
    names = ["FedGKD", *(f"γ = {gamma}" for gamma in range(8))]
    chosen = style.colours(names)
    assert list(chosen) == names and sorted(chosen.values()) == sorted(style.PALETTE)
    assert chosen["FedGKD"] == "#2070B0"
    assert len(style.colours(str(number) for number in range(30))) == 30


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
    with pytest.raises(SettingError, match=r"path: must end in one of \.svg, \.png, \.pdf"):
        style.save(small(), tmp_path / "a.jpeg")


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
    with pytest.raises(SettingError, match="prefix"):
        style.to_svg(small(), "a b")


def test_all_text_is_grey_and_nothing_is_filled() -> None:
    figure = small()
    (axes,) = figure.axes
    (legend,) = figure.legends
    words = [axes.title, axes.xaxis.label, axes.yaxis.label, *legend.get_texts()]
    assert {to_hex(word.get_color()).upper() for word in words} == {style.TEXT}
    assert figure.get_facecolor()[3] == axes.get_facecolor()[3] == 0


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


def test_smoothing_is_the_mean_of_the_last_values() -> None:
    curves = {"a": [{1: 1.0, 2: 3.0, 3: 8.0, 4: 10.0}]}
    (line,) = draw.learning_curves(curves, smooth=3).axes[0].get_lines()
    assert list(line.get_ydata()) == [1, 2, 4, 7]  # 1; 4/2; 12/3; 21/3
    with pytest.raises(SettingError, match="smooth"):
        draw.learning_curves(curves, smooth=0)


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


@pytest.mark.parametrize(
    ("label", "seeds", "ends"),
    [  # two seeds a and b: mean (a + b) / 2, deviation |a - b| / √2
        ("test accuracy, %", (80.0, 100.0), (90 - 200**0.5, 100)),
        ("clients' test accuracy, %", (0.0, 20.0), (0, 10 + 200**0.5)),
        ("test accuracy, %", (80.0, 120.0), (100 - 800**0.5, 120)),  # so they can be
        ("test loss", (0.0, 2.0), (0, 1 + 2**0.5)),
        ("test loss", (-2.0, 0.0), (-2, -1 + 2**0.5)),  # of a density
        ("distance from global", (0.0, 2.0), (0, 1 + 2**0.5)),
        ("cosine of two updates", (0.0, 2.0), (1 - 2**0.5, 1 + 2**0.5)),
        ("accuracy lost, % points", (0.0, 2.0), (1 - 2**0.5, 1 + 2**0.5)),
    ],
)
def test_bands_end_where_values_are_not_possible(
    label: str, seeds: tuple[float, float], ends: tuple[float, float]
) -> None:
    curves = {"a": [{1: value, 2: value} for value in seeds]}
    (axes,) = draw.learning_curves(curves, ylabel=label).axes
    (band,) = axes.collections
    assert {y for _, y in vertices(band)} == {round(end, 6) for end in ends}
    low, high = axes.get_ylim()
    room = 0.051 * (ends[1] - ends[0])  # Matplotlib's margin
    assert ends[0] - room < low and high < ends[1] + room


def test_error_bars_end_where_values_are_not_possible() -> None:
    (axes,) = draw.participation_panels({"": {"a": {0.1: [80.0, 100.0]}}}).axes
    (segment,) = axes.containers[0][2][0].get_segments()  # type: ignore[index]
    np.testing.assert_allclose(segment[:, 1], [90 - 200**0.5, 100])
    curves = {"a": [{1: 0.0}, {1: 20.0}]}
    for axes in task_panels({"accuracy": curves, "forgetting": curves}).axes:
        low = 0 if axes.get_title() == "accuracy" else 10 - 200**0.5
        (segment,) = axes.containers[0][2][0].get_segments()  # type: ignore[index]
        np.testing.assert_allclose(segment[:, 1], [low, 10 + 200**0.5], atol=1e-9)


def test_participation_is_mean_and_error_bars() -> None:
    table = np.random.default_rng(1).normal(60, 3, (3, 5))
    values = {"FedGKD": dict(zip((0.4, 0.1, 1.0), table, strict=True)), "FedAvg": {0.1: [7.0]}}
    (axes,) = draw.participation_panels({"α = 1": values}).axes  # type: ignore[dict-item]
    gkd, avg = axes.containers
    line, _, (error,) = gkd  # type: ignore[misc]
    order = [1, 0, 2]
    assert list(line.get_xdata()) == [0.1, 0.4, 1.0]
    mean, std = table.mean(1)[order], table.std(1, ddof=1)[order]
    np.testing.assert_allclose(line.get_ydata(), mean)
    ends = np.array([segment[:, 1] for segment in error.get_segments()])
    np.testing.assert_allclose(ends, np.stack([mean - std, mean + std], 1))
    assert (line.get_color(), line.get_marker()) == ("#2070B0", ">")
    assert list(avg[0].get_ydata()) == [7.0]
    assert list(axes.get_xticks()) == [0.1, 0.4, 1.0]
    three = draw.participation_panels({f"α = {a}": values for a in (1, 0.5, 0.1)})  # type: ignore
    assert [a.get_title() for a in three.axes] == ["α = 1", "α = 0.5", "α = 0.1"]


def test_clients_from_worst_to_best() -> None:
    values = np.random.default_rng(2).uniform(0, 100, (4, 3))
    rows = [(2 * t + 2, c, values[t, c]) for c in range(3) for t in range(4)]
    (axes,) = draw.client_accuracies(rows).axes
    rounds = [2, 4, 6, 8]
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == rounds
    np.testing.assert_allclose(line.get_ydata(), values.mean(1))
    band, dots = axes.collections
    assert points(rounds * 2, [*values.min(1), *values.max(1)]) <= vertices(band)
    drawn = points(*dots.get_offsets().T)  # type: ignore[union-attr]
    assert drawn == points([row[0] for row in rows], [row[2] for row in rows])


# -- tables ----------------------------------------------------------------------------------------


def test_bars_are_sorted_with_the_papers_numbers_beside() -> None:
    values = {"FedAvg": [50.0, 54.0], "FedGKD": [71.0, 73.0], "MOON": [60.0], "none": []}
    figure = draw.bars(values, paper={"FedAvg": 51.5, "FedGKD": 70.0, "other": 3.0})
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
    assert not draw.bars({"a": [1.0]}).legends
    assert [t.get_text() for t in draw.bars({"a": [12345.6]}).axes[0].texts] == ["12,346"]


def test_bars_of_several_panels_share_order_colours_and_axes() -> None:
    """FedGKD has the mean 55 over both panels, FedAvg 50; MOON 40 in the one that has it."""
    panels = {
        "α 0.1": {"FedAvg": [20.0], "FedGKD": [30.0, 34.0], "MOON": [40.0]},
        "α 1": {"FedGKD": [78.0], "FedAvg": [80.0]},
    }
    chosen = {"FedAvg": "#707070", "FedGKD": "#123456", "MOON": "#C078A8"}
    paper = {"α 1": {"FedAvg": 81.0}}
    figure = draw.bar_panels(panels, paper=paper, chosen=chosen)
    assert [axes.get_title() for axes in figure.axes] == list(panels)
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names == ["MOON", "FedAvg", "FedGKD"]
    drawn = [
        {
            names[round(patch.get_y() + patch.get_height() / 2)]: (  # type: ignore[attr-defined]
                patch.get_width(),  # type: ignore[attr-defined]
                to_hex(patch.get_facecolor()),
            )
            for patch in axes.patches
        }
        for axes in figure.axes
    ]
    assert drawn[0] == {
        **{"FedAvg": (20, "#707070"), "FedGKD": (32, "#123456"), "MOON": (40, "#c078a8")},
    }
    assert drawn[1] == {"FedAvg": (80, "#707070"), "FedGKD": (78, "#123456")}
    assert len({(*axes.get_xlim(), *axes.get_ylim()) for axes in figure.axes}) == 1
    (markers,) = (c for c in figure.axes[1].collections if c.get_label() == "paper")
    assert points(*markers.get_offsets().T) == {(81.0, 1)}  # type: ignore[union-attr]


def test_bubbles_read_on_light_and_dark_pages() -> None:
    figure = bubble_chart([[3, 0], [1, 4]], "digits")
    (axes,) = figure.axes
    words = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
    assert {to_hex(word.get_color()).upper() for word in words} == {style.TEXT}
    assert figure.get_facecolor()[3] == axes.get_facecolor()[3] == 0
    (colour,) = axes.collections[0].get_facecolor()  # type: ignore[union-attr]
    assert colour[3] == 1 and all(contrast(to_hex(colour), page) >= 3 for page in PAGES)


def test_pictures_of_tensorboard_are_smooth() -> None:
    """It drops the alpha channel: the edges of letters must be mixed with white before."""
    from torch.utils.tensorboard._utils import figure_to_image

    image = np.asarray(figure_to_image(style.opaque(small())))
    greys = image[0][(image[0] == image[1]) & (image[0] == image[2])]
    assert len(np.unique(greys)) > 50, "only the text's own grey"


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


def a_map(**kwargs: Any) -> plane.FeatureMapData:
    rng = np.random.default_rng(3)
    data = plane.FeatureMapData(
        *(rng.normal(size=(40, 2)), rng.normal(size=(40, 2)), rng.permutation(40) % 10),
        *(0.9031, 0.4473, 4, 30),
    )
    return replace(data, **kwargs)


def test_feature_maps_show_each_class_in_its_colour() -> None:
    data = a_map()
    figure = plane.feature_map([data])
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
    paper = plane.feature_map([a_map(name=name) for name in names])
    titles = [axes.get_title() for axes in paper.axes]
    assert titles[:3] == [f"{name}, global, round 30: 90.3 %" for name in names]
    assert titles[3:] == [f"{name}, client 4: 44.7 %" for name in names]


def test_boundaries_show_predictions_and_points() -> None:
    classes = np.array([[0, 1], [2, 3]])
    where, labels = np.array([[1.0, 2.0], [-1.0, 3.0], [2.0, 2.0]]), np.array([0, 1, 0])
    panel = plane.Boundary("user 1", classes, where, labels)
    empty = plane.Boundary("aggregate", classes, where[:0], labels[:0])
    figure = plane.decision_boundaries({"FedGKD": [panel, empty], "FedAvg": [panel, empty]})
    assert [axes.get_ylabel() for axes in figure.axes] == ["FedGKD", "", "FedAvg", ""]
    axes = figure.axes[0]
    (image,) = axes.images
    for (row, column), number in np.ndenumerate(classes):
        drawn = to_hex(image.get_array()[row, column, :3]).upper()  # type: ignore[index]
        assert drawn == style.PALETTE[number]
    assert image.origin == "lower" and list(image.get_extent()) == [-4, 4, -4, 4]
    for number, dots in enumerate(axes.collections):
        np.testing.assert_allclose(dots.get_offsets(), where[labels == number])
        assert to_hex(dots.get_facecolor()[0]).upper() == style.PALETTE[number]
    assert not figure.axes[1].collections


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
        found = read_feature_map(file, "FedAvg")
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
        """Draws numbers whenever it is called, and has a mode."""

        def forward(self, x: Any) -> Any:
            assert self.training == self.classifier.training
            return super().forward(x) + 1e-3 * torch.randn(3)

    def run(*callbacks: Any) -> Any:
        seed_everything(0, verbose=False)
        net = Noisy(in_features=4, hidden=[6], num_classes=3)
        net.features.append(nn.Dropout(0.5))
        model = FedGKD(net, gamma=1.0, optimizer=partial(SGD, lr=0.3), engine=LocalEngine(1))
        trainer = fit(model, Table(sizes=SIZES), 3, callbacks=[*callbacks])
        modes = [module.training for module in net.modules()]
        states = (torch.get_rng_state(), np.random.get_state()[1])
        return model.global_state(), modes, states, dict(trainer.callback_metrics)

    alone, modes, (torchs, numpys), logged = run()
    watched = run(FeatureMap(every_n_rounds=1), RunFiles(str(tmp_path)))
    assert len(list(tmp_path.glob("features-*"))) == 3
    assert same(alone, watched[0]) and modes == watched[1]
    assert torch.equal(torchs, watched[2][0]) and np.array_equal(numpys, watched[2][1])
    assert logged == watched[3]


def test_the_same_run_writes_the_same_bytes_and_no_pickle(tmp_path: Path) -> None:
    for name in "ab":
        callbacks = [FeatureMap(seed=5), RunFiles(str(tmp_path / name))]
        fit(server(), Table(sizes=SIZES), 1, callbacks=callbacks)
    one, two = (tmp_path / name / "features-round001.npz" for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    with np.load(one, allow_pickle=False) as file:
        kept = {name: file[name] for name in file.files}
    assert set(kept) == {
        *("global_points", "local_points", "labels", "global_acc", "local_acc", "client", "round")
    }
    assert all(array.dtype != object for array in kept.values())


@pytest.mark.parametrize("when", ["validation end", "epoch end"])
def test_a_resumed_run_writes_the_maps_of_an_unbroken_one(when: str, tmp_path: Path) -> None:
    def run(name: str, rounds: int, ckpt: Any = None, *more: Any) -> None:
        files = RunFiles(str(tmp_path / name))
        callbacks = [FeatureMap(every_n_rounds=2), files, *more]
        trainer = quiet_trainer(max_epochs=rounds, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(server(FedGKD), Table(sizes=SIZES, participation=0.5), ckpt_path=ckpt)

    epoch_end = when == "epoch end"
    save = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=epoch_end)
    run("whole", 4, None, ModelCheckpoint(tmp_path / "unused"))
    run("begun", 2, None, save)
    run("resumed", 4, tmp_path / "last.ckpt", ModelCheckpoint(tmp_path / "unused"))
    whole, resumed = (tmp_path / name / "features-round004.npz" for name in ("whole", "resumed"))
    assert whole.read_bytes() == resumed.read_bytes()
    assert len(list((tmp_path / "resumed").glob("features-*"))) == 1


def test_a_run_that_stops_early_has_its_last_map(tmp_path: Path) -> None:
    stop = EarlyStopping("test/acc", mode="max", patience=1, stopping_threshold=-1.0)
    trainer = fit(
        *(server(), Table(sizes=SIZES), 9), callbacks=[stop, FeatureMap(), RunFiles(str(tmp_path))]
    )
    (file,) = tmp_path.glob("features-*")
    assert trainer.current_epoch == 1 and file.name == "features-round001.npz"
    assert read_feature_map(file).round == 1


def test_without_run_files_the_map_is_the_loggers_and_in_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, "", "")
    callbacks = [FeatureMap(every_n_rounds=2)]
    fit(server(), Table(sizes=SIZES), 3, callbacks=callbacks, logger=logger)
    assert len(list(tmp_path.glob("features-round*.npz"))) == 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [image.step for image in events.Images("features")] == [2, 3]


def test_a_net_without_features_is_refused_in_one_line() -> None:
    model = FedAvg(linear(), engine=LocalEngine(workers=1))
    with pytest.raises(SettingError) as caught:
        fit(model, Table(), 1, callbacks=[FeatureMap()])
    text = str(caught.value)
    assert text.startswith("callbacks: FeatureMap needs") and "SplitNet" in text
    assert "Linear" in text and "\n" not in text


@pytest.mark.parametrize(
    ("setting", "value"),
    [("every_n_rounds", 0), ("max_samples", 3), ("split", "train"), ("seed", -1)],
)
def test_bad_settings(setting: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"^{setting}: must be"):
        FeatureMap(**{setting: value})


def test_damaged_maps_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "features-round001.npz"
    with pytest.raises(StorageError, match=r"features-round001\.npz: No such file"):
        read_feature_map(file)
    fit(server(), Table(sizes=SIZES), 1, callbacks=[FeatureMap(), RunFiles(str(tmp_path))])
    whole = file.read_bytes()
    for damage in (b"", b"text", whole[:-30], whole[: len(whole) // 2]):
        file.write_bytes(damage)
        with pytest.raises(StorageError, match="is not a whole feature map"):
            read_feature_map(file)
    np.savez(file, labels=np.array([{}], dtype=object))
    with pytest.raises(StorageError, match="is not a whole feature map"):
        read_feature_map(file)
    with np.load(tmp_path / "features-round001.npz", allow_pickle=False) as other:
        assert other.files == ["labels"]


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


# -- the toy ---------------------------------------------------------------------------------------


def test_sectors_start_on_the_diagonal() -> None:
    # at 60°, 150°, 240° and 330° for four clients; 40° is just before the first one begins
    angles = np.deg2rad([60, 150, 240, 330, 40])
    where = np.stack([np.cos(angles), np.sin(angles)], 1)
    assert sector(where, 4).tolist() == [0, 1, 2, 3, 3]
    assert sector(where, 3).tolist() == [0, 0, 1, 2, 2]


def test_without_distillation_both_rows_of_the_toy_are_the_same(capfd: Any) -> None:
    figure, numbers = toy_figure(rounds=2, gamma=0.0, local_epochs=1)
    assert numbers["FedGKD"] == numbers["FedAvg"]
    assert capfd.readouterr() == ("", "")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:4] == titles[4:]
    for axes, other in zip(figure.axes[:4], figure.axes[4:], strict=True):
        assert np.array_equal(axes.images[0].get_array(), other.images[0].get_array())


def test_the_toys_numbers_are_those_of_what_is_drawn() -> None:
    state = torch.get_rng_state()
    figure, numbers = toy_figure(rounds=3, gamma=5.0, local_epochs=2, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert numbers["FedGKD"] != numbers["FedAvg"]
    rng = np.random.default_rng(0)
    train, _, test = (rng.uniform(-4, 4, (n, 2)) for n in (800, 400, 2000))
    truth = (test[:, 0] < 0) + 2 * (test[:, 1] < 0)
    shades = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in style.PALETTE])
    column, row = np.floor((test + 4) / 8 * 200).astype(int).T
    for place, axes in enumerate(figure.axes):
        found = numbers[("FedGKD", "FedAvg")[place // 4]]
        name = ("user 1", "user 2", "user 3", "aggregate")[place % 4]
        image = np.asarray(axes.images[0].get_array())[row, column, :3]
        guess = np.abs(image[:, None] - shades).sum(-1).argmin(1)
        # a cell of the grid is 0.04 wide: points at a boundary may fall on its other side
        assert found[name] == pytest.approx((guess == truth).mean(), abs=0.01)
        assert axes.get_title() == f"{name}: {100 * found[name]:.1f} %"
        if place % 4 == 3:
            assert not axes.collections
            continue
        unseen = sector(test, 4) != place % 4
        right = (guess == truth)[unseen].mean()
        assert found[f"{name}, unseen"] == pytest.approx(right, abs=0.01)
        drawn = np.concatenate([np.asarray(dots.get_offsets()) for dots in axes.collections])
        mine = train[sector(train, 4) == place % 4]
        order = [np.lexsort(part.T) for part in (drawn, mine)]
        np.testing.assert_allclose(drawn[order[0]], mine[order[1]], atol=1e-5)
    assert set(found) == {f"user {k}{u}" for k in (1, 2, 3) for u in ("", ", unseen")} | {
        "aggregate"
    }
    with pytest.raises(SettingError, match="num_clients"):
        toy_figure(num_clients=2)


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
