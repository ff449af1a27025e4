"""``make pictures``: the charts of docs/partitions.md, the digits as each partition cuts them."""

import sys

from fedgkd_pl import IID, Digits, Dirichlet, Pathological, QuantitySkew, Shards
from fedgkd_pl.data.partition import Partition
from fedgkd_pl.plots.figures import bubble_chart
from fedgkd_pl.plots.style import opaque

from tools import REPO

PARTITIONS: dict[str, Partition] = {
    "iid": IID(),
    "dirichlet-1": Dirichlet(alpha=1.0),
    "dirichlet-0.1": Dirichlet(alpha=0.1, min_size=1),
    "dirichlet-0.1-balanced": Dirichlet(alpha=0.1, balanced=True),
    "pathological": Pathological(classes_per_client=2),
    "shards": Shards(shards_per_client=2),
    "quantity": QuantitySkew(beta=0.5),
}


def main() -> int:
    """Writes docs/images/partition-*.png, and prints how far apart clients are in each."""
    for name, partition in PARTITIONS.items():
        data = Digits(num_clients=20, partition=partition, seed=0)
        data.setup()
        summary = data.summary()
        figure = opaque(bubble_chart(summary["counts"]))
        figure.savefig(REPO / f"docs/images/partition-{name}.png", dpi=80)
        skew = summary["heterogeneity"]
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in skew.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
