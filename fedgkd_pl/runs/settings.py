"""Settings as dotted keys, and which of them decide a result."""

from typing import Any

# What may differ when a run is resumed: where it runs and what is recorded, not what is computed.
FIXED = ("seed_everything", "model", "data", "trainer.precision", "trainer.gradient_clip")
THREADS = "model.init_args.engine.init_args.threads"  # of an engine, this alone changes numbers
FREE = (
    "model.init_args.engine.",
    "model.init_args.max_failed_rounds",
    "data.init_args.data_dir",
    "data.init_args.path",
    "data.init_args.test_path",
    "data.init_args.download",
    "data.init_args.loader_workers",
    "data.init_args.eval_batch_size",
)


def fixed_settings(settings: Any) -> dict[str, Any]:
    """The settings that decide the result, by dotted key."""
    return {
        key: value
        for key, value in flatten(settings).items()
        if key == THREADS or (key.startswith(FIXED) and not key.startswith(FREE))
    }


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys; lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    dot = f"{prefix}." if prefix else ""
    return {k: v for key, value in tree.items() for k, v in flatten(value, dot + str(key)).items()}


def short(key: str) -> str:
    """A key as it is typed, without ``init_args``."""
    return key.replace(".init_args", "")
