"""Own data: what each source reads, worked out by hand, and what it refuses."""

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import (
    ByKey,
    Examples,
    FedAvg,
    FederatedData,
    FromFile,
    LocalEngine,
    find_runs,
    plot,
)
from fedgkd_pl.data.mapped import MappedTensor, as_tensor
from fedgkd_pl.data.sources.base import OwnData
from fedgkd_pl.data.transforms import Ids
from fedgkd_pl.errors import SettingError
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import fit, linear
from tests.support.datasets import WORDS
from tests.support.runs import Run, version
from tests.support.sources import (
    table_rows,
    write_config,
    write_csv,
    write_images,
    write_leaf,
)

Write = Callable[[Path], tuple[str, int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(data: OwnData, features: int, classes: int) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), linear(features, classes))
    model = FedAvg(net, engine=LocalEngine(workers=1))
    fit(model, data, 1)
    assert model.report["client/failed"] == 0 and 0 <= model.report["test/acc"] <= 1


# -- splits ------------------------------------------------------------------------------------


def test_a_class_without_test_samples_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x, y = points()
    settings: dict[str, Any] = {"num_clients": 2, "class_names": ["cat", "dog", "hen"]}
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        FederatedData.from_arrays(x, y, **settings).setup()  # a fifth of each class
        assert not caplog.records
        told = {"test_inputs": x[:30], "test_targets": y[:30]}  # all cats and half of the dogs
        FederatedData.from_arrays(x, y, **told, **settings).setup()
        assert caplog.messages == ["test has no sample of classes [hen], training has"]
        caplog.clear()
        del settings["class_names"]
        told = {"test_inputs": x[20:40], "test_targets": y[20:40]}
        FederatedData.from_arrays(x, y, **told, **settings).setup()
        assert caplog.messages == ["test has no sample of classes [0, 2], training has"]


def test_metrics_name_a_class_by_its_number() -> None:
    """As docs/data.md says: names may be anything, and tags may not."""
    x, y = points()
    data = FederatedData.from_arrays(x, y, num_clients=2, class_names=["cat", "a/b", "hen"])
    model = FedAvg(linear(2, 3), engine=LocalEngine(workers=1))
    fit(model, data, 1)
    tags = {name for name in model.report if name.startswith("test/class_acc/")}
    assert tags == {f"test/class_acc/{number}" for number in range(3)}


# -- arrays ------------------------------------------------------------------------------------


