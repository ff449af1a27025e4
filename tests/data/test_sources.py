"""Own data: what each source reads, worked out by hand, and what it refuses."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import IID, ByKey, FedAvg, FederatedData, LocalEngine
from fedgkd_pl.data.examples import MappedTensor, as_tensor
from fedgkd_pl.errors import SettingError
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from tests.conftest import fit, linear, same
from tests.support.datasets import WORDS, image
from tests.support.runs import Run, version
from tests.support.sources import table_rows, write_config, write_csv, write_images, write_leaf


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def points(number: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Points of three classes, the classes one after another."""
    x = np.arange(number * 2, dtype=np.float32).reshape(number, 2)
    return x, np.repeat(np.arange(3), number // 3)


# -- arrays ------------------------------------------------------------------------------------


def test_arrays_are_cut_by_class_and_the_test_set_is_the_same_for_every_seed() -> None:
    x, y = points()
    settings = {"test_fraction": 0.2, "val_fraction": 0.25, "num_clients": 4}
    data, other = (FederatedData.from_arrays(x, y, seed=seed, **settings) for seed in (0, 1))
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
    other.setup()
    assert torch.equal(data.test.inputs, other.test.inputs)
    assert not torch.equal(data.val.inputs, other.val.inputs)
    given = FederatedData.from_arrays(x, y, x[::7], y[::7], num_clients=2, val_fraction=0)
    given.setup()
    assert torch.equal(given.test.inputs, torch.from_numpy(x[::7]))
    assert len(given.client_data.examples) == 60


@pytest.mark.parametrize("form", ["tensor", "npy", "memmap", "part of a memmap", "npz"])
def test_every_form_of_arrays_is_the_same_data(form: str) -> None:
    x, y = points()
    np.save("x.npy", x)
    np.save("y.npy", y)
    np.save("longer.npy", np.concatenate([x, x])[:110])
    np.savez("both.npz", x=x, y=y)
    forms: dict[str, tuple[Any, ...]] = {
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


def test_a_mapped_file_is_opened_again_by_workers_and_never_copied() -> None:
    x = np.lib.format.open_memmap("x.npy", "w+", np.float32, (5000, 4))
    x[:] = np.random.default_rng(0).normal(size=x.shape)
    y = (x[:, 0] > 0).astype(np.int64)
    inputs = as_tensor(x, "inputs")
    sent = pickle.dumps(inputs)
    assert len(sent) < 300 and torch.equal(pickle.loads(sent), torch.from_numpy(x[:]))
    nets = []
    for source, workers in (("x.npy", 2), (np.array(x), 1)):
        data = FederatedData.from_arrays(source, y, num_clients=4)
        model = FedAvg(linear(4, 2), engine=LocalEngine(workers=workers))
        fit(model, data, 2)
        nets.append(model.global_state())
    assert same(*nets)
    data = FederatedData.from_arrays("x.npy", y, num_clients=4)
    data.setup()
    for split in (data.client_data.owned(0), data.val, data.test):
        assert isinstance(split.inputs, MappedTensor) and len(split.inputs) == 5000
        read = split[:3].inputs
        read += 1  # a copy: the file is read-only
        assert torch.equal(read, torch.from_numpy(x[split.rows[:3].numpy()]) + 1)


def test_bytes_become_shares_and_whole_numbers_stay_ids() -> None:
    y = np.arange(20) % 2
    pixels = np.full((20, 4), 51, dtype=np.uint8)
    for x, settings, dtype, value in (
        (pixels, {"shape": [1, 2, 2]}, torch.float32, 0.2),
        (pixels.astype(np.int32), {}, torch.int64, 51),
        (pixels.astype(np.int32), {"scale": 2.0}, torch.float32, 25.5),
    ):
        data = FederatedData.from_arrays(x, y, num_clients=2, **settings)
        data.setup()
        batch = next(iter(data.test_dataloader()))[0]
        assert batch.dtype == dtype and torch.allclose(batch.double(), torch.tensor(value).double())
        assert batch.shape[1:] == tuple(settings.get("shape", [4]))


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
    # the rows that the clients have are found by their place among all sorted first columns
    together = torch.cat([clients.inputs, data.val.inputs, data.test.inputs])
    labels = torch.cat([clients.targets, data.val.targets, data.test.targets])
    row_of = np.empty(80, dtype=int)
    row_of[np.argsort(together[:, 0].numpy())] = np.argsort(raw[:, 0])
    own = raw[row_of[:58]]
    expected = (raw[row_of] - own.mean(0)) / np.array([*own.std(0)[:2], 1])  # the last is constant
    assert together.dtype == torch.float32
    np.testing.assert_allclose(together.numpy(), expected, atol=1e-5)
    assert (kinds[row_of] == np.array(["cold", "hot"])[labels.numpy()]).all()


def test_columns_owner_and_test_file_of_a_table() -> None:
    """A cell may be quoted, with a line in it; cells of a .tsv end with a tab."""
    rows = [[*row[:2], (2, 10, 1)[n % 3], f"u\n{n % 4}", n] for n, row in enumerate(table_rows(40))]
    header = ["a", "b", "kind", "user", "id"]
    write_csv(Path("test.csv"), header, rows[:10])
    Path("t.tsv").write_text(
        "\ufeff" + "\n".join("\t".join(f'"{c}"' for c in row) for row in [header, *rows]) + "\n\n"
    )
    settings: dict[str, Any] = {"label": "kind", "columns": ["b", "id"], "owner": "user"}
    settings |= {"standardise": False, "num_clients": 4, "partition": ByKey(), "val_fraction": 0}
    data = FederatedData.from_csv("t.tsv", test_path="test.csv", **settings)
    data.setup()
    assert data.class_names == ["1", "2", "10"]  # numbers keep their order
    assert data.test.inputs[:, 1].tolist() == list(range(10))
    for client in range(4):
        own = data.client_data.owned(client)
        assert sorted(own.inputs[:, 1].tolist()) == [*range(client, 40, 4)]
        values = [np.float32(rows[int(n)][1]) for n in own.inputs[:, 1]]
        assert own.inputs[:, 0].tolist() == values  # as Python reads the number, to the bit


def test_a_column_of_owners_that_nobody_named_is_suggested() -> None:
    rows = [[*row, f"h{n % 3}", n % 3] for n, row in enumerate(table_rows(30))]
    write_csv(Path("t.csv"), ["a", "b", "kind", "hospital", "site"], rows)
    Path("vocab.txt").write_text("\n".join(WORDS))
    settings: dict[str, Any] = {"label": "kind", "num_clients": 3}
    with pytest.raises(SettingError, match=r"^columns: .*'hospital'.* or owner: hospital \("):
        FederatedData.from_csv("t.csv", **settings).setup()
    for data in (
        FederatedData.from_csv("t.csv", partition=ByKey(), columns=["a"], **settings),
        FederatedData.from_text("t.csv", "vocab.txt", "b", partition=ByKey(), **settings),
    ):
        with pytest.raises(SettingError, match=r"^owner: .* a, b, kind, hospital, site$"):
            data.setup()
    with pytest.raises(SettingError, match=r"^label: (?!.*owner)"):
        FederatedData.from_csv("t.csv", regression=True, columns=["a"], **settings).setup()
    write_csv(Path("clients/ann.csv"), ["a", "kind", "hospital"], [[1, 1, "x"]] * 9)
    with pytest.raises(SettingError, match=r"^columns: (?!.*owner)"):  # the files are owners
        FederatedData.from_clients("clients", label="kind").setup()


def test_parquet_is_read_like_csv() -> None:
    pytest.importorskip("pyarrow", reason="needs the extra parquet")
    import pandas as pd

    rows = table_rows(40)
    write_csv(Path("t.csv"), ["a", "b", "kind"], rows)
    table = pd.DataFrame(rows, columns=["a", "b", "kind"])
    table.to_parquet("t.parquet")
    data = FederatedData.from_parquet("t.parquet", label="kind", num_clients=2)
    plain = FederatedData.from_csv("t.csv", label="kind", num_clients=2)
    assert data.fingerprint() == plain.fingerprint()
    table.loc[16, "a"] = None
    table.to_parquet("t.parquet")
    with pytest.raises(SettingError, match=r"t.parquet, row 17, column 'a'"):
        FederatedData.from_parquet("t.parquet", label="kind").setup()


# -- images and texts --------------------------------------------------------------------------


def test_image_folders_are_normalised_by_their_training_images() -> None:
    write_images(Path("images"), number=20)
    of_a_mac = ("images/red/._0.png", "images/__MACOSX/red/._0.png", "images/red/__MACOSX/0.png")
    for hidden in ("images/.red", "images/red/.old/0.png", *of_a_mac):
        Path(hidden).parent.mkdir(exist_ok=True, parents=True)
        Path(hidden).write_text("no image")
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


@pytest.mark.parametrize("path", ["texts.csv", "tree", "parts"])
def test_texts_become_tokens(path: str) -> None:
    Path("vocab.txt").write_text("\n".join(WORDS))
    rows = [[f"a very {kind} film", kind] for _ in range(12) for kind in ("good", "bad")]
    write_csv(Path("texts.csv"), ["text", "label"], rows)
    for number, (text, kind) in enumerate(rows):
        for folder in ("tree", "parts/train", "parts/test"):
            Path(folder, kind).mkdir(parents=True, exist_ok=True)
            Path(folder, kind, f"{number:02}.txt").write_text(text)
    data = FederatedData.from_text(path, tokenizer="vocab.txt", num_clients=2)
    data.setup()
    assert data.class_names == ["bad", "good"] and len(data.test) == (24 if path == "parts" else 5)
    words = [WORDS[i] for i in data.test.inputs[0].tolist()]
    kind = data.class_names[data.test.targets[0]]
    assert words == ["[CLS]", "a", "very", kind, "film", "[SEP]"]
    bag = torch.nn.Sequential(torch.nn.EmbeddingBag(len(WORDS), 4), torch.nn.Linear(4, 2))
    bag.vocab_size = 5  # type: ignore[assignment]
    with pytest.raises(SettingError, match=r"^tokenizer: "):
        data.check_net(bag)


# -- clients -----------------------------------------------------------------------------------


def client_tables(folder: Path, sizes: dict[str, int]) -> None:
    for number, (name, size) in enumerate(sizes.items()):
        write_csv(folder / f"{name}.csv", ["a", "b", "kind"], table_rows(size, number))


def test_a_partition_that_takes_no_notice_of_owners_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client_tables(Path("clients"), {"ann": 20, "bob": 21, "cyd": 22})
    for partition, told in ((ByKey(), 0), (IID(), 1)):
        FederatedData.from_clients("clients", label="kind", partition=partition).setup()
        assert caplog.text.count("data.num_clients: 3") == told


def test_a_file_is_a_client() -> None:
    client_tables(Path("clients"), {"bob": 10, "ann": 20, "eve": 1})
    data = FederatedData.from_clients("clients", label="kind", val_fraction=0, test_fraction=0.25)
    data.setup()
    assert data.num_clients == 3 and data.class_names == ["cold", "hot"]
    # 8 of 31: shares of 5.16, 2.58 and 0.26 samples; the one of eve stays with her
    assert data.client_data.index.sizes.tolist() == [15, 7, 1] and len(data.test) == 8
    own = data.client_data.examples.inputs.double()
    assert own.mean(0).abs().max() < 1e-6 and (own.std(0, correction=0) - 1).abs().max() < 1e-6


def test_clients_with_their_own_test_files_or_arrays_or_images() -> None:
    client_tables(Path("tables/train"), {"ann": 12, "bob": 8})
    client_tables(Path("tables/test"), {"ann": 3, "bob": 4, "new": 2})
    data = FederatedData.from_clients("tables", label="kind", val_fraction=0)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [12, 8] and len(data.test) == 9
    assert [len(rows) for rows in data.client_splits["test"].index] == [3, 4]
    x, y = points()
    Path("arrays").mkdir()
    np.savez("arrays/ann.npz", x=x[:50], y=y[:50])
    np.savez("arrays/bob.npz", inputs=x[50:], targets=y[50:])
    data = FederatedData.from_clients("arrays", val_fraction=0, test_fraction=0.1)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [45, 9] and data.num_classes == 3
    assert (data.client_data.owned(1).inputs[:, 0] >= 100).all()
    write_images(Path("images/ann"), 5)
    write_images(Path("images/bob"), 3, colours=["red"])
    data = FederatedData.from_clients("images", val_fraction=0, size=2)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [8, 2]
    own = data.client_data.owned(1)
    assert (own.targets == 1).all() and (own.inputs[:, 0] > 200).all()  # red


def test_leaf() -> None:
    rng = np.random.default_rng(0)

    def user(number: int) -> tuple[list[Any], list[Any]]:
        return rng.random((number, 4)).tolist(), [n % 3 for n in range(number)]

    own = user(9)
    write_leaf(Path("leaf/train/a.json"), {"f2": user(6), "f0": own})
    write_leaf(Path("leaf/train/b.json"), {"f1": user(1)})
    Path("leaf/train/._a.json").write_text("no JSON")
    write_leaf(Path("leaf/test/a.json"), {"f0": user(3), "f1": user(2)})
    data = FederatedData.from_leaf("leaf", shape=[1, 2, 2], val_fraction=0)
    data.setup()
    assert data.client_data.index.sizes.tolist() == [9, 1, 6] and data.num_classes == 3
    rows = torch.from_numpy(data.client_data.index[0])
    client = data.client_data.owned(0)
    assert torch.equal(client.inputs, torch.tensor(own[0])[rows])
    assert client.targets.tolist() == torch.tensor(own[1])[rows].tolist()
    assert next(iter(data.test_dataloader()))[0].shape == (5, 1, 2, 2)
    data = FederatedData.from_leaf("leaf/train", val_fraction=0.2)
    data.setup()
    assert len(data.test) == 3 and data.client_data.index.size(1) == 1


# -- Lightning and Hugging Face ----------------------------------------------------------------


class Squares(LightningDataModule):
    def __init__(self, train: Any = None) -> None:
        super().__init__()
        self.train = train

    def setup(self, stage: str | None = None) -> None:
        x, y = (torch.from_numpy(part) for part in points())
        self.parts = [TensorDataset(x[n::5], y[n::5]) for n in range(5)]

    def train_dataloader(self) -> Any:
        return self.train or DataLoader(ConcatDataset(self.parts[:3]), 4, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[3])


class WithTest(Squares):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[4], 5)


def test_a_datamodule_keeps_its_validation_and_test_sets() -> None:
    data = FederatedData.from_datamodule(WithTest(), num_clients=3)
    data.setup()
    x = points()[0]
    assert torch.equal(data.val.inputs, torch.from_numpy(x[3::5]))
    assert torch.equal(data.test.inputs, torch.from_numpy(x[4::5]))
    assert torch.equal(data.client_data.examples.inputs[:12], torch.from_numpy(x[0::5]))
    data = FederatedData.from_datamodule(Squares(), num_clients=3)
    data.setup()
    assert len(data.test) == 7 and len(data.client_data.examples) == 29 and len(data.val) == 12
    unlike = [(torch.zeros(n + 1), 0) for n in range(2)]
    for bad in (5, DataLoader(TensorDataset(*[torch.zeros(4)] * 3)), DataLoader(unlike)):
        with pytest.raises(SettingError, match=r"^datamodule: its train"):
            FederatedData.from_datamodule(Squares(bad)).setup()


def test_hugging_face_numbers_texts_and_images() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    a, b, kinds = map(list, zip(*table_rows(40), strict=True))
    kind = datasets.ClassLabel(names=["hot", "cold", "warm"])
    table = datasets.Dataset.from_dict({"a": a, "b": b, "kind": kinds}).cast_column("kind", kind)
    data = FederatedData.from_huggingface(table, "kind", ["a", "b"], num_clients=2)
    data.setup()
    assert data.class_names == ["hot", "cold", "warm"]
    own = data.client_data.examples.inputs.double()
    assert own.mean(0).abs().max() < 1e-6 and (own.std(0, correction=0) - 1).abs().max() < 1e-6
    Path("vocab.txt").write_text("\n".join(WORDS))
    said = [f"a very {kind} film" for kind in ("good", "bad")] * 10
    table = datasets.Dataset.from_dict({"text": said, "label": ["x", "y"] * 10})
    split = datasets.DatasetDict(train=table, test=table.select(range(4)))
    settings: dict[str, Any] = {"columns": "text", "tokenizer": "vocab.txt", "num_clients": 2}
    data = FederatedData.from_huggingface(split, **settings)
    data.setup()
    assert len(data.test) == 4 and WORDS[data.test.inputs[0, 3]] == "good"
    with pytest.raises(SettingError, match=r"^columns: "):
        FederatedData.from_huggingface(table).setup()
    pictures = [Image.new("L", (2, 2), n) for n in range(20)]
    table = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 10})
    data = FederatedData.from_huggingface(table, grayscale=True, num_clients=2, val_fraction=0)
    data.setup()
    assert data.class_names == ["0", "1"] and data.test.inputs.shape == (4, 1, 2, 2)
    assert [int(v) % 2 for v in data.test.inputs[:, 0, 0, 0]] == data.test.targets.tolist()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(SettingError, match=r"pip install '.\[hf\]'"):
        FederatedData.from_huggingface("cifar10").setup()
    with pytest.raises(SettingError, match=r"pyarrow is required"):
        FederatedData.from_parquet("t.parquet", "y").setup()


