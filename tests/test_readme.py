"""The code of the README and of docs/ runs as it stands."""

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fedgkd_pl
import numpy as np
import pytest
import torch
import yaml
from fedgkd_pl import FederatedData
from fedgkd_pl.cli.new import TEMPLATE
from fedgkd_pl.experiments.study import read_study
from fedgkd_pl.settings.files import resolve
from fedgkd_pl.settings.signatures import parameters

from tests.conftest import REPO
from tests.support import lit
from tests.support.datasets import WORDS
from tests.support.faults import warm_script
from tests.support.sources import table_rows, write_csv, write_images, write_leaf

README = (REPO / "README.md").read_text(encoding="utf-8")
DOCS = sorted(f"docs/{file.name}" for file in (REPO / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
EXPERIMENTS = (REPO / "docs" / "experiments.md").read_text(encoding="utf-8")
EXTENDING = (REPO / "docs" / "extending.md").read_text(encoding="utf-8")
MODULES = (REPO / "docs" / "modules.md").read_text(encoding="utf-8")
NETS = (REPO / "docs" / "nets.md").read_text(encoding="utf-8")
MODEL = (REPO / "docs" / "model.md").read_text(encoding="utf-8")
DATA = (REPO / "docs" / "data.md").read_text(encoding="utf-8")
FEDERATED = [value.__name__ for name, value in vars(FederatedData).items() if "from_" in name]
PAGE_ON_PYTHON = (REPO / "docs" / "python.md").read_text(encoding="utf-8")
START = (REPO / "docs" / "start.md").read_text(encoding="utf-8")
CONFIG = (REPO / "docs" / "config.md").read_text(encoding="utf-8")
(TEN_LINES,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", START, re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 8_000


def test_the_ten_lines(tmp_path: Path) -> None:
    assert PYTHON[0] == TEN_LINES
    assert len([line for line in TEN_LINES.splitlines() if line.strip()]) <= 10
    done = warm_script(TEN_LINES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.ckpt")), "the stock ModelCheckpoint wrote nothing"


def test_the_ten_lines_begin_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # and undoes what the lines set
    before_fit = TEN_LINES.split("Trainer(max_epochs")[0]
    sessions: list[dict[str, Any]] = [{}, {}]
    for session in sessions:
        exec(before_fit, session)
    one, other = (session["model"].net.state_dict() for session in sessions)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert sessions[0]["data"].seed == 0


def test_a_config_in_python(tmp_path: Path) -> None:
    done = warm_script(PYTHON[1], tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "runs/quickstart/version_0/metrics.csv").open() as file:
        assert len(list(file)) == 1 + 5
    assert (tmp_path / "curves.png").is_file()


def test_the_page_on_python_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE_ON_PYTHON, re.DOTALL)
    done = warm_script("\n".join(blocks), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| FedAvg | FedGKD |" in done.stdout
    names = {file.name.split(".")[0] for file in (tmp_path / "runs/shown/version_0").iterdir()}
    assert {"events", "summary", "config"} <= names


def test_the_method_in_thirty_lines(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in PYTHON[2].splitlines() if line.strip()]) <= 30
    (tmp_path / "my_methods.py").write_text(PYTHON[2])
    words = "fit --import my_methods --config quickstart.yaml --model Smooth --model.epsilon 0.2"
    assert words in START.replace("\n", " ")
    code, _, err = run(*words.split(), "--rounds", "2")
    assert code == 0, err

    client = sys.modules["my_methods"].SmoothClient(torch.nn.Linear(2, 2), None, epsilon=0.5)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    p = client.net(x).log_softmax(1)
    expected = -(0.5 * p[range(4), y] + 0.5 * p.mean(1)).mean()  # half of the label, half of all
    assert client.training_step((x, y), 0).item() == pytest.approx(expected.item())


def test_own_images_in_a_new_project(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("new", "my-project")[0] == 0
    project = tmp_path / "my-project"
    monkeypatch.chdir(project)
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    (block,) = re.findall(r"```yaml\n(.*?)```", START, re.DOTALL)
    (project / "photos.yaml").write_text(block, encoding="utf-8")
    write_images(project / "photos", 40)
    text = START[START.index(block) :]
    partition, fit, compare, figure = re.findall(r"^fedgkd-pl (\w+ .*?) +#", text, re.MULTILINE)
    study = (project / "study.yaml").read_text(encoding="utf-8")
    config = "config: [config.yaml, photos.yaml]"
    assert f"`{config}`" in text and study.count("config: config.yaml") == 1
    (project / "study.yaml").write_text(study.replace("config: config.yaml", config))
    assert "runs/study " in figure  # which a dry run does not make
    figure = figure.replace("runs/study", "runs/my-project")
    for words in (partition, f"{fit} --rounds 1", f"{compare} --dry_run", figure):
        code, _, err = run(*words.split())
        assert code == 0, err
    with (project / "runs/my-project/version_0/metrics.csv").open() as file:
        assert len(list(file)) == 1 + 1
    assert (project / "curves.png").is_file()


def test_the_explained_config_is_the_shipped_one(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", CONFIG, re.DOTALL)
    (tmp_path / "page.yaml").write_text(block)
    ours = run("fit", "--config", "page.yaml", "--print_config")
    shipped = run("fit", "--config", "cifar10_fedgkd.yaml", "--print_config")
    assert ours[0] == shipped[0] == 0, ours[2]
    assert yaml.safe_load(ours[1]) == yaml.safe_load(shipped[1])


def test_every_flag_and_file_it_names_exists(run: Callable[..., tuple[int, str, str]]) -> None:
    commands = ("partition", "report", "compare", "figure", "predict", "export")
    out = "".join(run(name, "--help")[1] for name in commands)
    out += run("fit", "--help", "all")[1]
    classes = [getattr(fedgkd_pl, name) for name in fedgkd_pl.__all__ if name[0].isupper()]
    paths = [f"{class_.__module__}.{class_.__name__}" for class_ in classes]
    settings = {name for path in paths for name in parameters(path)}
    names = ["concepts", "config", "engines", "partitions", "start", "tensorboard"]
    names += ["troubleshooting"]
    pages = [README, *((REPO / f"docs/{name}.md").read_text(encoding="utf-8") for name in names)]
    others = {"--model.epsilon", "--logdir", "--help", "--port", "--debug", "--import"}
    for text in pages:
        for flag in set(re.findall(r"(--[\w.]+)", text)) - others:
            assert flag in out or flag.split(".")[-1] in settings, flag
        for name in set(re.findall(r"--config (\w+\.yaml)", text)) - {"config.yaml", "photos.yaml"}:
            assert all(Path(file).is_file() for file in resolve(name)), name
        for path in set(re.findall(r"`((?:tests|fedgkd_pl)/[\w/.]+)`", text)):
            assert (REPO / path).exists(), path


@pytest.mark.parametrize("page", ["PAPERS.md", *PAGES])
def test_links_and_pictures_are_there(page: str) -> None:
    file = REPO / page
    for target in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (file.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    tests = {file.name for file in (REPO / "tests").rglob("test_*.py")}
    places = [REPO, REPO / "fedgkd_pl", REPO / "configs"]
    for name in set(re.findall(r"`([a-z_]+/[\w/]+\.(?:py|csv|yaml))`", text)):
        exists = any((place / name).is_file() for place in places)
        exists = exists or (TEMPLATE / f"{name}.tpl").is_file()  # of fedgkd-pl new
        assert exists or name.endswith(("/anchored.py", "/anchored.yaml")), name  # an example
    assert set(re.findall(r"`(test_\w+\.py)`", text)) <= tests


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", EXPERIMENTS, re.DOTALL))
def test_the_yaml_of_the_experiments(
    block: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "block.yaml").write_text(block)
    if "axes:" in block:
        assert len(read_study(str(tmp_path / "block.yaml")).cells()) == 2 * 3 * 3
    else:
        told = ("--config", "quickstart.yaml", "--config", "block.yaml", "--rounds", "1")
        assert run("fit", *told, "--model.local_steps", "1")[0] == 0


def test_the_python_of_the_experiments(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", EXPERIMENTS, re.DOTALL)
    done = warm_script(block + "assert len(gains) == 20\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("personalized.*"))) == 2


def test_the_examples_of_extending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one session, as the page says; most end with an assertion."""
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", EXTENDING, re.DOTALL):
        exec(compile(block, "docs/extending.md", "exec"), session)


def _own_files(folder: Path) -> None:
    """What the examples of docs/data.md read."""
    rows = [[*row[:2], row[2], f"garage{n % 3}"] for n, row in enumerate(table_rows(60))]
    write_csv(folder / "fleet.csv", ["a", "b", "kind", "garage"], rows)
    write_csv(folder / "cars.csv", ["a", "b", "kind"], table_rows(60))
    kinds = [["a very good film", "good"], ["bad news", "bad"]] * 12
    write_csv(folder / "reviews.csv", ["text", "label"], kinds)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    write_images(folder / "photos", 10)
    for number, name in enumerate(("ann", "bob", "eve")):
        write_csv(folder / "hospitals" / f"{name}.csv", ["a", "b", "kind"], table_rows(20, number))
    for split in ("train", "test"):
        users = {f"f{n}": ([[n, 0.5, 1, 0]] * 9, [0, 1, 2] * 3) for n in range(3)}
        write_leaf(folder / "femnist" / split / "all.json", users)
    np.save(folder / "x.npy", np.random.default_rng(0).random((80, 4), np.float32))
    np.save(folder / "y.npy", np.arange(80) % 2)
    if find_spec("pyarrow"):
        from pyarrow import csv, parquet

        parquet.write_table(csv.read_csv(folder / "cars.csv"), folder / "cars.parquet")


def test_the_examples_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _own_files(tmp_path)
    session = {"__name__": "data"}
    needs = {"from_parquet": "pyarrow", "from_huggingface": "datasets"}
    for block in re.findall(r"```python\n(.*?)```", DATA, re.DOTALL):
        assert len([line for line in block.splitlines() if line.strip()]) <= 10, block
        if all(find_spec(package) for name, package in needs.items() if name in block):
            exec(compile(block, "docs/data.md", "exec"), session)
    for class_ in FEDERATED:
        assert f"`{class_}`" in DATA, class_


def test_the_config_of_data(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    _own_files(tmp_path)
    (config,) = re.findall(r"```yaml\n(.*?)```", DATA, re.DOTALL)
    (tmp_path / "cars.yaml").write_text(config)
    code, _, err = run("fit", "--config", "cars.yaml", "--model.engine.workers", "1")
    assert code == 0, err


def test_the_examples_of_modules(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_lit", lit)
    session = {"__name__": "modules"}
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", MODULES, re.DOTALL):
        assert len([line for line in block.splitlines() if line.strip()]) <= 10, block
        exec(compile(block, "docs/modules.md", "exec"), session)
    (config,) = re.findall(r"```yaml\n(.*?)```", MODULES, re.DOTALL)
    (tmp_path / "lit.yaml").write_text(config.replace("my_lit", "tests.support.lit"))
    code, _, err = run("fit", "--import", "tests.support.lit", "--config", "lit.yaml")
    assert code == 0, err


ALONE = """
import sys
sys.modules["fedgkd_pl"] = None
from sklearn.datasets import load_digits
images = load_digits().data[:5]
"""


def test_the_examples_of_model(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the page's order, those that say so without the package; the run is shorter."""
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {"__name__": "model"}
    alone = ALONE
    have_onnx = find_spec("onnxscript") is not None
    for kind, block in re.findall(r"```(sh|python)\n(.*?)```", MODEL, re.DOTALL):
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= 7, block
        if kind == "sh":
            for line in lines:
                if have_onnx or "onnx" not in line:
                    short = ("--model.local_epochs", "1") if " fit " in line else ()
                    code, _, err = run(*line.split()[1:], *short)
                    assert code == 0, err
        elif "# without fedgkd_pl" not in block:
            exec(compile(block, "docs/model.md", "exec"), session)
        elif have_onnx or "onnx" not in block:
            if not find_spec("onnxruntime"):
                ours = "onnx.reference import ReferenceEvaluator as"
                block = block.replace("onnxruntime import", ours)
            alone += block
    done = warm_script(alone, tmp_path)
    assert done.returncode == 0, done.stderr
    labels = session["found"].labels.tolist()
    assert session["logits"].argmax(1).tolist() == labels
    for name in ("digit.png.predictions.csv", "digits.csv"):
        assert (tmp_path / name).is_file()
    (few,) = re.findall(r"three files are enough: `(.*?)`.*?`(.*?)`.*?`(.*?)`", MODEL, re.DOTALL)
    (tmp_path / "few").mkdir()
    for name in few:
        (tmp_path / "runs/quickstart/version_0" / name).rename(tmp_path / "few" / name)
    assert fedgkd_pl.load_run("few").predict(session["images"]).labels.tolist() == labels


def test_a_method_of_extending_from_the_command_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)  # of another test
    method = re.findall(r"```python\n(.*?)```", EXTENDING, re.DOTALL)[0]
    (config,) = re.findall(r"```yaml\n(.*?)```", EXTENDING, re.DOTALL)
    (tmp_path / "my_methods.py").write_text(method, encoding="utf-8")
    config = config.replace("Anchored\n", "my_methods.Anchored\n")  # the test above has one, too
    (tmp_path / "anchored.yaml").write_text(config, encoding="utf-8")
    told = ("--config", "protocols/digits.yaml", "--config", "anchored.yaml", "--rounds", "1")
    code, _, err = run("fit", "--import", "my_methods", *told, "--model.local_steps", "2")
    assert code == 0, err
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "client/anchor_mean" in metrics.read_text(encoding="utf-8")


def test_the_examples_of_nets(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", NETS, re.DOTALL)
    exec(compile(block, "docs/nets.md", "exec"), {"__name__": "nets"})
    (config,) = re.findall(r"```yaml\n(.*?)```", NETS, re.DOTALL)
    (tmp_path / "nets.yaml").write_text(config, encoding="utf-8")
    code, _, err = run("fit", "--config", "nets.yaml", "--model.engine.workers", "1")
    assert code == 0, err
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "nets/MLP1_test_acc" in metrics.read_text(encoding="utf-8")


def test_the_config_of_tasks(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    page = (REPO / "docs" / "tasks.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "tasks.yaml").write_text(config, encoding="utf-8")
    files = ("--config", "protocols/digits.yaml", "--config", "tasks.yaml")
    code, _, err = run("fit", *files, "--rounds", "1", "--model.engine.workers", "1")
    assert code == 0, err


def test_every_guard_against_a_published_error_exists() -> None:
    papers = (REPO / "PAPERS.md").read_text(encoding="utf-8")
    tests = "\n".join(f.read_text(encoding="utf-8") for f in (REPO / "tests").rglob("test_*.py"))
    guards = set(re.findall(r"`(test_\w+)`", papers))
    assert len(guards) >= 14
    for name in guards:
        assert f"\ndef {name}(" in tests, name
