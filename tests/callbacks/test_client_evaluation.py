"""Models on the clients' own samples: every number against NumPy."""

from pathlib import Path

import numpy as np
import pytest
from fedgkd_pl import ClientEvaluation, FedAvg, LocalEngine, RunFiles
from fedgkd_pl.errors import SettingError

from tests.callbacks.by_hand import logits_of, rows_of, score, watched
from tests.conftest import Table, linear

# the third is too small: rounded, a fifth of it is nothing; of the others two are a tenth
SIZES = (30, 20, 2, *[10] * 20)
KINDS = ("global", "local")


def test_every_client_on_its_own_samples(tmp_path: Path) -> None:
    fractions = {"client_test_fraction": 0.2, "client_val_fraction": 0.3}
    data = Table(sizes=SIZES, participation=0.5, eval_batch_size=7, **fractions)
    model = FedAvg(linear(), engine=LocalEngine(1), local_epochs=3)
    watch = watched(model, data, 3, ClientEvaluation(), RunFiles(str(tmp_path)))
    own = data.client_splits["test"]
    counted = [client for client in range(len(SIZES)) if client != 2]
    rows = rows_of(tmp_path / "clients.csv")
    expected_rows = [(number, client) for number in (1, 2, 3) for client in counted]
    assert [(row["round"], row["client"]) for row in rows] == expected_rows
    for number, answers in enumerate(watch.answers):
        assert 2 < len(answers) < len(counted)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for row in rows[number * len(counted) :][: len(counted)]:
            client = int(row["client"])
            part = own.examples[own.rows(client)]
            x, y = part.inputs.numpy(), part.targets.numpy()
            assert int(row["samples"]) == len(y)
            models = {"global": watch.after[number], "local": answers.get(client)}
            for kind, weights in models.items():
                if weights is None:
                    assert f"{kind}_acc" not in row and f"{kind}_loss" not in row
                    continue
                found[kind].append(score(logits_of(weights, x), y))
                values = (row[f"{kind}_acc"], row[f"{kind}_loss"])
                assert values == pytest.approx(found[kind][-1], rel=1e-5)
        expected = {}
        for kind, hands in found.items():
            accs = np.sort([acc for acc, _ in hands])
            expected |= {
                f"clients/{kind}_acc_mean": accs.mean(),
                f"clients/{kind}_acc_std": np.sqrt(((accs - accs.mean()) ** 2).mean()),
                f"clients/{kind}_acc_worst10": accs[: max(1, len(accs) // 10)].mean(),
                f"clients/{kind}_acc_min": accs[0],
                f"clients/{kind}_loss_mean": np.mean([loss for _, loss in hands]),
            }
        assert watch.values("clients/", number) == pytest.approx(expected, rel=1e-5)


def test_data_elsewhere_or_without_own_samples_is_refused() -> None:
    model, data = FedAvg(linear(), engine=LocalEngine(1)), Table()
    data.setup()
    with pytest.raises(SettingError, match=r"^client_test_fraction: "):
        ClientEvaluation().check(model, data)
    model.engine.max_samples = 9
    with pytest.raises(SettingError, match=r"callbacks: .*, and theirs is not here"):
        ClientEvaluation().check(model, data)
