"""The part of ``--help`` that people look for: the flags of the chosen classes."""

import inspect
from textwrap import fill
from typing import Any

from docstring_parser import parse
from fedgkd_pl.data.datasets.cifar import CIFAR10
from fedgkd_pl.data.partition import Dirichlet
from fedgkd_pl.engines.local import LocalEngine
from fedgkd_pl.methods.fedgkd import FedGKD
from torch.optim import SGD

GROUPS: dict[str, tuple[type, tuple[str, ...]]] = {
    "--model.": (FedGKD, ()),
    "--model.optimizer.": (SGD, ("lr", "momentum", "weight_decay")),
    "--model.engine.": (LocalEngine, ()),
    "--data.": (CIFAR10, ()),
    "--data.partition.": (Dirichlet, ()),
}
INDENT = " " * 30
HEAD = """\
{prog}: everything is a setting of a YAML file and a flag of the same name.

common flags (for FedGKD on CIFAR10 with a Dirichlet partition and SGD clients;
other classes: --model.help CLASS, --data.help CLASS, --model.net.help CLASS)
  --config FILE               a YAML file, or one of ours (fedgkd-pl configs); may be repeated,
                              later ones and flags win
  --print_config              show the settings that would be used, and stop
  --rounds N                  communication rounds (default: 100)
  --seed_everything N         seed of initial weights, partition, cohorts and clients (default: 0)
  --name NAME                 the run is written to <output_dir>/<name>/version_k (default: fedgkd)
  --output_dir DIR            where runs are kept (default: runs)
  --resume DIR                fit: go on with an interrupted run, in its folder, with its settings
  --ckpt_path PATH            a checkpoint to start, validate, test or predict from: a file, a
                              folder of a run, or last (the newest run of this name)
  --import MODULE             import your own nets and methods (my_nets.py of this folder: my_nets),
                              so that --model and --model.net may name them
  --model.engine ENGINE       where clients train: local (default), ray for a cluster (docs/ray.md);
                              for organisations, fedgkd-pl flower; --model.engine.help ENGINE
  --export FILE               partition: write who owns which sample (.json, .npz), which
                              --data.partition FromFile reads
  --profile                   fit: tell where a round's time went, and write profile.csv
  --debug                     show the traceback of an error"""

TAIL = """
environment: FEDGKD_FIT__ROUNDS=5 sets --rounds of fit unless a file or a flag does, and so on

all flags

"""


def common_flags(prog: str) -> str:
    """The flags of the usual classes with their documentation and defaults."""
    lines = [HEAD.format(prog=prog)]
    for prefix, (class_, names) in GROUPS.items():
        for name, text in parameters(class_).items():
            if names and name not in names:
                continue
            text = text if not names else text.split(" (default:")[0]  # the method has its own
            flag = f"  {prefix}{name}"
            if len(flag) >= len(INDENT):
                lines.append(flag)
                flag = ""
            lines.append(fill(text, 100, initial_indent=f"{flag:<30}", subsequent_indent=INDENT))
    lines.append(TAIL)
    return "\n".join(lines)


def parameters(class_: type) -> dict[str, str]:
    """Documentation and default of every constructor argument, inherited ones included."""
    texts: dict[str, str] = {}
    for base in class_.__mro__:
        if "__init__" not in vars(base) or base.__module__.startswith(("lightning", "torch.nn")):
            continue
        documented = {p.arg_name: p.description for p in parse(base.__doc__ or "").params}
        for name, parameter in inspect.signature(base).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD and name not in ("params", "net"):
                text = (documented.get(name) or "").replace("``", "")
                text = " ".join(text.split()).rstrip(".")
                if "(default:" not in text:
                    text += _default(parameter.default)
                texts.setdefault(name, text)
    return texts


def _default(value: Any) -> str:
    plain = isinstance(value, str | int | float | bool)
    return f" (default: {value})" if plain else ""
