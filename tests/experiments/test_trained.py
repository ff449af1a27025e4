"""A run's model afterwards: by its folder alone, copied, where its data is not."""

import csv
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fedgkd_pl import Digits, export, load_run, read_checkpoint, read_run
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
    assert found.names == [str(n) for n in expected.argmax(1).tolist()]
    assert trained.num_classes == 10 and not trained.net.training
    accuracy = (found.labels == data.test.targets).double().mean().item()
    assert accuracy == pytest.approx(read_run(copied).metrics()[-1]["test/acc"])


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def weights(file: Path) -> dict[str, torch.Tensor]:
    state = read_checkpoint(file)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


def test_which_model(run: Run, tmp_path: Path) -> None:
    callback = ("--trainer.callbacks", "AveragedModel", "--trainer.precision", "64-true")
    assert run("fit", *QUICK, *callback, "--data.val_fraction", "0.1")[0] == 0
    folder = version(tmp_path)
    (best,) = (folder / "checkpoints").glob("best-*.ckpt")
    expected = {
        "last": load_file(folder / "global.safetensors"),
        "average": load_file(folder / "average.safetensors"),
        "best": weights(best),
        str(best): weights(best),
    }
    before = torch.get_rng_state()
    for which, state in expected.items():
        net = load_run(folder, which).net
        assert same(net.state_dict(), state) and not net.training
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float64}
        assert which in ("last", "best") or same(
            load_file(export(folder, "safetensors", which)), state
        )
    assert torch.equal(before, torch.get_rng_state())
    assert not same(expected["last"], expected["average"])
    (folder / "summary.json").unlink()  # a stopped run has its checkpoints alone
    (folder / "global.safetensors").unlink()
    assert same(load_run(folder).net.state_dict(), expected["last"])
    other = shutil.copytree(folder, tmp_path / "other")
    with pytest.raises(SettingError, match=r"^ckpt_path: belongs to another run"):
        export(folder, ckpt_path=str(other / "checkpoints" / "last.ckpt"))


def test_a_run_that_goes_on_is_not_taken_for_its_earlier_end(run: Run, done: Path) -> None:
    """As it would be if it were killed in its last round."""
    earlier = {name: (done / name).read_bytes() for name in ("summary.json", "global.safetensors")}
    assert run("fit", "--resume", done, "--rounds", "4")[0] == 0
    for name, content in earlier.items():
        (done / name).write_bytes(content)
    found = load_run(done).net.state_dict()
    newest = read_checkpoint(done / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(torch.equal(found[name], newest[f"net.{name}"]) for name in found)


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
    (tmp_path / "link.csv").symlink_to("new.csv")
    (tmp_path / "same.csv").hardlink_to("new.csv")
    before = (tmp_path / "new.csv").read_bytes()
    for name in ("new.csv", "link.csv", "same.csv"):  # the input itself
        code, _, err = run("predict", copied, "--input", "new.csv", "--output", name)
        assert code == 2 and err.startswith("error: output: ") and err.count("\n") == 1, err
        assert (tmp_path / name).read_bytes() == before
    code, out, err = run("test", copied, "--data.path", "moved.csv")
    assert code == 0 and "test/acc" in out, err
    write_csv(tmp_path / "gap.csv", ["a", "b"], [[a, b] for a, b, _ in table_rows(300)])
    with (tmp_path / "gap.csv").open("a") as file:
        file.write("1,\n")
    code, _, err = run("predict", copied, "--input", "gap.csv")
    assert code == 2 and err.startswith("error: inputs: row 301 has NaN or Inf"), err
    (copied / "model.json").unlink()
    assert run("predict", copied, "--input", "new.csv")[2].startswith(
        "error: run: has no model.json"
    )


def test_images_in_a_folder(run: Run, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 8)
    config = write_config(
        tmp_path, "ImageFolders", 75, path="photos", size=5, num_clients=2, batch_size=4
    )
    assert run("fit", "--config", config)[0] == 0
    copied = moved(version(tmp_path, "own"), tmp_path / "elsewhere")
    shutil.move(tmp_path / "photos", tmp_path / "new")
    for hidden in ("._0.png", ".old/0.png", "__MACOSX/red/._0.png", "red/__MACOSX/0.png"):
        (tmp_path / "new" / hidden).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "new" / hidden).write_text("no image")
    (tmp_path / "new" / "notes.md").write_text("no image")
    code, out, err = run("predict", copied, "--input", "new", "--ckpt_path", "best")
    assert code == 0 and "first 10 of 16 inputs" in out, err
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
    assert code == 2 and err.startswith("error: input: new/blue/bad.png cannot be decoded")
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
    from fedgkd_pl.experiments.trained import Trained, predict_files

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
    np.save(folder / "object.npy", np.array([{}]), allow_pickle=True)
    Image.new("L", (9, 7)).save(folder / "large.png")
    (folder / "table.csv").write_text("a,b\n1,2\n")
    (folder / "empty").mkdir()


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("--input nan.npy", "inputs: row 281 has NaN or Inf"),
        ("--input object.npy", "input: object.npy cannot be read"),
        ("--input large.png", "input: an image is [7, 9] (height, width), the run's are"),
        ("--input table.csv", "input: this run takes .bmp, .jpeg"),
        ("--input empty", "input: has no .bmp, .jpeg"),
        ("--input x.npy --output o.txt", "output: must end in .csv"),
        ("--input x.npy --ckpt_path average", "average: no average.safetensors in the run"),
        ("--input x.npy --model.gamma 9", "model.gamma: the run began with"),
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


