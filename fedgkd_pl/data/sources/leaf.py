"""LEAF's JSON: users and what each of them has (https://leaf.cmu.edu)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.sources.base import OwnData, in_order, owners_of, parts_of, read_text
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.data.validation import check_finite
from fedgkd_pl.errors import SettingError, require
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
        self.users: dict[str, Users] = {}
        self.path = path
        number = len(self._read()["train"]) if num_clients is None else num_clients
        super().__init__(num_clients=number, partition=partition, **kwargs)
        self.shape = shape
        self.set_classes(num_classes, ())

    @override
    def load(self) -> Splits:
        users, self.users = self._read(), {}
        names = self.owner_names = sorted(users["train"])
        keys = {
            split: owners_of([(name, len(found[name][1])) for name in sorted(found)], names)
            for split, found in users.items()
        }
        examples = {split: self._examples(found) for split, found in users.items()}
        self.count_classes(examples["train"].targets)
        return self.split(*in_order(examples), keys=keys["train"], test_keys=keys.get("test"))

    def _read(self) -> dict[str, Users]:
        if not self.users:
            parts = parts_of(self.path)
            wanted = [split for split in ("train", "test") if split in parts]
            self.users = {split: read_users(parts[split]) for split in wanted}
        return self.users

    def _examples(self, users: Users) -> Examples:
        inputs, labels = zip(*(users[name] for name in sorted(users)), strict=True)
        alike = len({x.shape[1:] for x in inputs}) == 1
        require(alike, "path", f"{self.path}: the samples of all users must have the same shape")
        return Examples(torch.cat(inputs), torch.cat(labels), Scale(1, self.shape))


def read_users(folder: Path) -> Users:
    """The inputs and labels of every user of the files of a folder."""
    users: Users = {}
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(read_text(file))
            data = {name: content["user_data"][name] for name in content["users"]}
        except SettingError:
            raise
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            reason = f"{file} must be JSON with users and the user_data of each"
            raise SettingError("path", f"{reason} ({error!s:.80})") from error
        for name, own in data.items():
            where = f"{file}, user {name!r:.40}"
            require(name not in users, "path", f"{where} is there twice")
            users[name] = _user(own, where)
    require(len(users) > 0, "path", f"{folder} has no .json files with users")
    return users


def _user(data: Any, where: str) -> tuple[Tensor, Tensor]:
    try:
        inputs = torch.from_numpy(np.asarray(data["x"], dtype=np.float32))
        labels = torch.from_numpy(np.asarray(data["y"]))
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{where} must have numbers as x, alike in every sample, and as y"
        raise SettingError("path", f"{reason} ({error!s:.100})") from error
    fits = inputs.shape[:1] == labels.shape and labels.ndim == 1
    require(fits, "path", f"{where}: x and y must have the same length")
    require(len(labels) > 0, "path", f"{where} has no samples; leave the user out")
    classes = labels.dtype == torch.int64 and bool((labels >= 0).all())
    require(classes, "path", f"{where}: y must be class numbers")
    check_finite(inputs, "path", f"{where}, sample", 0)
    return inputs, labels
