"""Another engine takes its own defaults, whichever way it is named; none needs its package here."""

from pathlib import Path
from typing import Any

import pytest
import yaml

LOCAL = """\
model:
  class_path: FedAvg
  init_args:
    engine: {class_path: LocalEngine, init_args: {workers: 3, threads: 2, timeout: 5}}
"""
FILES = {
    "local.yaml": LOCAL,
    "short.yaml": "model: {init_args: {engine: ray}}\n",
    "whole.yaml": "model: {init_args: {engine: {class_path: fedgkd_pl.engines.ray.RayEngine, "
    "init_args: {workers: 7, retries: 1}}}}\n",
    "more.yaml": "model: {init_args: {engine: {init_args: {workers: 6}}}}\n",
}
RAY = {
    "ray_address": None,
    "workers": "auto",
    "threads": 1,
    "gpus": None,
    "timeout": None,
    "retries": 3,
}
FLOWER = {"deadline": 3600.0, "patience": 300.0, "threads": 1, "max_samples": None}
NAMED = "--config local.yaml --model.engine"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a short name": (f"{NAMED} ray", "RayEngine", RAY),
    "a class": (f"{NAMED} fedgkd_pl.engines.ray.RayEngine", "RayEngine", RAY),
    "class_path": (f"{NAMED}.class_path RayEngine", "RayEngine", RAY),
    "init_args": ("--config local.yaml --model.init_args.engine ray", "RayEngine", RAY),
    "JSON": (
        f'{NAMED} {{"class_path":"RayEngine","init_args":{{"workers":9}}}}',
        "RayEngine",
        RAY | {"workers": 9},
    ),
    "a flag behind": (f"{NAMED} ray --model.engine.workers 4", "RayEngine", RAY | {"workers": 4}),
    "flags behind": (
        f"{NAMED} ray --model.engine.threads 2 --model.engine.timeout 8",
        "RayEngine",
        RAY | {"threads": 2, "timeout": 8.0},
    ),
    "Flower": (f"{NAMED} flower", "FlowerEngine", FLOWER),
    "back again": (
        f"{NAMED} ray --model.engine.workers 4 --model.engine local",
        "LocalEngine",
        {"workers": "auto", "threads": 1, "timeout": None},
    ),
    "a config": ("--config local.yaml --config short.yaml", "RayEngine", RAY),
    "a config with arguments": (
        "--config local.yaml --config whole.yaml",
        "RayEngine",
        RAY | {"workers": 7, "retries": 1},
    ),
    "three configs": (
        "--config local.yaml --config short.yaml --config more.yaml",
        "RayEngine",
        RAY | {"workers": 6},
    ),
    "a config of the package": (
        "--config whole.yaml --config digits/fedavg.yaml",
        "LocalEngine",
        {"workers": 1, "threads": 1, "timeout": None},
    ),
    "another method, too": (
        "--config local.yaml --model MOON --model.engine ray",
        "RayEngine",
        RAY,
    ),
    "another method behind": (
        "--config local.yaml --model.engine ray --model.engine.workers 4 --model MOON",
        "RayEngine",
        RAY | {"workers": 4},
    ),
    # the same engine keeps what it has, by whichever of its names
    "the same": (
        f"{NAMED} fedgkd_pl.engines.local.LocalEngine",
        "LocalEngine",
        {"workers": 3, "threads": 2, "timeout": 5.0},
    ),
    "the same, short": (
        "--config local.yaml --config whole.yaml --model.engine ray",
        "RayEngine",
        RAY | {"workers": 7, "retries": 1},
    ),
    "an argument alone": (
        "--config local.yaml --config more.yaml",
        "LocalEngine",
        {"workers": 6, "threads": 2, "timeout": 5.0},
    ),
}


@pytest.fixture
def engine(run: Any, tmp_path: Path) -> Any:
    """The engine's settings that a command line comes to."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def show(words: str) -> Any:
        code, out, err = run("fit", "--config", "smoke.yaml", *words.split(), "--print_config")
        assert code == 0, err
        return yaml.safe_load(out)["model"]["init_args"]["engine"]

    return show


@pytest.mark.parametrize("case", CASES)
def test_another_engine_takes_its_own_defaults(case: str, engine: Any) -> None:
    words, name, arguments = CASES[case]
    found = engine(words)
    assert found["class_path"].endswith(f".{name}")
    assert {key: found["init_args"][key] for key in arguments} == arguments


def test_from_a_variable(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGKD_FIT__CONFIG", "local.yaml")
    assert engine("--config short.yaml")["init_args"] == RAY
    monkeypatch.setenv("FEDGKD_FIT__CONFIG", "whole.yaml")  # which flags and files overrule
    local = engine("--config local.yaml")["init_args"]
    assert local == {"workers": 3, "threads": 2, "timeout": 5.0}


@pytest.mark.parametrize(
    "words, void",
    [
        ("--model.engine.workers 4 --model.engine ray", "--model.engine.workers 4"),
        ("--model.engine.timeout=60 --model.engine ray", "--model.engine.timeout 60"),
        ("--model.engine.workers 4 --model.engine local", None),
        ("--model.engine ray --model.engine.timeout 6e1", None),
        ("--model.engine ray --model.engine.ray_address [::1]:6379", None),
        ("--model.engine.workers 2 --model.engine ray --model.engine.workers 3", None),
    ],
)
def test_a_flag_before_another_engine_is_told_to_be_void(
    words: str, void: str | None, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run("fit", "--config", "smoke.yaml", *words.split(), "--rounds", "0")  # parsed, then refused
    told = [text for text in caplog.messages if "has no effect" in text]
    text = "has no effect: the engine named after it starts from its own defaults"
    assert told == ([f"{void} {text}"] if void else [])


def test_a_resume_with_another_engine_names_its_threads(run: Any, tmp_path: Path) -> None:
    """Threads decide rounding: dropped like the rest, they are asked for, not taken silently."""
    text = "from fedgkd_pl import LocalEngine\n\n\nclass Mine(LocalEngine):\n    pass\n"
    (tmp_path / "my_engines.py").write_text(text)
    words = ("--model.engine.workers", "1", "--model.engine.threads", "2", "--rounds", "1")
    where = ("--name", "a", "--output_dir", ".", "--model.local_steps", "1")
    assert run("fit", "--config", "smoke.yaml", *words, *where)[0] == 0
    resume = ("fit", "--import", "my_engines", "--resume", "a/version_0", "--rounds", "2")
    resume += ("--model.engine", "my_engines.Mine", "--model.engine.workers", "1")
    code, _, err = run(*resume)
    assert (code, err) == (2, "error: model.engine.threads: the run began with 2 (got 1)\n")
    assert run(*resume, "--model.engine.threads", "2")[0] == 0
