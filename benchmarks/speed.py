"""Local training against a plain loop, distillation against FedAvg: ``python -m benchmarks.speed``.

All contenders of a group are started and warmed first, then they train a round in turn, over and
over. What is compared is always measured seconds apart, and a ratio is taken within each turn: its
median and its range over the turns are what is printed.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks import small_work
from benchmarks.contender import CASES

# group → (what, against what, the bound)
TRAINING = [
    ("FedAvg", "plain", "≥ 1.15"),
    ("FedAvg, compiled", "plain", "≥ 1.35"),
    ("FedAvg", "plain, our kernels", "≥ 0.97"),
    ("FedAvg, compiled", "plain, our kernels, compiled", "≥ 0.97"),
]
DISTILLING = [
    ("FedGKD, augmented", "FedAvg, augmented", "≤ 1.25"),
    ("FedGKD, augmented, compiled", "FedAvg, augmented, compiled", "≤ 1.12"),
]
CACHED = [
    ("FedGKD, 20 epochs, cached", "FedAvg, 20 epochs", "≤ 1.04"),
    ("Vote M=5, 20 epochs, cached", "FedAvg, 20 epochs", "≤ 1.15"),
]
PRECISION = [
    ("plain, alone, again", "plain, alone", "A/A"),
    ("FedAvg, alone", "plain, alone", "≤ 0.77"),
    ("FedAvg, alone, bf16", "plain, alone, bf16", ""),
    ("FedAvg, alone, bf16", "FedAvg, alone", "≤ 0.65"),
    ("FedAvg, alone, augmented, bf16", "FedAvg, alone, augmented", "≤ 0.65"),
    ("FedGKD, alone, augmented, bf16", "FedGKD, alone, augmented", "≤ 0.70"),
    ("FedGKD, alone, augmented", "FedAvg, alone, augmented", ""),
    ("FedGKD, alone, augmented, bf16", "FedAvg, alone, augmented, bf16", ""),
    ("FedGKD, alone, augmented, bf16 teacher", "FedAvg, alone, augmented", "≤ 1.25"),
]
STEP = 4.744  # GFLOP of a step of ResNet-8 with 64 images, and with a teacher's forward pass:
DISTILLED = STEP + 1.6
SMALL = [
    ("FedAvg, small", "plain, small", "≤ 5 ms"),
    ("FedAvg, small", "plain, our kernels, small", "≤ 5 ms"),
    ("FedAvg, small, two processes", "plain, small, two processes", "≤ 5 ms"),
]
PEERS = {"pfl": "pfl_small", "flower": "flower_small", "fedlab": "fedlab_small"}


class Contender:
    """A process that trains a round on demand.

    Args:
        name: of a case.
        folder: for its first model.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.file = folder / f"{name}.pt"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.contender", name, str(self.file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.read()

    def read(self) -> float:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and line.strip() != '"ready"' and not line[0].isdigit():
            line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name} ended: python -m benchmarks.contender '{self.name}' x.pt"
            )
        return 0.0 if "ready" in line else float(line)

    def round(self) -> float:
        """The seconds of a round."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(names: Sequence[str], turns: int, folder: Path) -> dict[str, list[float]]:
    """The seconds of every contender's round, one per turn."""
    contenders = []
    for name in names:
        print(f"warming {name}", file=sys.stderr)
        contenders.append(Contender(name, folder))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            seconds[contender.name].append(contender.round())
        print(f"turn {turn + 1} of {turns}", file=sys.stderr)
    for contender in contenders:
        contender.close()
    return seconds


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def names_of(pairs: Sequence[tuple[str, str, str]]) -> list[str]:
    """All contenders of some comparisons, each once."""
    return list(dict.fromkeys(name for pair in pairs for name in reversed(pair[:2])))


