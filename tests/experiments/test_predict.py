"""A run's model on new inputs: by its folder alone, copied, where its data is not."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedgkd_pl import CIFAR10, Digits, ResNet8, export, load_run, read_checkpoint, read_run
from fedgkd_pl.callbacks.export import FILES
from fedgkd_pl.errors import SettingError
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import script
from tests.support.datasets import TINY, WORDS
from tests.support.runs import QUICK, Run, version
from tests.support.sources import table_rows, write_config, write_csv, write_images

# what a program without this package makes of the files; of weights, only with the net's code
ALONE = """
import sys
sys.modules["fedgkd_pl"] = None
import torch
x = torch.load("x.pt")
found = {"torch_export": torch.export.load("run/model.pt2").module()(x)}
try:
    from onnxruntime import InferenceSession as Session
except ImportError:
    try:
        from onnx.reference import ReferenceEvaluator as Session
    except ImportError:
        Session = None
if Session is not None:
    (logits,) = Session("run/model.onnx").run(["logits"], {"inputs": x.numpy()})
    found["onnx"] = torch.from_numpy(logits)
if x.dim() == 2:
    from safetensors.torch import load_file
    from torch import nn
    net = nn.ModuleDict({
        "features": nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Identity()),
        "classifier": nn.Linear(32, 10),
    })
    net.load_state_dict(load_file("run/model.safetensors"))
    found["safetensors"] = net["classifier"](net["features"](x))