def test_damaged_weights_and_descriptions_are_refused(done: Path) -> None:
    save_file({"features.1.weight": torch.zeros(3, 3)}, done / "global.safetensors")
    with pytest.raises(SettingError, match=r"^ckpt_path: holds another net: "):
        load_run(done)
    (done / "global.safetensors").write_bytes(b"no weights")
    with pytest.raises(SettingError, match=r"^run: damaged: .*global.safetensors"):
        load_run(done)
    for change in ({"class_names": 3}, {"raw": {"reading": {"kind": "pickle"}}}):
        content = json.loads((done / "model.json").read_text())
        (done / "model.json").write_text(json.dumps(content | change))
        with pytest.raises(SettingError, match=r"^run: .*model.json"):
            load_run(done)
        (done / "model.json").write_text(json.dumps(content))


@pytest.mark.parametrize("which", ["last", "average"])
def test_every_flipped_bit_of_weights_is_noticed(run: Run, tmp_path: Path, which: str) -> None:
    """Also of a copy of the three files that a model needs."""
    flags = ("--rounds", "1", "--trainer.callbacks", "AveragedModel")
    assert run("fit", *QUICK, *flags)[0] == 0
    name = {"last": "global.safetensors", "average": "average.safetensors"}[which]
    (tmp_path / "few").mkdir()
    for each in ("config.yaml", "model.json", name):
        shutil.copy(version(tmp_path) / each, tmp_path / "few")
    file = tmp_path / "few" / name
    content = file.read_bytes()
    assert load_run("few", which).task == "classes"
    header = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(0)
    places = chance.sample(range(8 * header), 6) + chance.sample(
        range(8 * header, 8 * len(content)), 6
    )
    for place in places:
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(SettingError) as error:
            load_run("few", which)
        assert str(error.value) == f"run: damaged: {Path('few') / name}"
    np.save("x.npy", np.zeros((2, 64)))
    for words in (("predict", "few", "--input", "x.npy"), ("export", "few")):
        code, _, err = run(*words, "--ckpt_path", which)
        assert (code, err) == (2, f"error: run: damaged: few/{name}\n")
    save_file(load_file(version(tmp_path) / name), file)  # weights alone, without a checksum
    assert load_run("few", which).task == "classes"


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


def test_a_run_is_evaluated_by_its_folder(run: Run, done: Path) -> None:
    code, out, err = run("test", done)
    assert code == 0, err
    final = read_run(done).metrics()[-1]["test/acc"]
    assert f"{final:.6f}"[:7] in out
    code, out, err = run("predict", done, "--ckpt_path", "best")
    assert code == 0 and f"wrote {done / 'predictions.csv'}" in out
    with (done / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    best = max(read_run(done).metrics(), key=lambda row: row["val/acc"])
    assert right == pytest.approx(best["test/acc"])
    assert run("validate", done)[0] == 0