def points(number: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Points of three classes, the classes one after another."""
    x = np.arange(number * 2, dtype=np.float32).reshape(number, 2)
    return x, np.repeat(np.arange(3), number // 3)


def test_arrays_are_cut_by_class() -> None:
    x, y = points()
    data = FederatedData.from_arrays(x, y, test_fraction=0.2, val_fraction=0.25, num_clients=4)
    data.setup()
    assert data.num_classes == 3
    assert torch.bincount(data.test.targets).tolist() == [4, 4, 4]  # a fifth of 20 each
    assert torch.bincount(data.val.targets).tolist() == [4, 4, 4]  # a quarter of the rest
    clients = data.client_data
    assert clients.index.sizes.tolist() == [9, 9, 9, 9]
    everything = torch.cat([clients.examples.inputs, data.val.inputs, data.test.inputs])
    assert sorted(everything[:, 0].tolist()) == x[:, 0].tolist()  # each sample once
    for split in (clients.examples, data.val, data.test):
        assert torch.equal(split.targets, split.inputs[:, 0].long() // 40)  # with its own label


def test_the_test_set_is_the_same_for_every_seed() -> None:
    first, second = (FederatedData.from_arrays(*points(), num_clients=2, seed=s) for s in (0, 1))
    first.setup()
    second.setup()
    assert torch.equal(first.test.inputs, second.test.inputs)
    assert not torch.equal(first.val.inputs, second.val.inputs)


def test_a_given_test_set_is_kept() -> None:
    x, y = points()
    data = FederatedData.from_arrays(x, y, x[::7], y[::7], num_clients=2, val_fraction=0)
    data.setup()
    assert torch.equal(data.test.inputs, torch.from_numpy(x[::7]))
    assert len(data.client_data.examples) == 60


@pytest.mark.parametrize("form", ["memory", "tensor", "npy", "memmap", "part of a memmap", "npz"])
def test_every_form_of_arrays_trains_to_the_same(form: str) -> None:
    x, y = points()
    np.save("x.npy", x)
    np.save("y.npy", y)
    np.save("longer.npy", np.concatenate([x, x])[:110])
    np.savez("both.npz", x=x, y=y)
    forms: dict[str, tuple[Any, ...]] = {
        "memory": (x, y),
        "tensor": (torch.from_numpy(x), torch.from_numpy(y)),
        "npy": ("x.npy", "y.npy"),
        "memmap": (np.load("x.npy", mmap_mode="r+"), y.astype(np.uint8)),
        "part of a memmap": (np.load("longer.npy", mmap_mode="r")[60:], y[:50]),
        "npz": ("both.npz",),
    }
    plain = FederatedData.from_arrays(*(v[: 50 if "part" in form else 60] for v in (x, y)))
    data = FederatedData.from_arrays(*forms[form], num_clients=20)
    assert data.fingerprint() == plain.fingerprint()
    mapped = isinstance(data.client_data.examples.inputs, MappedTensor)
    assert mapped == (form in ("npy", "memmap", "part of a memmap"))
    train(data, 2, 3)


def test_a_mapped_file_is_opened_again_by_workers_and_never_copied() -> None:
    x = np.lib.format.open_memmap("x.npy", "w+", np.float32, (5000, 4))
    x[:] = np.random.default_rng(0).normal(size=x.shape)
    y = (x[:, 0] > 0).astype(np.int64)
    inputs = as_tensor(x, "inputs")
    sent = pickle.dumps(inputs)
    assert len(sent) < 300 and torch.equal(pickle.loads(sent), torch.from_numpy(x[:]))
    assert not inputs.is_shared() and isinstance(inputs.to("cpu"), MappedTensor)
    weights = []
    for source, workers in (("x.npy", 1), ("x.npy", 2), (np.array(x), 1)):
        data = FederatedData.from_arrays(source, y, num_clients=4)
        model = FedAvg(linear(4, 2), engine=LocalEngine(workers=workers))
        fit(model, data, 2)
        weights.append(model.net.weight.detach().clone())
    for split in (data.client_data.owned(0), data.val, data.test):
        assert split.rows is None
    data = FederatedData.from_arrays("x.npy", y, num_clients=4)
    data.setup()
    for split in (data.client_data.owned(0), data.val, data.test):
        assert isinstance(split.inputs, MappedTensor) and len(split.inputs) == 5000
        read = split[:3].inputs
        read += 1  # a copy: the file is read-only
        assert torch.equal(read, torch.from_numpy(x[split.rows[:3].numpy()]) + 1)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    middle = Examples(inputs, torch.from_numpy(y), Ids()).view(slice(10, -4980))
    assert isinstance(middle.inputs, MappedTensor) and middle.rows is None
    assert torch.equal(middle.inputs, torch.from_numpy(x[10:20]))
    assert len(middle.view(slice(10, 10))) == 0


def test_bytes_become_shares_and_whole_numbers_stay_ids() -> None:
    y = np.arange(20) % 2
    pixels = np.full((20, 4), 51, dtype=np.uint8)
    data = FederatedData.from_arrays(pixels, y, shape=[1, 2, 2], num_clients=2)
    data.setup()
    batch = next(iter(data.test_dataloader()))[0]
    assert batch.shape[1:] == (1, 2, 2) and torch.allclose(batch, torch.tensor(0.2))
    for scale, dtype in ((None, torch.int64), (2.0, torch.float32)):
        data = FederatedData.from_arrays(pixels.astype(np.int32), y, scale=scale, num_clients=2)
        data.setup()
        batch = next(iter(data.test_dataloader()))[0]
        assert batch.dtype == dtype and batch.max() == (51 if scale is None else 25.5)


def test_owners_of_arrays_are_clients() -> None:
    x, y = points()
    owners = np.array(["ann", "bob", "eve"])[np.arange(60) % 3]
    data = FederatedData.from_arrays(
        x, y, owners=owners, num_clients=3, partition=ByKey(), val_fraction=0.25
    )
    data.setup()
    assert data.client_data.index.sizes.tolist() == [12, 12, 12]  # 20 − 4 − 4 of each owner
    for client in range(3):
        rows = data.client_data.owned(client).inputs[:, 0] // 2
        assert (rows % 3 == client).all()
    assert torch.bincount((data.test.inputs[:, 0] // 2).long() % 3).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"inputs": "no.npy"}, "inputs: no.npy: No such file"),
        ({"inputs": "x.txt"}, "inputs: must be an array, or the path of an .npy or .npz"),
        ({"targets": np.zeros(59, int)}, "targets: there are 60 inputs: give a label for each"),
        ({"targets": np.zeros((60, 2), int)}, "data: train labels must be one int64 per sample"),
        ({"targets": None}, "targets: must be given"),
        ({"inputs": np.array(["a"] * 60)}, "inputs: must be numbers"),
        ({"inputs": np.array([object()] * 60)}, "inputs: must be numbers"),
        ({"owners": [1, 2]}, "owners: there are 60 samples: give the owner of each (got 2)"),
        ({"class_names": ["a", "a", "b"]}, "class_names: there are 3 classes: name each"),
        ({"num_classes": 2}, "data: train label at"),
        ({"test_inputs": np.zeros((1, 2), np.float32), "test_targets": [3]}, "test label at 0"),
        ({"name": "a/b"}, "name: must be fit for a file's name"),
        ({"test_fraction": 0.001}, "test_fraction: takes none of 60 samples"),
    ],
)
def test_arrays_that_do_not_fit(arguments: dict[str, Any], error: str) -> None:
    x, y = points()
    with pytest.raises(SettingError) as raised:
        FederatedData.from_arrays(**({"inputs": x, "targets": y} | arguments)).setup()
    assert error in str(raised.value)


def test_a_pickle_in_an_npy_is_refused() -> None:
    np.save("evil.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(SettingError, match=r"evil.npy cannot be read .*Python objects"):
        FederatedData.from_arrays("evil.npy", [0]).setup()


def test_a_map_in_another_order_is_refused() -> None:
    np.save("x.npy", np.asfortranarray(points()[0]))
    with pytest.raises(SettingError, match="inputs: a memory map must be of a file, in C order"):
        FederatedData.from_arrays("x.npy", points()[1]).setup()


# -- tables ------------------------------------------------------------------------------------


def test_a_table_is_standardised_by_its_training_rows() -> None:
    rows = table_rows(80)
    write_csv(Path("t.csv"), ["a", "b", "c", "kind"], [[a, b, 5, kind] for a, b, kind in rows])
    data = FederatedData.from_csv("t.csv", label="kind", num_clients=3)
    data.setup()
    assert data.class_names == ["cold", "hot"] and data.num_classes == 2
    raw = np.array([[a, b, 5] for a, b, _ in rows])
    kinds = np.array([kind for *_, kind in rows])
    clients = data.client_data.examples
    assert len(data.test) == 16 and len(data.val) == 6 and len(clients) == 58
    assert clients.inputs.dtype == torch.float32
    # the rows that the clients have are found by their place among all sorted first columns
    order = np.argsort(raw[:, 0])
    together = torch.cat([clients.inputs, data.val.inputs, data.test.inputs])
    labels = torch.cat([clients.targets, data.val.targets, data.test.targets])
    row_of = np.empty(80, dtype=int)
    row_of[np.argsort(together[:, 0].numpy())] = order
    own = raw[row_of[:58]]
    expected = (raw[row_of] - own.mean(0)) / np.array([*own.std(0)[:2], 1])  # the last is constant
    np.testing.assert_allclose(together.numpy(), expected, atol=1e-5)
    assert (kinds[row_of] == np.array(["cold", "hot"])[labels.numpy()]).all()
    train(data, 3, 2)


def test_columns_owner_and_test_file_of_a_table() -> None:
    rows = [[*row, f"user{n % 4}", n] for n, row in enumerate(table_rows(40))]
    header = ["a", "b", "kind", "user", "id"]
    write_csv(Path("t.csv"), header, rows)
    write_csv(Path("test.csv"), header, rows[:10])
    data = FederatedData.from_csv(
        "t.csv",
        label="kind",
        columns=["b", "id"],
        test_path="test.csv",
        owner="user",
        standardise=False,
        num_clients=4,
        partition=ByKey(),
        val_fraction=0,
    )
    data.setup()
    assert data.test.inputs[:, 1].tolist() == list(range(10))
    for client in range(4):
        assert sorted(data.client_data.owned(client).inputs[:, 1].tolist()) == [
            *range(client, 40, 4)
        ]


def test_labels_that_are_numbers_keep_their_order() -> None:
    write_csv(Path("t.csv"), ["a", "y"], [[n, (2, 10, 1)[n % 3]] for n in range(30)])
    data = FederatedData.from_csv("t.csv", label="y", num_clients=2)
    data.setup()
    assert data.class_names == ["1", "2", "10"]


def broken(row: int, cells: list[Any]) -> str:
    rows = table_rows(30)
    rows[row - 1] = cells
    write_csv(Path("t.csv"), ["age", "b", "kind"], rows)
    return "t.csv"


@pytest.mark.parametrize(
    ("cells", "error"),
    [
        (["nan", 1, "hot"], "columns: t.csv, row 17, column 'age' is empty, NaN or infinite"),
        (["", 1, "hot"], "columns: t.csv, row 17, column 'age' is empty"),
        (["inf", 1, "hot"], "columns: t.csv, row 17, column 'age' is empty, NaN or infinite"),
        (["red", 1, "hot"], "columns: t.csv, row 17, column 'age' is no number: 'red'"),
        ([1, 1, ""], "label: t.csv, row 17, column 'kind' is empty"),
        ([1, 1], "path: t.csv, row 17 has 2 cells, the header 3"),
    ],
)
def test_a_bad_cell_is_named_by_row_and_column(cells: list[Any], error: str, run: Run) -> None:
    config = write_config(
        Path(), "CSVTable", 2, path=broken(17, cells), label="kind", num_clients=3
    )
    before = sorted(Path().rglob("*"))
    code, _, err = run("fit", "--config", config)
    assert code == 2 and f"data.{error}" in err and len(err.strip().splitlines()) == 1
    assert sorted(Path().rglob("*")) == before  # nothing was written


def test_what_is_no_table() -> None:
    for content, error in {
        "": "has no header",
        "a,y\n": "has no rows",
        "a,a\n1,2\n": "has two columns of the name 'a'",
        'a,y\n"1,2\n': "line",
        "\0": "t.csv",
    }.items():
        Path("t.csv").write_text(content)
        with pytest.raises(SettingError, match=error):
            FederatedData.from_csv("t.csv", label="y").setup()
    Path("t.csv").write_bytes(b"a,y\n1,\xff\n")
    with pytest.raises(SettingError, match=r"t.csv is not UTF-8 at byte 6"):
        FederatedData.from_csv("t.csv", label="y").setup()
    with pytest.raises(SettingError, match=r"path: no.csv: there is no such file"):
        FederatedData.from_csv("no.csv", label="y").setup()
    Path("t.csv").write_text("a,y\n1,2\n")
    with pytest.raises(SettingError, match=r"label: t.csv has no column 'z', but a, y"):
        FederatedData.from_csv("t.csv", label="z").setup()


def test_a_label_that_only_the_test_file_has() -> None:
    write_csv(Path("t.csv"), ["a", "b", "kind"], table_rows(30))
    write_csv(Path("test.csv"), ["a", "b", "kind"], [[1, 2, "hot"], [3, 4, "warm"]])
    data = FederatedData.from_csv("t.csv", label="kind", test_path="test.csv", num_clients=2)
    with pytest.raises(SettingError, match=r"test.csv, row 2: the label 'warm' is in no training"):
        data.setup()


def test_a_class_number_that_only_the_test_set_has(caplog: pytest.LogCaptureFixture) -> None:
    x, y = points()
    with caplog.at_level(logging.WARNING, "fedgkd_pl"):
        data = FederatedData.from_arrays(x[20:], y[20:], x, y, num_clients=2)
        data.setup()
    assert "test has samples of classes [0], training has none" in caplog.text


def test_parquet_is_read_like_csv() -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    rows = table_rows(40)
    write_csv(Path("t.csv"), ["a", "b", "kind"], rows)
    columns = dict(zip(("a", "b", "kind"), map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), "t.parquet")
    data = FederatedData.from_parquet("t.parquet", label="kind", num_clients=2)
    assert (
        data.fingerprint()
        == FederatedData.from_csv("t.csv", label="kind", num_clients=2).fingerprint()
    )
    train(data, 2, 2)
    columns["a"][16] = None
    parquet.write_table(pyarrow.table(columns), "t.parquet")
    with pytest.raises(SettingError, match=r"t.parquet, row 17, column 'a' is empty"):
        FederatedData.from_parquet("t.parquet", label="kind").setup()
    columns["a"] = ["red"] * 40
    parquet.write_table(pyarrow.table(columns), "t.parquet")
    with pytest.raises(SettingError, match=r"row 1, column 'a' is no number: 'red'"):
        FederatedData.from_parquet("t.parquet", label="kind").setup()


# -- images ------------------------------------------------------------------------------------


def test_image_folders_are_normalised_by_their_training_images() -> None:
    write_images(Path("images"), number=20)
    data = FederatedData.from_image_folder("images", num_clients=2, val_fraction=0.125)
    data.setup()
    assert data.class_names == ["blue", "red"] and data.test.inputs.shape == (8, 3, 8, 8)
    assert torch.bincount(data.test.targets).tolist() == [4, 4]
    assert torch.bincount(data.val.targets).tolist() == [2, 2]  # an eighth of 32
    own = data.client_data.examples
    pixels = own.inputs.numpy() / 255
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))
    expected = (data.test.inputs.numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    given = next(iter(data.test_dataloader()))[0]
    np.testing.assert_allclose(given.numpy(), expected, atol=1e-5)
    assert own.repeat  # so teachers run once
    blue = own.inputs[own.targets == 0].float().mean((0, 2, 3))
    assert blue[2] > 200 > 60 > blue[0]


def test_image_folders_with_train_and_test() -> None:
    write_images(Path("images/train"), number=8)
    write_images(Path("images/test"), number=3)
    data = FederatedData.from_image_folder("images", size=[4, 6], grayscale=True, num_clients=2)
    data.setup()
    assert (
        data.test.inputs.shape == (6, 1, 4, 6) and data.test.targets.tolist() == [0] * 3 + [1] * 3
    )
    assert len(data.client_data.examples) + len(data.val) == 16
    train(FederatedData.from_image_folder("images", size=2, num_clients=2), 12, 2)


def owners_in_file(content: Any, **kwargs: Any) -> OwnData:
    Path("owners.json").write_text(json.dumps(content))
    partition = FromFile("owners.json")
    return FederatedData.from_image_folder("images", num_clients=2, partition=partition, **kwargs)


def test_a_partition_may_name_the_images() -> None:
    """Those that were drawn as the test set are passed over, so nobody need know which."""
    write_images(Path("images"), number=10)
    blue, red = ([f"{kind}/{n}.png" for n in range(10)] for kind in ("blue", "red"))
    data = owners_in_file({"clients": [blue, red[1:]], "validation": red[:1]})
    data.setup()
    held = len(data.val)  # red/0.png, unless it is in the test set
    assert (len(data.test), held) in ((4, 0), (4, 1))
    counts = data.summary()["counts"]
    assert counts == [[8, 0], [0, 8 - held]]
    again = owners_in_file([blue, red], val_fraction=0.25)
    again.setup()
    assert again.summary()["counts"] == [[6, 0], [0, 6]]


def test_names_of_images_that_are_not_there_twice_or_missing() -> None:
    write_images(Path("images"), number=10)
    blue, red = ([f"{kind}/{n}.png" for n in range(10)] for kind in ("blue", "red"))
    with pytest.raises(SettingError, match=r"names 'red/10.png', which is not there: a file is c"):
        owners_in_file([blue, [*red, "red/10.png"]]).setup()
    with pytest.raises(SettingError, match=r"samples red/\d.png, red/\d.png, .* are named twice"):
        owners_in_file([[*blue, *red], red]).setup()
    with pytest.raises(SettingError, match=r"samples blue/\d.png, .* and 5 more are missing$"):
        owners_in_file([red[:5], red[5:]]).setup()


def test_numbers_do_not_count_the_drawn_test_set_and_the_error_says_so() -> None:
    write_images(Path("images"), number=10)
    said = r"not among 0 to 15; 4 of all 20 samples are the test set \(test_fraction\) and not "
    said += "counted: name files, give a test set of your own, or begin with fedgkd-pl partition"
    with pytest.raises(SettingError, match=said):
        owners_in_file([list(range(10)), list(range(10, 20))]).setup()


def test_images_of_two_sizes_are_named(run: Run) -> None:
    write_images(Path("images"))
    Image.new("RGB", (9, 7)).save("images/red/other.png")
    config = write_config(Path(), "ImageFolders", 192, path="images", num_clients=2)
    code, _, err = run("fit", "--config", config)
    assert code == 2 and not Path("runs").exists()
    assert "data.size: images/blue/0.png is 8 × 8 (height × width), " in err
    assert "images/red/other.png is 7 × 9: give size, to resize all" in err
    assert run("fit", "--config", config, "--data.size", "8")[0] == 0


@pytest.mark.parametrize("damage", ["text", "cut off", "empty class", "no class", "only in test"])
def test_bad_folders_of_images(damage: str) -> None:
    write_images(Path("images/train"))
    write_images(Path("images/test"), number=2)
    error = ""
    if damage == "text":
        Path("images/train/red/3.png").write_text("not an image")
        error = "path: images/train/red/3.png cannot be decoded"
    elif damage == "cut off":
        file = Path("images/test/red/1.png")
        file.write_bytes(file.read_bytes()[:60])
        error = "path: images/test/red/1.png cannot be decoded"
    elif damage == "empty class":
        Path("images/train/green").mkdir()
        error = "path: images/train/green has no images"
    elif damage == "only in test":
        Path("images/test/green").mkdir()
        Image.new("RGB", (8, 8)).save("images/test/green/0.png")
        error = "data: images/test/green/0.png: the label 'green' is in no training sample"
    folder = "images" if error else "images/train/red"
    error = error or "path: images/train/red has no folders, one for each class"
    with pytest.raises(SettingError) as raised:
        FederatedData.from_image_folder(folder, num_clients=2).setup()
    assert error in str(raised.value)


# -- texts -------------------------------------------------------------------------------------


def texts(folder: Path) -> None:
    Path("vocab.txt").write_text("\n".join(WORDS))
    rows = [[f"a very {kind} film", kind] for _ in range(12) for kind in ("good", "bad")]
    write_csv(folder / "texts.csv", ["text", "label"], rows)
    for number, (text, kind) in enumerate(rows):
        (folder / "tree" / kind).mkdir(parents=True, exist_ok=True)
        (folder / "tree" / kind / f"{number:02}.txt").write_text(text)


@pytest.mark.parametrize("path", ["texts.csv", "tree"])
def test_texts_become_tokens(path: str) -> None:
    texts(Path())
    data = FederatedData.from_text(path, tokenizer="vocab.txt", num_clients=2)
    data.setup()
    assert data.class_names == ["bad", "good"]
    words = [WORDS[i] for i in data.test.inputs[0].tolist()]
    kind = data.class_names[data.test.targets[0]]
    assert words == ["[CLS]", "a", "very", kind, "film", "[SEP]"]
    bag = torch.nn.Sequential(torch.nn.EmbeddingBag(len(WORDS), 4), torch.nn.Linear(4, 2))
    fit(FedAvg(bag, engine=LocalEngine(workers=1)), data, 1)
    bag.vocab_size = 5  # type: ignore[assignment]
    with pytest.raises(SettingError, match="tokenizer: gives token 18, the net knows 5"):
        data.check_net(bag)


def test_a_text_without_words_is_named() -> None:
    texts(Path())
    write_csv(Path("t.csv"), ["text", "label"], [["good", "x"], ["", "y"]])
    with pytest.raises(SettingError, match=r"text: t.csv, row 2, column 'text' is empty"):
        FederatedData.from_text("t.csv", tokenizer="vocab.txt").setup()


# -- owners ------------------------------------------------------------------------------------


def client_tables(folder: Path, sizes: dict[str, int]) -> None:
    for number, (name, size) in enumerate(sizes.items()):
        write_csv(folder / f"{name}.csv", ["a", "b", "kind"], table_rows(size, number))


def test_a_partition_that_takes_no_notice_of_owners_says_so(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A config may have one, with a number of clients, from the data that it was made for."""
    client_tables(Path("clients"), {"ann": 20, "bob": 21, "cyd": 22})
    cut = {"class_path": "Dirichlet", "init_args": {"alpha": 1.0, "min_size": 1}}
    kwargs = {"path": "clients", "label": "kind", "num_clients": 2, "partition": cut}
    config = write_config(Path(), "ClientFiles", 2, **kwargs)
    code, out, err = run("partition", "--config", config)
    said = "the data has 3 owners, whose samples Dirichlet shares out anew; for a client per owner"
    assert code == 0, err
    assert f"{said}: data.partition: ByKey, data.num_clients: 3" in caplog.text
    caplog.clear()
    assert "owner" not in out and "ann" not in out
    flags = ("--data.partition", "ByKey", "--data.num_clients", "3")
    code, out, err = run("partition", "--config", config, *flags)
    assert code == 0 and "owners" not in caplog.text, err
    rows = [[word for word in line.split() if word.isalnum()] for line in out.splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["0"], ["1"], ["2"])] == [
        *(["0", "ann"], ["1", "bob"], ["2", "cyd"])
    ]
    code, out, _ = run("partition", "--config", config, *flags[:2])  # two clients of three owners
    assert code == 0 and any(pair in out for pair in ("ann, bob", "ann, cyd", "bob, cyd"))


