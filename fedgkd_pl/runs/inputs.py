"""What a run's model takes and gives: ``model.json``, by which it is used without the data."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.inputs import RawInputs, TextInputs, describe_inputs, read_inputs
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.checks import Task, task_of
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.folder import INPUTS, TOKENIZER
from fedgkd_pl.storage.files import MB, printable, read_json
from torch import Tensor


@dataclass(frozen=True)
class ModelInputs:
    """What a model takes and gives.

    Attributes:
        task: what was learned.
        num_classes: 0 where that is numbers.
        class_names: in the order of the net's outputs; empty where they have only numbers.
        shape: of one input as the net sees it; of texts, the longest.
        dtype: of inputs as the net sees them.
        raw: from raw inputs to those.
        encoder: the settings of a text net's encoder; None for other nets.
    """

    task: Task
    num_classes: int
    class_names: list[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    raw: RawInputs
    encoder: dict[str, Any] | None = None

    def example(self) -> Tensor:
        """Two inputs as the net might see them, which are nobody's."""
        shape = (2, *self.shape)
        if self.dtype.is_floating_point:
            generator = torch.Generator().manual_seed(0)
            return torch.rand(shape, generator=generator).to(self.dtype)
        pad_id = getattr(self.raw.transform, "pad_id", 1)
        return torch.full(shape, 0 if pad_id else 1, dtype=self.dtype)


def inputs_files(server: FederatedServer, data: FederatedDataModule) -> dict[str, str]:
    """The files that say it, by name."""
    inputs = server.some_inputs(data)
    shape = list(inputs.shape[1:])
    if isinstance(data.reading, TextInputs):
        shape = list(data.test.inputs.shape[1:])  # which a batch may be cut from
    content = {
        "task": task_of(server, data),
        "num_classes": data.num_classes,
        "class_names": [str(name) for name in data.class_names],
        "net": {"shape": shape, "dtype": str(inputs.dtype).removeprefix("torch.")},
        "raw": describe_inputs(data.test, data.reading),
    }
    config: Any = getattr(getattr(server.net, "encoder", None), "config", None)
    if hasattr(config, "to_json_string"):  # a TextClassifier's
        content["encoder"] = json.loads(config.to_json_string())
    files = {INPUTS: json.dumps(content) + "\n"}
    if isinstance(data.reading, TextInputs) and data.reading.vocabulary:
        files[TOKENIZER] = data.reading.vocabulary
    return files


def read_model(folder: Path) -> ModelInputs:
    """What a run's folder says."""
    file = folder / INPUTS
    require(file.exists(), "run", f"has no {INPUTS}", str(folder))
    try:
        content = read_json(file, 16 * MB)
        return ModelInputs(
            task=content["task"],
            num_classes=int(content["num_classes"]),
            class_names=[printable(name, 100) for name in content["class_names"]],
            shape=tuple(map(int, content["net"]["shape"])),
            dtype=torch.empty(0, dtype=getattr(torch, content["net"]["dtype"])).dtype,
            raw=read_inputs(content["raw"], folder / TOKENIZER),
            encoder=content.get("encoder"),
        )
    except SettingError:  # of the tokenizer
        raise
    except Exception as error:  # the file may hold anything
        raise SettingError("run", f"damaged: {file}") from error
