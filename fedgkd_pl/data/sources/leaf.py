"""LEAF's JSON: users and what each of them has (https://leaf.cmu.edu)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits, Transform
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.sources.base import OwnData, joined, parts_of, reading
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import require
from typing_extensions import override


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
        self.shape = shape
        self.users = self._read()
        number = len(self.users["train"]) if num_clients is None else num_clients
        super().__init__(num_clients=number, partition=partition, **kwargs)
        self.set_classes(num_classes, ())

    @override
    def load(self) -> Splits:
        users, self.users = self.users or self._read(), {}  # which would be a second copy
        examples: dict[str, Any] = {split: joined(owned) for split, owned in users.items()}
        return self.split(**examples, **self.part_owners(users))

    def _read(self) -> dict[str, dict[str, Examples]]:
        transform, parts = Scale(1, self.shape), parts_of(self.path)
        wanted = [split for split in ("train", "test") if split in parts]
        return {split: read_users(parts[split], transform) for split in wanted}


def read_users(folder: Path, transform: Transform) -> dict[str, Examples]:
    """What every user of the files of a folder has, by name."""
    users: dict[str, Examples] = {}
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
            users[name] = Examples(inputs, labels, transform)
    require(len(users) > 0, "path", f"{folder} has no .json files with users")
    return dict(sorted(users.items()))