def test_owners_of_arrays_have_names_and_a_file_that_names_samples_is_no_oversight(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y, owners = np.random.rand(12, 2), np.arange(12) % 2, list("aaaabbbbcccc")
    kwargs = {"owners": owners, "val_fraction": 0, "test_fraction": 0.25}
    data = FederatedData.from_arrays(x, y, num_clients=3, partition=ByKey(), **kwargs)
    data.setup()
    assert [[data.owner_names[n] for n in each] for each in data.owners_of] == [["a"], ["b"], ["c"]]
    Path("split.json").write_text(json.dumps([[0, 1, 2], [3, 4, 5, 6, 7, 8]]))
    with caplog.at_level(logging.WARNING, logger="fedgkd_pl"):
        FederatedData.from_arrays(
            x, y, num_clients=2, partition=FromFile("split.json"), **kwargs
        ).setup()
    assert "owners" not in caplog.text


def test_a_file_is_a_client(run: Run) -> None:
    client_tables(Path("clients"), {"bob": 10, "ann": 20, "eve": 1})
    data = FederatedData.from_clients("clients", label="kind", val_fraction=0, test_fraction=0.25)
    data.setup()
    assert data.num_clients == 3
    # 8 of 31: shares of 5.16, 2.58 and 0.26 samples; the one of eve stays with her
    assert data.client_data.index.sizes.tolist() == [15, 7, 1]
    assert len(data.test) == 8
    config = write_config(Path(), "ClientFiles", 2, path="clients", label="kind")
    assert run("fit", "--config", config)[0] == 0
    held = json.loads((version(Path(), "own") / "partition.json").read_text())
    assert held["num_clients"] == 3 and held["class_names"] == ["cold", "hot"]


def test_clients_with_their_own_test_files_or_arrays_or_images() -> None:
    client_tables(Path("tables/train"), {"ann": 12, "bob": 8})
    client_tables(Path("tables/test"), {"ann": 3, "bob": 4})
    data = FederatedData.from_clients("tables", label="kind", val_fraction=0)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [12, 8] and len(data.test) == 7
    x, y = points()
    Path("arrays").mkdir()
    np.savez("arrays/ann.npz", x=x[:50], y=y[:50])
    np.savez("arrays/bob.npz", inputs=x[50:], targets=y[50:])
    data = FederatedData.from_clients("arrays", val_fraction=0, test_fraction=0.1)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [45, 9] and data.num_classes == 3
    assert (data.client_data.owned(1).inputs[:, 0] >= 100).all()
    train(data, 2, 3)
    write_images(Path("images/ann"), 5)
    write_images(Path("images/bob"), 3, colours=["red"])
    data = FederatedData.from_clients("images", val_fraction=0, size=2)
    data.setup()
    assert data.client_data.index.label_counts(data.client_data.examples.targets.numpy(), 2) == [
        [4, 4],
        [0, 3],
    ] or data.client_data.index.sizes.tolist() == [8, 2]
    train(data, 12, 2)


@pytest.mark.parametrize("damage", ["empty file", "no rows", "mixed", "empty folder", "nobody"])
def test_bad_clients(damage: str, run: Run) -> None:
    client_tables(Path("clients"), {"ann": 12, "bob": 8})
    if damage == "empty file":
        Path("clients/eve.csv").touch()
        error = "data.path: clients/eve.csv has no header"
    elif damage == "no rows":
        Path("clients/eve.csv").write_text("a,b,kind\n")
        error = "data.path: clients/eve.csv has no rows"
    elif damage == "empty folder":
        Path("clients/eve").mkdir()
        error = "data.path: clients must hold .csv, .npz files or folders, of one kind"
    elif damage == "mixed":
        Path("clients/notes.txt").touch()
        error = "data.path: clients must hold .csv, .npz files or folders, of one kind"
    else:
        for file in Path("clients").iterdir():
            file.unlink()
        error = "data.path: clients has no clients"
    config = write_config(Path(), "ClientFiles", 2, path="clients", label="kind")
    code, _, err = run("fit", "--config", config)
    assert code == 2 and error in err and not Path("runs").exists()


def test_leaf() -> None:
    rng = np.random.default_rng(0)

    def user(number: int) -> tuple[list[Any], list[Any]]:
        return rng.random((number, 4)).tolist(), [n % 3 for n in range(number)]

    write_leaf(Path("leaf/train/a.json"), {"f2": user(6), "f0": user(9)})
    write_leaf(Path("leaf/train/b.json"), {"f1": user(1)})
    write_leaf(Path("leaf/test/a.json"), {"f0": user(3), "f1": user(2)})
    data = FederatedData.from_leaf("leaf", shape=[1, 2, 2], val_fraction=0)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [9, 1, 6] and data.num_classes == 3
    assert len(data.test) == 5 and data.name == "leaf"
    assert next(iter(data.test_dataloader()))[0].shape == (5, 1, 2, 2)
    data = FederatedData.from_leaf("leaf/train", val_fraction=0.2)
    train(data, 4, 3)
    assert len(data.test) == 3 and data.client_data.index.size(1) == 1


@pytest.mark.parametrize(
    ("users", "error"),
    [
        ({"u": ([], [])}, "user 'u' has no samples"),
        ({"u": ([[1, 2]], [0, 1])}, "user 'u' must have x and y, as many"),
        ({"u": ([[1, 2], [1]], [0, 1])}, "user 'u': x must be numbers, alike"),
        ({"u": (["to be"], [0])}, "user 'u': x must be numbers, alike"),
        ({"u": ([[1, 2]], ["a"])}, "user 'u', sample 0: 'a' is no class number"),
        (
            {"u": ([[1, 2]], [0]), "v": ([[1]], [0])},
            "user 'v': samples have the shape (1,), those before (2,)",
        ),
        ({"u": ([[1.0], [float("nan")]], [0, 1])}, "user 'u', sample 1 has NaN or Inf"),
    ],
)
def test_bad_leaf(users: Any, error: str) -> None:
    write_leaf(Path("leaf/all.json"), users)
    with pytest.raises(SettingError) as raised:
        FederatedData.from_leaf("leaf")
    assert error in str(raised.value) and str(raised.value).startswith("path: leaf/all.json")


# -- Lightning and Hugging Face ----------------------------------------------------------------


class Squares(LightningDataModule):
    def setup(self, stage: str | None = None) -> None:
        x, y = (torch.from_numpy(part) for part in points())
        self.parts = [TensorDataset(x[n::5], y[n::5]) for n in range(5)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.utils.data.ConcatDataset(self.parts[:3]), 4, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[3])


class WithTest(Squares):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[4], 5)


