"""What a round costs on each engine: ``python -m benchmarks.engines [local pool ray flower]``.

FedGKD (M=2) on the digits with an MLP of 1.2 MB, two clients a round, one thread each: so little
work that a round is nearly all engine. The same run on each, in turn, in processes of its own; with
Flower on a SuperLink and two SuperNodes of this machine, over TLS. All must end with the same
weights.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 6
WORK = ["--data", "Digits", "--data.num_clients", "2", "--data.batch_size", "32"]
WORK += ["--model", "FedGKD", "--model.buffer_size", "2", "--model.net", "fedgkd_pl.MLP"]
WORK += ["--model.net.hidden", "[512, 512]", "--rounds", str(ROUNDS), "--profile", "true"]
ENGINES = {
    "local": ["--model.engine", "LocalEngine", "--model.engine.workers", "1"],
    "pool": ["--model.engine", "LocalEngine", "--model.engine.workers", "2"],
    "ray": ["--model.engine", "RayEngine", "--model.engine.actors", "2"],
}


def command(*words: str) -> None:
    """Runs ``fedgkd-pl``."""
    words = (sys.executable, "-m", "fedgkd_pl", *words)
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def flower(folder: Path) -> dict[str, int]:
    """Runs the work over Flower; returns the bytes that Flower has counted."""
    from tests.support.flower_net import Network, until

    app = folder / "app"
    command("flower", str(app), *WORK, "--output_dir", str(folder), "--name", "flower")
    network = Network(folder / "network")
    try:
        for client in range(2):
            key = network.key(f"node{client}")
            network.register(key)
            network.node(key, f"client={client}")
        until(lambda: network.online() == 2, "two SuperNodes")
        state = network.wait(network.start(app), 600)
        if state["status"] != "finished:completed":
            sys.exit(network.log("superlink"))
        counted: dict[str, int] = state["network-traffic"]
        return counted
    finally:
        network.close()


def seconds(run: Path) -> list[float]:
    """The seconds of each round, its parts together."""
    rows = list(csv.reader((run / "profile.csv").open()))[1:]
    return [sum(map(float, row[1:])) for row in rows]


def main(names: list[str]) -> None:
    """Prints a table of the engines that are asked for."""
    traffic: dict[str, int] = {}
    print("| engine | first round, s | later rounds, s | more than local |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = 0.0
        digests: dict[str, Any] = {}
        for name in names:
            if name == "flower":
                traffic = flower(folder)
            else:
                where = ["--output_dir", str(folder), "--name", name]
                command("fit", *WORK, *ENGINES[name], *where)
            run = folder / name / "version_0"
            digests[name] = (run / "global.safetensors").read_bytes()
            first, *later = seconds(run)
            plain = plain or median(later)
            spread = f"{median(later):.2f} ({min(later):.2f} to {max(later):.2f})"
            print(f"| {name} | {first:.2f} | {spread} | {median(later) - plain:.2f} |", flush=True)
        same = len(set(digests.values())) == 1
        print(f"\nThe weights are {'the same' if same else 'NOT the same'}, bit for bit.")
        if traffic:
            summary = json.loads((folder / "flower/version_0/summary.json").read_text())
            print("\n| | computed | on the wire (Flower's count) | ratio |\n|---|---|---|---|")
            for way, theirs in ("down", "outbound-bytes"), ("up", "inbound-bytes"):
                computed, counted = summary[f"bytes_{way}"], traffic[theirs]
                print(f"| {way} | {computed:,} | {counted:,} | {counted / computed:.3f} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["local", "pool", "ray", "flower"])
