"""LEAF's JSON: users and what each of them has (https://leaf.cmu.edu)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.partition import ByKey, Partition
from fedgkd_pl.data.sources.base import OwnData, owners_of, parts_of, read_text
from fedgkd_pl.data.transforms import Scale
from fedgkd_pl.errors import SettingError, require

Users = dict[str, tuple[Any, Any]]  # every user's inputs and labels


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
        if num_classes is not None:
            self.num_classes = num_classes

    def load(self) -> Splits:
        """See :meth:`FederatedDataModule.load`."""
        users, self.users = self._read(), {}
        names = self.owner_names = sorted(users["train"])
        train = self._examples(users["train"], names)
        test = test_keys = None
        if "test" in users:
            tested = sorted(users["test"])
            test = self._examples(users["test"], tested)
            test_keys = owners_of([(name, len(users["test"][name][1])) for name in tested], names)
        if not hasattr(self, "num_classes"):
            self.num_classes = int(train.targets.max()) + 1
        keys = np.repeat(np.arange(len(names)), [len(users["train"][name][1]) for name in names])
        return self.split(train, test, keys=keys, test_keys=test_keys)

    def _read(self) -> dict[str, Users]:
        if not self.users:
            parts = parts_of(Path(self.path).expanduser())
            wanted = [split for split in ("train", "test") if split in parts]
            self.users = {split: read_users(parts[split]) for split in wanted}
        return self.users

    def _examples(self, users: Users, names: list[str]) -> Examples:
        inputs = np.concatenate([users[name][0] for name in names])
        labels = np.concatenate([users[name][1] for name in names])
        transform = Scale(1, self.shape)
        return Examples(torch.from_numpy(inputs), torch.from_numpy(labels), transform)


def read_users(folder: Path) -> Users:
    """What every user of the files of a folder has."""
    files = sorted(folder.glob("*.json"))
    require(len(files) > 0, "path", f"{folder} has no .json files")
    users: Users = {}
    shape = None
    for file in files:
        try:
            content = json.loads(read_text(file))
        except (ValueError, RecursionError) as error:
            raise SettingError("path", f"{file} is no JSON ({error!s:.80})") from error
        match content:
            case {"users": list(names), "user_data": dict(data)}:
                pass
            case _:
                raise SettingError("path", f"{file} has no users and user_data")
        for name in names:
            where = f"{file}, user {name!r:.40}"
            require(isinstance(name, str) and name in data, "path", f"{where} has no data")
            require(name not in users, "path", f"{where} is there twice")
            users[name] = _user(data[name], where)
            own = users[name][0].shape[1:]
            shape = own if shape is None else shape
            reason = f"{where}: samples have the shape {own}, those before {shape}"
            require(own == shape, "path", reason)
    require(len(users) > 0, "path", f"{folder} has no users")
    return users


def _user(data: Any, where: str) -> tuple[Any, Any]:
    match data:
        case {"x": list(x), "y": list(y)} if len(x) == len(y):
            pass
        case _:
            raise SettingError("path", f"{where} must have x and y, as many of one as of the other")
    require(len(x) > 0, "path", f"{where} has no samples: leave the user out")
    for row, label in enumerate(y):
        known = type(label) is int and label >= 0
        require(known, "path", f"{where}, sample {row}: {label!r:.40} is no class number")
    try:
        inputs = np.asarray(x, dtype=np.float32)
    except (TypeError, ValueError) as error:
        reason = f"{where}: x must be numbers, alike in every sample"
        raise SettingError("path", reason) from error
    bad = np.flatnonzero(~np.isfinite(inputs.reshape(len(x), -1)).all(axis=1))
    require(len(bad) == 0, "path", f"{where}, sample {bad[:1].sum()} has NaN or Inf")
    return inputs, np.asarray(y, dtype=np.int64)