def test_a_datamodule_keeps_its_validation_and_test_sets() -> None:
    data = FederatedData.from_datamodule(WithTest(), num_clients=3)
    train(data, 2, 3)
    x = points()[0]
    assert torch.equal(data.val.inputs, torch.from_numpy(x[3::5]))
    assert torch.equal(data.test.inputs, torch.from_numpy(x[4::5]))
    assert torch.equal(data.client_data.examples.inputs[:12], torch.from_numpy(x[0::5]))
    data = FederatedData.from_datamodule(Squares(), num_clients=3)
    data.setup()
    assert len(data.test) == 7 and len(data.client_data.examples) == 29 and len(data.val) == 12


def test_a_datamodule_of_other_batches() -> None:
    class Lists(Squares):
        def train_dataloader(self) -> Any:
            return [1, 2]

    class Triples(Squares):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(*[torch.zeros(4)] * 3))

    with pytest.raises(SettingError, match="datamodule: its train_dataloader"):
        FederatedData.from_datamodule(Lists()).setup()
    with pytest.raises(SettingError, match=r"its train batches must be .inputs, labels."):
        FederatedData.from_datamodule(Triples()).setup()


def test_hugging_face_numbers_texts_and_images() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    rows = table_rows(40)
    a, b, kinds = map(list, zip(*rows, strict=True))
    kind = datasets.ClassLabel(names=["hot", "cold", "warm"])
    table = datasets.Dataset.from_dict({"a": a, "b": b, "kind": kinds}).cast_column("kind", kind)
    data = FederatedData.from_huggingface(table, "kind", ["a", "b"], num_clients=2)
    data.setup()
    assert data.class_names == ["hot", "cold", "warm"]
    own = data.client_data.examples.inputs.double()
    assert own.mean(0).abs().max() < 1e-6 and (own.std(0, correction=0) - 1).abs().max() < 1e-6
    train(data, 2, 3)
    texts(Path())
    said = [f"a very {kind} film" for kind in ("good", "bad")] * 10
    table = datasets.Dataset.from_dict({"text": said, "label": ["x", "y"] * 10})
    split = datasets.DatasetDict(train=table, test=table.select(range(4)))
    data = FederatedData.from_huggingface(
        split, columns="text", tokenizer="vocab.txt", num_clients=2
    )
    data.setup()
    assert len(data.test) == 4 and WORDS[data.test.inputs[0, 3]] == "good"
    with pytest.raises(SettingError, match="columns: train has no column 'image', but text, label"):
        FederatedData.from_huggingface(table).setup()
    pictures = [Image.new("L", (2, 2), n) for n in range(20)]
    table = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 10})
    data = FederatedData.from_huggingface(table, grayscale=True, num_clients=2, val_fraction=0)
    data.setup()
    assert data.class_names == ["0", "1"] and data.test.inputs.shape == (4, 1, 2, 2)
    assert [int(v) % 2 for v in data.test.inputs[:, 0, 0, 0]] == data.test.targets.tolist()


