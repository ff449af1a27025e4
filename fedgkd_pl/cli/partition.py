"""``fedgkd-pl partition``: who would hold what."""

import json
from pathlib import Path

from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.partition import effective_classes
from fedgkd_pl.errors import require
from fedgkd_pl.plots.figures import SHOWN, bubble_chart
from fedgkd_pl.runs.folder import check_output
from fedgkd_pl.storage.files import printable, write_text

WIDTH = 20  # classes that fit a terminal's table


def show_partition(data: FederatedDataModule, folder: Path, exported: Path | None = None) -> None:
    """Prints the table and writes ``<dataset>.json``, ``.png`` and ``.svg``.

    ``exported`` gets who owns which sample, for ``FromFile``.
    """
    import pandas as pd

    text = "cannot be exported: FromFile takes all samples of a client and draws this part anew"
    for split, fraction in data.client_fractions.items():
        require(exported is None or not fraction, f"client_{split}_fraction", text, fraction)
    if exported is not None:
        check_output(exported, getattr(data.partition, "path", ""), key="export")
    data.prepare_data()
    data.setup()
    summary = data.summary()
    counts, figures = summary["counts"], summary["heterogeneity"]
    classes = summary["num_classes"]
    names = [str(name) for name in data.class_names or range(classes)][:WIDTH]
    owners = []  # whose samples each client has, where clients are made of owners with names
    for each in data.owners_of if data.owner_names else ():
        more = f" and {len(each) - 2} more" if len(each) > 2 else ""
        owners.append(
            printable(", ".join(data.owner_names[owner] for owner in each[:2]), 60) + more
        )
    columns = ["owner"] * bool(owners) + ["samples"] + ["effective classes"] * bool(classes) + names
    rows = []
    for client, row in enumerate(counts[:SHOWN]):
        spread = f"{effective_classes([row])[0]:.1f}" if sum(row) else "-"
        numbers = [sum(row), *([spread] if classes else [])]
        cells = [count or "·" for count in row[: len(names)]]
        rows.append([*owners[client : client + 1], *numbers, *cells])
    table = pd.DataFrame(rows, columns=columns)
    print(f"{data.name}: samples{' of each class' if classes else ''}, by client")
    print(table.rename_axis("client", axis=1).to_string())
    if len(counts) > SHOWN or classes > WIDTH:
        print(f"(the first {SHOWN} of {len(counts)} clients, {WIDTH} of {classes} classes)")
    effective = f"{figures['effective_classes']:.2f} of {classes} per client"
    apart = f"{figures['total_variation']:.3f} from all labels (0 alike, 1 apart)"
    skew = {"effective classes": effective, "total variation": apart}
    lines = {
        "clients, in a round": f"{data.num_clients}, {data.cohort_size}",
        "validation, test": f"{summary['num_val']}, {summary['num_test']}",
        **{
            f"clients' own {split}": f"{len(own.examples)}, of {len(own.clients)} clients"
            for split, own in data.client_splits.items()
        },
        **({"public": f"{summary['num_public']}"} if "num_public" in summary else {}),
        **(skew if classes else {}),
        "sizes": f"{figures['size_min']:.0f} to {figures['size_max']:.0f}, "
        f"σ {figures['size_std']:.0f}",
    }
    for name, text in lines.items():
        print(f"{name:<22}{text}")
    target = folder / data.name
    write_text(target.with_suffix(".json"), json.dumps(summary) + "\n")
    title = f"{data.name}, {figures['effective_classes']:.1f} effective classes per client"
    title = title if classes else data.name
    chart = bubble_chart(counts, title, data.class_names)
    for suffix in (".png", ".svg"):
        chart.savefig(target.with_suffix(suffix), dpi=150)
    print(f"wrote {target}.json, .png and .svg")
    if exported is not None:
        data.export_partition(exported)
        print(f"wrote {exported}: data.partition FromFile reads it")