# -- by YAML -----------------------------------------------------------------------------------


def test_a_source_trains_by_yaml_alone(run: Run) -> None:
    write_images(Path("images"), 10, side=4)
    partition = {"class_path": "Dirichlet", "init_args": {"alpha": 1.0, "min_size": 1}}
    settings = {"path": "images", "num_clients": 2, "partition": partition}
    config = write_config(Path(), "ImageFolders", 48, "FedGKD", **settings)
    code, _, err = run("fit", "--config", config)
    assert code == 0, err
    assert "test/acc" in (version(Path(), "own") / "metrics.csv").read_text()
    Path("images/red/3.png").write_text("no image")
    before = sorted(Path().rglob("*"))
    code, _, err = run("fit", "--config", config)
    assert code == 2 and err.startswith("error: data.path: images/red/3.png")
    assert len(err.strip().splitlines()) == 1 and sorted(Path().rglob("*")) == before


# -- what is refused ---------------------------------------------------------------------------

X, Y = points()
OBJECTS = np.array([{}] * 60, dtype=object)
NO_NUMBERS = np.array(["a"] * 60)
ARRAYS: list[tuple[dict[str, Any], str, str]] = [
    ({"inputs": "no.npy"}, "inputs", "no.npy"),
    ({"inputs": "pickle.npy"}, "inputs", "pickle.npy"),
    ({"inputs": "fortran.npy"}, "inputs", "C order"),
    ({"inputs": np.where(X == 7, np.nan, X)}, "inputs", "row 4"),
    ({"inputs": NO_NUMBERS}, "inputs", ""),
    ({"targets": np.zeros(59, int)}, "targets", "59"),
    ({"targets": None}, "targets", ""),
    ({"num_classes": 2}, "data", "train label"),
    ({"owners": [1, 2]}, "owners", "60"),
    ({"class_names": ["a", "a", "b"]}, "class_names", ""),
    ({"name": "a/b"}, "name", "a/b"),
    ({"test_fraction": 0.001}, "test_fraction", "60"),
]


