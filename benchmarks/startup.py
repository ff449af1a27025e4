"""What a command costs before it does anything, in CPU time: ``python -m benchmarks.startup``."""

import resource
import subprocess
import sys
from statistics import median

REPEATS = 5
BASE = "from fedgkd_pl import _torchvision; import lightning.pytorch.cli, torchvision"
CLI = [sys.executable, "-m", "fedgkd_pl"]
COMMANDS = {
    "import lightning.pytorch.cli, torchvision": [sys.executable, "-c", BASE],
    "fedgkd-pl --help": [*CLI, "--help"],
    "fedgkd-pl --version": [*CLI, "--version"],
    "fedgkd-pl fit --config cifar10_fedgkd.yaml --print_config": [
        *(*CLI, "fit", "--config", "cifar10_fedgkd.yaml", "--print_config")
    ],
}


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints a Markdown table; the commands take turns."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, command in COMMANDS.items():
            times[name].append(cpu_seconds(command))
    base = times[next(iter(COMMANDS))]
    print("| command | CPU s | of the first row | bound |")
    print("|---|---|---|---|")
    bounds = ("", "≤ 0.5 s", "≤ 0.5 s", "≤ 1.5 ×")
    for (name, seconds), bound in zip(times.items(), bounds, strict=True):
        ratio = median(a / b for a, b in zip(seconds, base, strict=True))
        print(
            f"| `{name}` | {median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
            f"| {ratio:.2f} | {bound} |"
        )


if __name__ == "__main__":
    main()