# -- by YAML alone -----------------------------------------------------------------------------


def yaml_images(folder: Path) -> tuple[str, int, dict[str, Any]]:
    write_images(folder / "images", 10, side=4)
    partition = {"class_path": "Dirichlet", "init_args": {"alpha": 1.0, "min_size": 1}}
    return "ImageFolders", 48, {"path": "images", "num_clients": 2, "partition": partition}


def yaml_csv(folder: Path) -> tuple[str, int, dict[str, Any]]:
    write_csv(folder / "t.csv", ["a", "b", "kind"], table_rows(40))
    return "CSVTable", 2, {"path": "t.csv", "label": "kind", "num_clients": 3}


def yaml_clients(folder: Path) -> tuple[str, int, dict[str, Any]]:
    client_tables(folder / "clients", {"ann": 12, "bob": 8})
    return "ClientFiles", 2, {"path": "clients", "label": "kind"}


def yaml_arrays(folder: Path) -> tuple[str, int, dict[str, Any]]:
    x, y = points()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y % 2)
    return "Arrays", 2, {"inputs": "x.npy", "targets": "y.npy", "num_clients": 3}


def yaml_huggingface(folder: Path) -> tuple[str, int, dict[str, Any]]:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    a, b, kinds = map(list, zip(*table_rows(40), strict=True))
    saved = datasets.Dataset.from_dict({"a": a, "b": b, "label": kinds})
    saved.save_to_disk(folder / "saved")
    return "HuggingFace", 2, {"dataset": "saved", "columns": ["a", "b"], "num_clients": 3}