@pytest.mark.parametrize(("changes", "key", "named"), ARRAYS)
def test_bad_arrays(changes: dict[str, Any], key: str, named: str) -> None:
    np.save("pickle.npy", OBJECTS, allow_pickle=True)
    np.save("fortran.npy", np.asfortranarray(X))
    with pytest.raises(SettingError, match=named) as raised:
        FederatedData.from_arrays(**({"inputs": X, "targets": Y} | changes)).setup()
    assert raised.value.key == key


ROWS = "a,b,kind\n" + "".join(f"{a},{b},{kind}\n" for a, b, kind in table_rows(30))
TABLES: list[tuple[str, dict[str, Any], str, str]] = [
    ("", {}, "path", "t.csv"),
    ("a,a,kind\n1,2,x\n", {}, "path", "a"),
    (ROWS + '"1,2,hot\n', {}, "path", "t.csv"),
    (ROWS + "1,2,\xff\n", {}, "path", "t.csv"),
    ("a,kind\n1,2,x\n3,4,y\n", {}, "path", "line 2"),  # pandas would make the first an index
    (ROWS + "1,2\n", {}, "label", "row 31, column 'kind'"),
    (ROWS + "1,nan,hot\n", {}, "columns", "row 31, column 'b'"),
    (ROWS + "1,red,hot\n", {}, "columns", "row 31, column 'b'.*red"),
    (ROWS, {"path": "no.csv"}, "path", "no.csv"),
    (ROWS, {"label": "z"}, "label", "'z'"),
    (ROWS, {"owner": "z"}, "owner", "'z'"),
    (ROWS, {"label": "a", "columns": ["b"]}, "label", "regression"),
    (ROWS, {"test_path": "warm.csv"}, "data", "warm.csv, row 1.*'warm'"),
]