torch.save(found, "found.pt")
"""


def moved(folder: Path, to: Path) -> Path:
    """The run elsewhere, the original removed."""
    shutil.copytree(folder, to)
    shutil.rmtree(folder)
    return to


def check_formats(copied: Path, x: torch.Tensor, expected: torch.Tensor) -> None:
    """The exported files give these logits, without the package, and it is not trivial."""
    forms = ["safetensors", "torch_export"]
    try:
        import onnxscript  # noqa: F401

        forms.append("onnx")
    except ImportError:
        pass
    for form in forms:
        assert export(copied, form) == copied / FILES[form]  # type: ignore[arg-type, index]
    torch.save(x, copied.parent / "x.pt")
    done = script(ALONE, copied.parent)
    assert done.returncode == 0, done.stderr
    found = torch.load(copied.parent / "found.pt")
    assert {"torch_export"} <= found.keys() and ("onnx" in found) == ("onnx" in forms)
    assert expected.std() > 1e-2
    for logits in found.values():
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_every_format_gives_the_logits_without_the_package(done: Path, tmp_path: Path) -> None:
    copied = moved(done, tmp_path / "run")
    data = Digits(num_clients=2)
    data.setup()
    x = data.test.inputs / 16
    w = load_file(copied / "global.safetensors")
    hidden = (x @ w["features.1.weight"].T + w["features.1.bias"]).relu()
    expected = hidden @ w["classifier.weight"].T + w["classifier.bias"]
    check_formats(copied, x, expected)
    trained = load_run(copied)
    found = trained.predict(data.test.inputs)
    torch.testing.assert_close(found.probabilities, expected.softmax(1))
    assert found.labels.tolist() == expected.argmax(1).tolist()
    assert found.names == [str(n) for n in expected.argmax(1).tolist()] and len(found) == 360
    assert trained.num_classes == 10 and not trained.net.training
    accuracy = (found.labels == data.test.targets).double().mean().item()
    assert accuracy == pytest.approx(read_run(copied).metrics()[-1]["test/acc"])


@pytest.mark.slow
def test_cifar_from_a_copied_folder(run: Run, real_data: Path, tmp_path: Path) -> None:
    flags = ("--data.data_dir", real_data, "--data.num_clients", "1000", "--rounds", "1")
    flags += ("--data.participation", "0.001", "--data.partition", "IID", "--name", "cifar")
    steps = ("--model.local_steps", "3", "--model.engine.workers", "1")
    told = ("--config", "cifar10_fedgkd.yaml", *flags, *steps)
    code, _, err = run("fit", *told, "--trainer.limit_val_batches", "1")
    assert code == 0, err
    copied = moved(version(tmp_path, "cifar"), tmp_path / "run")
    data = CIFAR10(data_dir=str(real_data), download=False)
    images = data._read(data._source().test_list).inputs[:16]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.MEAN, data.STD))
    x = (images / 255 - mean) / std
    net = ResNet8(10).eval()
    net.load_state_dict(load_file(copied / "global.safetensors"))
    expected = net(x).detach()
    check_formats(copied, x, expected)
    net.load_state_dict(load_file(copied / "model.safetensors"))
    torch.testing.assert_close(net(x), expected)
    trained = load_run(copied)  # neither data nor a download
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    for raw in (images, pictures):
        torch.testing.assert_close(trained.predict(raw).probabilities, expected.softmax(1))
    assert trained.class_names[3] == "cat"
    some = ("--trainer.limit_test_batches", "1")
    code, out, err = run("test", copied, "--best", "--data.data_dir", real_data, *some)
    assert code == 0 and "test/acc" in out, err


def test_which_model(run: Run, tmp_path: Path) -> None:
    callback = ("--trainer.callbacks", "AveragedModel")
    assert run("fit", *QUICK, *callback, "--data.val_fraction", "0.1")[0] == 0
    folder = version(tmp_path)
    last = load_file(folder / "global.safetensors")
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    found = {which: load_run(folder, which).net.state_dict() for which in ("last", "average")}
    kept = read_checkpoint(best)["state_dict"]
    for name, tensor in load_run(folder, "best").net.state_dict().items():
        assert torch.equal(tensor, kept[f"net.{name}"]) and torch.equal(
            found["last"][name], last[name]
        )
        average = load_file(folder / "average.safetensors")[name]
        assert torch.equal(found["average"][name], average) and not torch.equal(average, last[name])
        byhand = load_run(folder, str(best)).net.state_dict()[name]
        assert torch.equal(byhand, tensor)
    (folder / "summary.json").unlink()  # a stopped run has its checkpoints alone
    (folder / "global.safetensors").unlink()
    stopped = load_run(folder).net.state_dict()
    assert all(torch.equal(stopped[name], tensor) for name, tensor in last.items())


def test_a_run_that_goes_on_is_not_taken_for_its_earlier_end(run: Run, done: Path) -> None:
    """As it would be if it were killed in its last round."""
    earlier = {name: (done / name).read_bytes() for name in ("summary.json", "global.safetensors")}
    assert run("fit", "--resume", done, "--rounds", "4")[0] == 0
    for name, content in earlier.items():
        (done / name).write_bytes(content)
    found = load_run(done).net.state_dict()
    newest = read_checkpoint(done / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(torch.equal(found[name], newest[f"net.{name}"]) for name in found)


def test_a_net_keeps_its_precision_and_needs_no_trainer_of_the_runs(
    run: Run, tmp_path: Path
) -> None:
    assert run("fit", *QUICK, "--rounds", "1", "--trainer.precision", "64-true")[0] == 0
    folder = version(tmp_path)
    config = (folder / "config.yaml").read_text()
    assert "accelerator: auto" in config
    (folder / "config.yaml").write_text(config.replace("accelerator: auto", "accelerator: tpu"))
    before = torch.get_rng_state()
    trained = load_run(folder)
    assert torch.equal(before, torch.get_rng_state())
    assert {p.dtype for p in trained.net.parameters()} == {torch.float64}
    assert trained.predict(np.zeros(64)).probabilities.dtype == torch.float64


def test_a_table_is_predicted_where_its_data_is_not(run: Run, tmp_path: Path) -> None:
    write_csv(tmp_path / "cars.csv", ["a", "b", "kind"], table_rows(60))
    config = write_config(
        tmp_path, "CSVTable", 2, path="cars.csv", label="kind", num_clients=2, batch_size=8
    )
    assert run("fit", "--config", config)[0] == 0
    copied = moved(version(tmp_path, "own"), tmp_path / "elsewhere")
    (tmp_path / "cars.csv").rename(tmp_path / "moved.csv")
    rows = table_rows(7, seed=3)
    write_csv(tmp_path / "new.csv", ["b", "note", "a"], [[b, "x", a] for a, b, _ in rows])
    code, out, err = run("predict", copied, "--input", "new.csv", "--output", "kinds.csv")
    assert code == 0 and out.endswith("wrote kinds.csv\n"), err
    with (tmp_path / "kinds.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    expected = load_run(copied).predict([[a, b] for a, b, _ in rows])
    assert [row["prediction"] for row in found] == expected.names
    assert [row["row"] for row in found] == list("1234567")
    for row, p in zip(found, expected.probabilities.tolist(), strict=True):
        assert [float(row["cold"]), float(row["hot"])] == pytest.approx(p, rel=1e-5)
        assert float(row["probability"]) == pytest.approx(max(p), rel=1e-5)
    code, _, err = run("predict", copied, "--input", "moved.csv.predictions.csv")
    assert code == 2 and "no such file" in err
    code, out, err = run("test", copied, "--data.path", "moved.csv")
    assert code == 0 and "test/acc" in out, err
    code, _, err = run("test", copied)
    assert code == 2 and err.startswith("error: data.path: cars.csv: there is no such file")
    (copied / "model.json").unlink()  # as of an older version
    assert load_run(copied, settings=["--data.path", "moved.csv"]).class_names == ["cold", "hot"]
    code, _, err = run("predict", copied, "--input", "new.csv")
    text = "error: run: is older than model.json, and its data is not here either: data.path: cars"
    assert code == 2 and err.startswith(text) and err.count("\n") == 1
    assert export(copied).is_file()  # weights need neither


def test_images_in_a_folder(run: Run, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 8)
    config = write_config(
        tmp_path, "ImageFolders", 75, path="photos", size=5, num_clients=2, batch_size=4
    )
    assert run("fit", "--config", config)[0] == 0
    copied = moved(version(tmp_path, "own"), tmp_path / "elsewhere")
    shutil.move(tmp_path / "photos", tmp_path / "new")
    (tmp_path / "new" / ".hidden.png").write_text("no image")
    (tmp_path / "new" / "notes.md").write_text("no image")
    code, out, err = run("predict", copied, "--input", "new", "--best")
    assert code == 0 and "the first 10 of 16 inputs" in out, err
    with (tmp_path / "new.predictions.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["file"] for row in found] == [
        f"{c}/{n}.png" for c in ("blue", "red") for n in range(8)
    ]
    trained = load_run(copied, "best")
    files = [tmp_path / "new" / row["file"] for row in found]
    assert trained.predict(files).names == [row["prediction"] for row in found]
    (tmp_path / "new" / "blue" / "bad.png").write_text("no image")
    (tmp_path / "new.predictions.csv").unlink()
    code, _, err = run("predict", copied, "--input", "new")
    assert code == 2 and err == "error: input: new/blue/bad.png cannot be decoded\n"
    assert not (tmp_path / "new.predictions.csv").exists()


def test_texts_with_tokenizer_and_encoder_gone(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = [["a very good film", "good"], ["bad news", "bad"]] * 8
    write_csv(tmp_path / "reviews.csv", ["text", "label"], kinds)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**TINY)
    transformers.AutoModel.from_config(settings).save_pretrained(tmp_path / "encoder")
    config = write_config(
        *(tmp_path, "TextFiles", 1), path="reviews.csv", tokenizer="vocab.txt", num_clients=2
    )
    net = {"class_path": "fedgkd_pl.TextClassifier"}
    net |= {"init_args": {"num_classes": 2, "encoder": "encoder"}}  # type: ignore[dict-item]
    code, _, err = run("fit", "--config", config, "--model.net", json.dumps(net))
    assert code == 0, err
    texts = ["good film", "the news is very bad"]
    there = version(tmp_path, "own")
    expected = load_run(there).predict(texts).probabilities
    copied = moved(there, tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "encoder")
    for name in ("vocab.txt", "reviews.csv"):
        (tmp_path / name).unlink()
    trained = load_run(copied)
    assert torch.equal(trained.predict(texts).probabilities, expected)
    assert trained.transform(texts)[0].tolist()[:4] == [2, 6, 8, 3]  # [CLS] good film [SEP]
    (tmp_path / "one.txt").write_text(texts[0])
    write_csv(tmp_path / "some.csv", ["id", "text"], [[7, text] for text in texts])
    for source, names in (("one.txt", ["one.txt"]), ("some.csv", ["1", "2"])):
        code, _, err = run("predict", copied, "--input", source, "--output", "out.csv")
        assert code == 0, err
        with (tmp_path / "out.csv").open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        assert [row[0] for row in rows] == names
        for row, p in zip(rows, expected, strict=False):
            assert float(row[3]) == pytest.approx(p[0].item(), abs=1e-4)


def test_many_classes_have_their_five_best(done: Path, tmp_path: Path) -> None:
    from fedgkd_pl.data.inputs import read_inputs
    from fedgkd_pl.experiments.predict import predict_files
    from fedgkd_pl.experiments.trained import Trained

    raw = read_inputs(json.loads((done / "model.json").read_text())["raw"])
    net = torch.nn.Linear(64, 30)
    names = [f"class {n}" for n in range(30)]
    x = np.random.default_rng(0).integers(0, 17, (300, 64))
    np.savez(tmp_path / "x.npz", x=x, y=np.zeros(300))
    predict_files(Trained(net, raw, names, "classes"), tmp_path / "x.npz", tmp_path / "o.csv")
    with (tmp_path / "o.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 300 and list(rows[0])[-2:] == ["prediction_5", "probability_5"]
    p = net(torch.from_numpy(x / 16).float()).softmax(1)
    order = p.argsort(1, descending=True)
    for row, best, values in zip(rows, order.tolist(), p.tolist(), strict=True):
        assert row["prediction"] == names[best[0]] and row["prediction_5"] == names[best[4]]
        assert float(row["probability_3"]) == pytest.approx(values[best[2]], rel=1e-4)


def write_bad(folder: Path) -> None:
    x = np.zeros((300, 64))
    np.save(folder / "x.npy", x)
    x[280, 3] = np.nan
    np.save(folder / "nan.npy", x)
    np.save(folder / "wide.npy", np.zeros((3, 65)))
    np.save(folder / "object.npy", np.array([{}]), allow_pickle=True)
    np.savez(folder / "two.npz", a=x, b=x)
    Image.new("L", (9, 7)).save(folder / "large.png")
    (folder / "broken.png").write_text("no image")
    (folder / "table.csv").write_text("a,b\n1,2\n")
    (folder / "empty").mkdir()


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("--input nowhere", "input: there is no such file or folder (got nowhere)"),
        ("--input nan.npy", "input: row 281 has NaN or Inf"),
        ("--input wide.npy", "input: a sample must be 64 whole numbers"),
        ("--input object.npy", "input: object.npy cannot be read"),
        ("--input two.npz", "input: two.npz has no inputs nor x, but a, b"),
        ("--input large.png", "input: large.png is 7 × 9 (height × width), the run's images are"),
        ("--input broken.png", "input: broken.png cannot be decoded"),
        ("--input table.csv", "input: this run takes image files, a folder of them, or an .npy"),
        ("--input empty", "input: has no .bmp, .jpeg"),
        ("--input x.npy --output o.txt", "output: must end in .csv (got o.txt)"),
        ("--input x.npy --output no/o.csv", "output: its folder does not exist"),
        ("--input x.npy --average", "average: no average.safetensors in the run"),
        ("--input x.npy --ckpt_path nope", "ckpt_path: no such file (got nope)"),
        ("--input x.npy --best --average", "argument --average: not allowed with argument --best"),
        ("--input x.npy --last --ckpt_path best", "argument --ckpt_path: not allowed with"),
        ("--input x.npy --model.gamma 9", "model.gamma: the run began with"),
        ("--input", "argument --input: expected one argument"),
        ("--output o.csv", "input: which file or folder?"),
        ("--average", "average: is for --input"),
        ("--best --ckpt_path last", "ckpt_path: one model at a time (got best and last)"),
    ],
)
def test_what_cannot_be_predicted(
    run: Run, done: Path, tmp_path: Path, argv: str, error: str
) -> None:
    write_bad(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("predict", done, *argv.split())
    assert (code, out) == (2, "") and err.startswith(f"error: {error}") and err.count("\n") == 1, (
        err
    )
    assert sorted(tmp_path.rglob("*")) == before


def put(*keys: str, value: Any) -> Any:
    """A change of one value of model.json."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("format", value=2),
        put("task", value="magic"),
        put("num_classes", value=-1),
        put("num_classes", value=True),
        put("class_names", value=["one"]),
        put("class_names", value=[1] * 10),
        put("net", "shape", value=[2**40]),
        put("net", "dtype", value="load"),
        put("raw", "dtype", value="__class__"),
        put("raw", "shape", value=[0]),
        put("raw", "shape", value=[2**20, 2**20]),
        put("raw", "reading", value={"kind": "pickle"}),
        put("raw", "reading", "largest", value=0),
        put("raw", "reading", "shape", value=[4, 4, 4]),
        put("raw", "transform", value={"kind": "normalise", "mean": [0], "std": [1]}),
        put("raw", "transform", "maximum", value=float("nan")),
        put("raw", "transform", "maximum", value=0),
        put("raw", "transform", "shape", value=[63]),
        put("encoder", value="a name"),
    ],
)
def test_a_damaged_description_is_refused_in_one_line(done: Path, change: Any) -> None:
    file = done / "model.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(SettingError, match=r"^run: not a model.json of fedgkd-pl \(got "):
        load_run(done)


@pytest.mark.parametrize("content", [b"", b"[" * 9999, b"\xff", b"null"])
def test_a_description_that_is_none(done: Path, content: bytes) -> None:
    (done / "model.json").write_bytes(content)
    with pytest.raises(SettingError, match=r"^run: not a model.json of fedgkd-pl"):
        load_run(done)


def test_names_are_shown_without_control_characters(done: Path) -> None:
    file = done / "model.json"
    content = json.loads(file.read_text())
    content["class_names"][0] = "\x1b[31mzero\n"
    file.write_text(json.dumps(content))
    assert load_run(done).class_names[0] == "?[31mzero"


def test_weights_of_another_net_are_refused(done: Path) -> None:
    save_file({"features.1.weight": torch.zeros(3, 3)}, done / "global.safetensors")
    with pytest.raises(SettingError, match=r"^run: is damaged, or of another net"):
        load_run(done)
    (done / "global.safetensors").write_bytes(b"no weights")
    with pytest.raises(SettingError, match=r"^run: is damaged, or of another net"):
        load_run(done)


def test_numbers_are_not_predicted_as_classes(run: Run, tmp_path: Path) -> None:
    rows = [[a, b, a + b] for a, b, _ in table_rows(40)]
    write_csv(tmp_path / "cars.csv", ["a", "b", "price"], rows)
    settings = {"path": "cars.csv", "label": "price", "regression": True, "num_clients": 2}
    config = write_config(tmp_path, "CSVTable", 2, classes=1, **settings)
    assert run("fit", "--config", config, "--model.loss", "SquaredError")[0] == 0
    trained = load_run(version(tmp_path, "own"))
    assert (trained.task, trained.num_classes) == ("values", 0)
    assert trained.net(trained.transform([[0.5, 1.0]])).shape == (1, 1)
    with pytest.raises(SettingError, match=r"^predict: needs the logits of classes"):
        trained.predict([[0.5, 1.0]])
