"""What a notebook shows of a dataset."""

from html import escape
from typing import TYPE_CHECKING

from fedgkd_pl.storage.html import bubbles, facts

if TYPE_CHECKING:
    from fedgkd_pl.data.datamodule import FederatedDataModule


def card(data: "FederatedDataModule") -> str:
    """Who holds what as HTML, once that is known."""
    if data.clients is None:
        return f"<code>{escape(repr(data))}</code>, not set up yet"
    summary = data.summary()
    sizes = data.clients.index.sizes
    values = {
        "clients": f"{data.num_clients}, {data.cohort_size} of them in a round",
        "samples": f"{sizes.sum()}, {sizes.min()} to {sizes.max()} of a client",
        "validation, test": f"{len(data.val)}, {len(data.test)}",
        "partition": repr(data.partition),
        "classes of a client": f"{summary['heterogeneity']['effective_classes']:.1f}"
        f" of {summary['num_classes']}",
    }
    if not summary["num_classes"]:
        del values["classes of a client"]
    return facts(data.name, values, bubbles(summary["counts"], data.class_names))
