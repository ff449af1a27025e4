"""The accuracies that people report of a run, or the losses of one that has no accuracy."""

from typing import Any

Row = dict[str, float]
AVERAGE = "average/acc"  # test accuracy of AveragedModel's model


def accuracy_summary(
    rows: list[Row], test: str = "test/acc", val: str = "val/acc"
) -> dict[str, Any]:
    """The numbers people report, from the rows of ``metrics.csv``.

    The paper's number is the best test accuracy over rounds, which picks its round on the test
    set; ``test_acc_at_best_val`` picks it on the validation set.

    Args:
        test: the column that is reported.
        val: the column that ``test_acc_at_best_val`` chooses its round by.
    """
    tested = [row for row in rows if test in row]
    final = rows[-1].get(test) if rows else None  # of the last model, or of none
    last_10 = [row[test] for row in tested[-10:]]
    best = max(tested, key=lambda row: row[test], default=None)
    validated = [row for row in tested if val in row]
    chosen = max(validated, key=lambda row: row[val], default=None)
    return {
        "rounds": len(rows),
        "best_test_acc": best[test] if best else None,
        "best_round": int(best["round"]) if best else None,
        "final_test_acc": final,
        "mean_last_10_test_acc": sum(last_10) / len(last_10) if last_10 else None,
        "test_acc_at_best_val": chosen[test] if chosen else None,
    }


def loss_summary(rows: list[Row]) -> dict[str, Any]:
    """The same of the test loss, of which less is better; empty for a run with an accuracy."""
    if any("test/acc" in row for row in rows) or not any("test/loss" in row for row in rows):
        return {}
    names = ("test/loss", "val/loss")
    turned = [{k: -v if k in names else v for k, v in row.items()} for row in rows]
    found = accuracy_summary(turned, *names)
    values = {k.replace("test_acc", "test_loss"): v for k, v in found.items() if "test_acc" in k}
    losses = {key: value if value is None else -value for key, value in values.items()}
    return {"score": "loss", "best_round": found["best_round"], **losses}


def average_summary(rows: list[Row]) -> dict[str, Any]:
    """The same of the averaged model; empty for a run that has none."""
    if not any(AVERAGE in row for row in rows):
        return {}
    return accuracy_summary(rows, AVERAGE, "average/val_acc")