@pytest.mark.parametrize(("content", "changes", "key", "named"), TABLES)
def test_bad_tables(content: str, changes: dict[str, Any], key: str, named: str) -> None:
    Path("t.csv").write_text(content, "latin1")
    Path("warm.csv").write_text("a,b,kind\n1,2,warm\n")
    settings = {"path": "t.csv", "label": "kind", "num_clients": 2} | changes
    with pytest.raises(SettingError, match=named) as raised:
        FederatedData.from_csv(**settings).setup()
    assert raised.value.key == key and "\n" not in str(raised.value)


OTHER = image((9, 7), "PNG")
FOLDERS: list[tuple[str, bytes | None, str, str]] = [  # a file, or a folder where it is None
    ("images/train/red/3.png", b"no", "path", "red/3.png"),
    ("images/train/red/3.png", OTHER, "size", r"red/3.png is 7 × 9"),
    ("images/train/green", None, "path", "green"),
    ("images/test/green/0.png", image((8, 8), "PNG"), "data", "green/0.png"),
    ("clients/eve.csv", b"", "path", "eve.csv"),
    ("clients/eve.csv", b"a,kind\n1,hot\n", "columns", "eve.csv"),
    ("clients/notes.txt", b"", "path", "one kind"),
    ("arrays/bob.npz", None, "path", "bob"),
    ("texts/bad/1.txt", b"\xff", "path", "1.txt"),
    ("nobody", None, "path", "nobody"),
]


