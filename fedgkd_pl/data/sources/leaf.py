"""LEAF's JSON: users and what each of them has (https://leaf.cmu.edu)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.sources.base import OwnData, parts_of, places, reading
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import require
from torch import Tensor
from typing_extensions import override

Users = dict[str, tuple[Tensor, Tensor]]  # every user's inputs and labels


class Leaf(OwnData):
    """LEAF's files: ``train/*.json`` and ``test/*.json``, or only the first.

    A client is a user; they are numbered in the order of their names. Inputs must be numbers, as
    FEMNIST's, and labels class numbers.

    Args:
        path: the folder of ``train`` and ``test``, or of the files.
        shape: of a sample, such as [1, 28, 28]; by default as it is stored.
        num_classes: by default the largest class number and one.
        num_clients: by default one for each user.
        partition: by default a client is a user.
        kwargs: those of :class:`OwnData`.
    """

    name = "leaf"

    def __init__(
        self,
        path: str,
        shape: list[int] | None = None,
        num_classes: int | None = None,
        num_clients: int | None = None,
        partition: Partition = ByKey(),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        self.path = path
        self.users = self._read()
        number = len(self.users["train"]) if num_clients is None else num_clients
        super().__init__(num_clients=number, partition=partition, **kwargs)
        self.shape = shape
        self.set_classes(num_classes, ())

    @override
    def load(self) -> Splits:
        found, self.users = self.users or self._read(), {}  # which would be a second copy
        self.owner_names = list(found["train"])
        examples, keys = dict[str, Any](), {}
        for split, users in found.items():
            inputs, labels = zip(*users.values(), strict=True)
            alike = len({x.shape[1:] for x in inputs}) == 1
            require(alike, "path", f"{self.path}: the samples of all users must have one shape")
            examples[split] = Examples(torch.cat(inputs), torch.cat(labels), Scale(1, self.shape))
            owners = [name for name, (_, y) in users.items() for _ in range(len(y))]
            keys[split] = places(owners, self.owner_names)
        return self.split(**examples, keys=keys["train"], test_keys=keys.get("test"))

    def _read(self) -> dict[str, Users]:
        parts = parts_of(self.path)
        return {split: read_users(parts[split]) for split in ("train", "test") if split in parts}


def read_users(folder: Path) -> Users:
    """The inputs and labels of every user of the files of a folder, by name."""
    users: Users = {}
    for file in sorted(folder.glob("*.json")):
        with reading(file):
            content = json.loads(file.read_text(encoding="utf-8-sig"))
            data = {name: content["user_data"][name] for name in content["users"]}
        for name, own in data.items():
            where = f"{file}, user {name!r:.40}"
            with reading(where):
                inputs = torch.from_numpy(np.asarray(own["x"], dtype=np.float32))
                labels = torch.from_numpy(np.asarray(own["y"]))
            fits = inputs.shape[:1] == labels.shape and len(labels) > 0
            require(fits, "path", f"{where}: x and y must have the same length, not 0")
            require(name not in users, "path", f"{where} is there twice")
            users[name] = inputs, labels
    require(len(users) > 0, "path", f"{folder} has no .json files with users")
    return dict(sorted(users.items()))
