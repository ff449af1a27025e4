"""The short help of ``fit`` and its like: the flags that people look for, without torch."""

import re

USAGE = """\
fedgkd-pl {command} {usage}
everything is a setting of a YAML file and a flag of the same name

common flags (for FedGKD on CIFAR10 with a Dirichlet partition and SGD clients;
other classes: --model.help CLASS, --data.help CLASS, --model.net.help CLASS)
"""
FLAGS = """\
  --config FILE               a YAML file, or one of ours (fedgkd-pl configs); may be repeated,
                              later ones and flags win
  --print_config              show the settings that would be used, and stop
  --rounds N                  communication rounds (default: 100)
  --seed_everything N         seed of initial weights, partition, cohorts and clients (default: 0)
  --name NAME                 the run is written to <output_dir>/<name>/version_k (default: fedgkd)
  --output_dir DIR            where runs are kept (default: runs)
  --resume DIR                fit: go on with an interrupted run, in its folder, with its settings
  --trust                     fit: resume a folder that belongs to another user
  --ckpt_path PATH            a checkpoint to start, validate, test or predict from: a file, a
                              folder of a run, or last (the newest run of this name)
  --import MODULE             import your own nets and methods (my_nets.py of this folder: my_nets),
                              so that --model and --model.net may name them
  --profile                   fit: tell where a round's time went, and write profile.csv
  --quiet                     show no progress: only the result, warnings and errors
  --debug                     show the traceback of an error
  --model METHOD              FedGKD, FedAvg, FedProx, SCAFFOLD and so on, or yours
  --model.gamma X             weight of the distillation (default: 0.2)
  --model.buffer_size M       global models whose mean teaches (default: 5)
  --model.distance NAME       kl or mse (default: kl)
  --model.local_epochs N      passes over a client's data in a round (default: 1)
  --model.loss CLASS          of a client, such as CrossEntropy, FocalLoss or MSE
  --model.compile true        compile the clients' net with torch.compile
  --model.net CLASS           such as ResNet8, fedgkd_pl.MLP or torchvision.models.resnet18
  --model.optimizer.lr X      learning rate of the clients' SGD
  --model.engine CLASS        where clients train: LocalEngine (default), RayEngine for a cluster
                              (docs/ray.md); for organisations, fedgkd-pl flower
  --model.engine.workers N    processes that train clients (default: auto)
  --data CLASS                CIFAR10, Digits, TinyImageNet and so on, or yours
  --data.data_dir DIR         where the dataset is, or is downloaded to (default: data)
  --data.download BOOL        whether to download it
  --data.num_clients N        how many clients share the data (default: 20)
  --data.participation X      share of the clients in a round (default: 1.0)
  --data.batch_size N         of the clients' training (default: 64)
  --data.val_fraction X       share of training data for validation (default: 0.1)
  --data.partition CLASS      Dirichlet, IID, Pathological, FromFile and so on
  --data.partition.alpha X    the smaller, the more clients differ (default: 0.5)
  --trainer.precision P       32-true (without it), 16-mixed, bf16-mixed and so on; as all of
                              trainer, an argument of Lightning's Trainer
  --trainer.accelerator NAME  cpu, gpu and so on (default: auto)
"""
END = """
environment: FEDGKD_FIT__ROUNDS=5 sets --rounds of fit unless a file or a flag does, and so on

all flags: fedgkd-pl {command} --help all"""
COMMON = tuple(re.findall(r"^  --([\w.]+)", FLAGS, re.MULTILINE))


def short_help(command: str) -> str:
    """The flags that most runs need."""
    usage = "--config FILE [--KEY VALUE ...]"
    flags = re.split(r"\n(?=  --)", FLAGS.rstrip())
    if command != "fit":
        usage = "RUN [--last | --best | --ckpt_path FILE] [--KEY VALUE ...]"
        flags = [flag for flag in flags if "  fit: " not in flag]
    text = "\n".join([USAGE + flags[0], *flags[1:], END]).replace("  fit: ", "  ")
    return text.format(command=command, usage=usage)
