"""``--help``: the flags that people look for, those of the usual classes; without torch."""

import re
from collections.abc import Collection, Iterator
from textwrap import fill

from fedgkd_pl.settings.signatures import parameters

GROUPS = {  # the usual class of every group of flags
    "model": "fedgkd_pl.methods.fedgkd.FedGKD",
    "model.optimizer": "",  # torch's SGD
    "model.engine": "fedgkd_pl.engines.local.LocalEngine",
    "data": "fedgkd_pl.data.datasets.cifar.CIFAR10",
    "data.partition": "fedgkd_pl.data.partition.Dirichlet",
}
SGD = {"lr": "learning rate", "momentum": "momentum factor", "weight_decay": "L2 penalty"}
SHORT = (  # of them, those in the short help
    *("model.gamma", "model.buffer_size", "model.distance", "model.temperature"),
    *("model.local_epochs", "model.local_steps", "model.loss", "model.server_optimizer"),
    *("model.compile", "model.optimizer.lr", "model.optimizer.momentum"),
    *("model.optimizer.weight_decay", "model.engine.workers", "model.engine.timeout"),
    *("data.data_dir", "data.download", "data.num_clients", "data.partition"),
    *("data.participation", "data.batch_size", "data.val_fraction", "data.seed"),
    *("data.client_test_fraction", "data.partition.alpha", "data.partition.balanced"),
)
INDENT = " " * 30
OF_RUN = "RUN [--ckpt_path last|best|FILE] [--KEY VALUE ...]"
OF_FIT = "--config FILE [--KEY VALUE ...]"
HEAD = """\
{prog} {usage}
everything is a setting of a YAML file and a flag of the same name

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
  --model METHOD              FedGKD, FedAvg, FedProx, SCAFFOLD and so on, or yours; likewise --data
                              and --model.net
  --model.engine ENGINE       where clients train: local (default), ray for a cluster (docs/ray.md);
                              for organisations, fedgkd-pl flower; --model.engine.help ENGINE
  --export FILE               partition: write who owns which sample (.json, .npz), which
                              --data.partition FromFile reads
  --profile                   fit: tell where a round's time went, and write profile.csv
  --quiet                     show no progress: only the result, warnings and errors
  --trainer.precision P       32-true, 16-mixed, bf16-mixed and so on (default: 32-true); as all of
                              trainer, an argument of Lightning's Trainer
  --trainer.accelerator NAME  cpu, gpu and so on; by default what there is
  --debug                     show the traceback of an error"""

ENVIRONMENT = """
environment: FEDGKD_FIT__ROUNDS=5 sets --rounds of fit unless a file or a flag does, and so on
"""


def short_help(command: str) -> str:
    """The flags that most runs need."""
    prog = f"fedgkd-pl {command}"
    return "\n".join([_head(command), *_lines(SHORT), ENVIRONMENT, f"all flags: {prog} --help all"])


def long_help(command: str) -> str:
    """Every flag of the usual classes, to stand before the list of all flags."""
    return "\n".join([_head(command), *_lines(flags()), ENVIRONMENT, "all flags", "", ""])


def _head(command: str) -> str:
    """The flags of no class; some are for one command, which their text begins with."""
    usage = OF_FIT if command in ("fit", "partition") else OF_RUN
    flags = re.split(r"\n(?=  --)", HEAD.format(prog=f"fedgkd-pl {command}", usage=usage))
    of = [re.search(r"  (fit|partition): ", flag) for flag in flags]
    return "\n".join(
        flag.replace(f"  {command}: ", "  ")
        for flag, match in zip(flags, of, strict=True)
        if match is None or match[1] == command
    )


def flags() -> dict[str, str]:
    """The flags of the usual classes, by dotted key, with documentation and default."""
    return {
        f"{group}.{name}": text
        for group, path in GROUPS.items()
        for name, text in (parameters(path) if path else SGD).items()
    }


def _lines(keys: Collection[str]) -> Iterator[str]:
    for key, text in flags().items():
        if key in keys:
            flag = f"  --{key}"
            if len(flag) >= len(INDENT):
                yield flag
                flag = ""
            yield fill(text, 100, initial_indent=f"{flag:<30}", subsequent_indent=INDENT)