def table(pairs: Sequence[tuple[str, str, str]], turns: int, folder: Path, speed: bool) -> None:
    """Measures a group and prints it: speed-ups, or times as much."""
    seconds = measure(names_of(pairs), turns, folder)
    print(f"| round of | samples/s | against | {'speed-up' if speed else 'time'} | bound |")
    print("|---|---|---|---|---|")
    for ours, theirs, bound in pairs:
        case = CASES[ours]
        samples = case.cohort * case.samples * case.epochs
        one, two = seconds[ours], seconds[theirs]
        ratios = [b / a if speed else a / b for a, b in zip(one, two, strict=True)]
        rate = samples / median(one)
        print(f"| {ours} | {rate:,.0f} | {theirs} | {spread(ratios)} | {bound} |", flush=True)
    print()


def precisions(turns: int, folder: Path) -> None:
    """Half precision, by the CPU time of one process, with what it reaches of the core's peak."""
    seconds = measure(names_of(PRECISION), turns, folder)
    print("| round of | ms a step | GFLOP/s | against | CPU time | bound |")
    print("|---|---|---|---|---|---|")
    for ours, theirs, bound in PRECISION:
        case = CASES[ours]
        steps = math.ceil(case.samples / case.batch) * case.epochs
        ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        step = median(seconds[ours]) / steps
        work = (DISTILLED if case.method == "FedGKD" else STEP) * case.samples / case.batch / steps
        figures = f"{1e3 * step:.1f} | {work / step:.0f}"
        print(f"| {ours} | {figures} | {theirs} | {spread(ratios)} | {bound} |", flush=True)
    print()


def same_work(folder: Path) -> None:
    """Holds the models after the first round against each other."""
    names = ("FedAvg, double", "plain, double")
    for name in names:
        Contender(name, folder).close()
    one, two = (torch.load(folder / f"{name}.pt") for name in names)
    apart = max(float((one[key] - two[key]).abs().max()) for key in one)
    print(
        f"The same work: after one round the weights of FedAvg and of the plain loop differ by "
        f"{apart:.1e} at most.\n"
    )
    if apart > 1e-5:
        raise SystemExit("error: the plain loop does other work")


def small(turns: int, folder: Path) -> None:
    """What a client costs beside its steps."""
    seconds = measure(names_of(SMALL), turns, folder)
    clients = small_work.COHORT
    print("| small work | ms a client | the plain loop's | more | bound |")
    print("|---|---|---|---|---|")
    for ours, theirs, bound in SMALL:
        one, two = seconds[ours], seconds[theirs]
        more = [1e3 * (a - b) / clients for a, b in zip(one, two, strict=True)]
        a, b = (1e3 * median(values) / clients for values in (one, two))
        print(f"| {ours} | {a:.1f} | {b:.1f} | {spread(more, 1)} | {bound} |")
    print()
    peers(1e3 * median(seconds["FedAvg, small"]) / clients)


def peers(ours: float) -> None:
    """The small work on other simulators, where ``PEER_<NAME>`` names a Python that has them."""
    print("| peer | ms a client | of ours |")
    print("|---|---|---|")
    for name, module in PEERS.items():
        python = os.environ.get(f"PEER_{name.upper()}", sys.executable)
        command = [python, "-m", f"benchmarks.peers.{module}", "5"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["failed"])[-1]
            print(f"| {name} | skipped: {reason} | |")
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        theirs = 1e3 * median(found["seconds_per_round"]) / small_work.COHORT
        print(
            f"| {name} {found['version']} ({found['workers']} process) | {theirs:.1f} "
            f"| {theirs / ours:.1f} × |",
            flush=True,
        )
    print()


def main() -> None:
    """Prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    groups = ["training", "distilling", "cached", "precision", "small"]
    parser.add_argument(
        "groups", nargs="*", default=groups, choices=[*groups, groups], metavar="GROUP"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "training" in arguments.groups:
            table(TRAINING, arguments.turns, folder, speed=True)
            same_work(folder)
        if "distilling" in arguments.groups:
            table(DISTILLING, arguments.turns, folder, speed=False)
        if "cached" in arguments.groups:
            table(CACHED, arguments.turns, folder, speed=False)
        if "precision" in arguments.groups:
            precisions(arguments.turns, folder)
        if "small" in arguments.groups:
            small(arguments.turns, folder)


if __name__ == "__main__":
    main()