@pytest.mark.parametrize(("name", "content", "key", "named"), FOLDERS)
def test_bad_folders(name: str, content: bytes | None, key: str, named: str) -> None:
    write_images(Path("images/train"))
    write_images(Path("images/test"), number=2)
    client_tables(Path("clients"), {"ann": 12, "bob": 8})
    for folder in (Path("arrays"), Path(name) if content is None else Path(name).parent):
        folder.mkdir(parents=True, exist_ok=True)
    if content is not None:
        Path(name).write_bytes(content)
    np.savez("arrays/ann.npz", x=X, y=Y)
    if key == "path" and name.startswith("arrays"):
        Path(name).rmdir()
        np.savez(name, x=X[:, :1], y=Y)
    source = {
        "images": lambda path: FederatedData.from_image_folder(path, num_clients=2),
        "texts": lambda path: FederatedData.from_text(path, tokenizer="vocab.txt"),
    }.get(name.split("/")[0], lambda path: FederatedData.from_clients(path, label="kind"))
    with pytest.raises(SettingError, match=named) as raised:
        source(name.split("/")[0]).setup()
    assert raised.value.key == key


GOOD = ([[1, 2]] * 4, [0] * 4)
LEAF: list[tuple[Any, str, str]] = [
    ("{", "path", "all.json"),
    ("[" * 100_000, "path", "all.json"),
    ('{"users": ["u"], "user_data": {}}', "path", "all.json.*'u'"),
    ({"u": ([], [])}, "path", "all.json.*'u'"),
    ({"u": ([[1, 2]], [0, 1])}, "path", "all.json.*'u'.*length"),
    ({"u": ([[1, 2], [1]], [0, 1])}, "path", "all.json.*'u'"),
    ({"u": ([[1, 2]], ["a"])}, "path", "all.json.*'u'"),
    ({"u": GOOD, "v": ([[1]], [0])}, "path", "'v'"),
    ({"u": GOOD, "v": ([[1, 2]], [-1])}, "data", "label"),
    ({"u": GOOD, "v": ([[1, float("nan")]], [0])}, "data", "input"),
]


@pytest.mark.parametrize(("content", "key", "named"), LEAF)
def test_bad_leaf(content: Any, key: str, named: str) -> None:
    file = Path("leaf/all.json")
    write_leaf(file, content if isinstance(content, dict) else {})
    if isinstance(content, str):
        file.write_text(content)
    with pytest.raises(SettingError, match=named) as raised:
        FederatedData.from_leaf("leaf", test_fraction=0.5).setup()
    assert raised.value.key == key