@pytest.mark.parametrize("method", ["FedAvg", "FedGKD"])
@pytest.mark.parametrize(
    "write", [yaml_images, yaml_csv, yaml_clients, yaml_arrays, yaml_huggingface]
)
def test_a_source_trains_by_yaml_alone(write: Write, method: str, run: Run) -> None:
    source, features, settings = write(Path())
    config = write_config(Path(), source, features, method, **settings)
    code, _, err = run("fit", "--config", config)
    assert code == 0, err
    assert "test/acc" in (version(Path(), "own") / "metrics.csv").read_text()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(SettingError, match=r"pip install 'datasets>=4'"):
        FederatedData.from_huggingface("cifar10").setup()
    with pytest.raises(SettingError, match=r"pip install 'pyarrow>=18'"):
        FederatedData.from_parquet("t.parquet", "y").setup()


def test_class_names_are_in_tables_and_figures(run: Run) -> None:
    source, features, settings = yaml_csv(Path())
    config = write_config(Path(), source, features, **settings)
    code, out, err = run("partition", "--config", config)
    assert code == 0, err
    assert "cold" in out and "hot" in out
    assert run("fit", "--config", config)[0] == 0
    folder = version(Path(), "own")
    assert run("predict", "--config", config, "--ckpt_path", "last")[0] == 0
    (done,) = find_runs([str(folder)])
    for kind, axis in (("partition", "y"), ("confusion", "x"), ("confusion", "y")):
        (axes, *_) = plot(kind, [done]).axes
        ticks = [label.get_text() for label in getattr(axes, f"get_{axis}ticklabels")()]
        assert ticks == ["cold", "hot"]
