"""CFD and FedAUX, whose servers train, against the bare-torch oracle."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import FedAvg
from fedgkd_pl.methods.cfd import coded_bits, quantise, soft_cross_entropy
from fedgkd_pl.methods.fedaux import certainty, logistic_regression, sigma, split_public
from fedgkd_pl.methods.feddf import weighted_mean
from fedgkd_pl.seeds import derive
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conftest import Table, fit, same
from tests.oracles import oracle_server as oracle
from tests.support.methods import (
    LOCAL,
    SERVER,
    agree,
    batches_of,
    build,
    client_seed,
    clients_of,
    cohorts,
    double,
    passes,
    table,
    watched,
)

ROUNDS = 4


def reference(model: FedAvg, data: Table, name: str, **changes: Any) -> dict[str, Any]:
    data.setup()
    assert data.public is not None
    public, (_, theirs, settings) = data.public, SERVER[name]
    size: int = model.distil_batch_size  # type: ignore[assignment]
    inputs, drawn = public.inputs.double(), len(public)
    if name == "FedAUX":
        negatives, distil = split_public(public, 0.2, 0)
        inputs, drawn = torch.cat([negatives.inputs, distil.inputs]).double(), len(distil)
        noise = {}
        for k, (x, _) in enumerate(data.arrays()):
            first = next(t for t, drawn_ in enumerate(cohorts(data, 50), 1) if k in drawn_)
            torch.manual_seed(derive(0, "model", first, k))
            scale = oracle.sigma(len(x) + len(negatives), 0.01, 50.0, 1e-5)
            noise[k] = scale * torch.randn(6, dtype=torch.float64)
        changes["noise"] = noise

    def public_batches(round: int, who: int | str) -> Iterator[torch.Tensor]:
        seed = derive(0, "server", round) if who == "server" else client_seed(round, int(who))
        return passes(drawn, size, seed)

    return oracle.run(
        *(theirs, double(model.net.state_dict()), clients_of(data), cohorts(data, ROUNDS)),
        batches=batches_of(data, epochs=2),
        **{"public": inputs, "public_batches": public_batches},
        **(LOCAL | settings | changes),
    )


OTHER_BITS = [("CFD", 0.67, {"bits_up": bits, "bits_down": bits}) for bits in (1, 32)]


@pytest.mark.parametrize(
    ("name", "participation", "changes"),
    [*((name, part, {}) for name in SERVER for part in (1.0, 0.67)), *OTHER_BITS],
)
def test_whole_rounds(name: str, participation: float, changes: dict[str, int]) -> None:
    data, model = table(participation=participation), build(name, **changes)
    expected = reference(model, data, name, **changes)
    seen = watched(model)
    fit(model, data, ROUNDS, precision="64-true")
    agree(seen, expected["models"])
    assert not same(expected["models"][-1], expected["means"][-1] if name != "CFD" else {})
    if name == "CFD":
        bits = [sum(each.values()) for each in expected["bits_up"]]
        sizes = [math.ceil(b / 8) for each in expected["bits_up"] for b in each.values()]
        assert model.bytes_up == sum(sizes) and sum(bits) > 0
        downs = [math.ceil(b / 8) for each in expected["bits_down"] for b in each.values()]
        assert model.bytes_down == sum(downs) > 0


def test_a_checkpoint_of_cfd_does_not_grow_with_the_clients(tmp_path: Path) -> None:
    """What was sent to each and received is in files of their own, as clients' states are."""
    sizes = []
    for clients in (3, 30):
        save = ModelCheckpoint(tmp_path / str(clients), save_last=True)
        data = table(sizes=(5,) * clients)
        fit(build("CFD"), data, 2, callbacks=[save], enable_checkpointing=True)
        sizes.append((tmp_path / str(clients) / "last.ckpt").stat().st_size)
    assert sizes[1] < sizes[0] + 27 * 200


def test_without_steps_it_is_fedavg_bit_for_bit() -> None:
    sizes: Any = {"sizes": (6, 6, 6)}
    plain = build("FedAvg")
    fit(plain, table(**sizes), 3)
    for model in (build("FedDF", distil_steps=0), build("FedAUX", distil_epochs=0)):
        fit(model, table(**sizes), 3)
        assert same(plain.net.state_dict(), model.net.state_dict())


def test_fedaux_with_equal_scores_is_feddf() -> None:
    logits = torch.randn(3, 5, 4, dtype=torch.float64)
    equal = weighted_mean(logits, torch.full((5, 3), 0.37, dtype=torch.float64))
    torch.testing.assert_close(equal, logits.mean(0), atol=1e-14, rtol=0)
    z = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
    mixed = weighted_mean(z, torch.tensor([[0.9, 0.1]])).softmax(1)
    assert mixed[0].tolist() == pytest.approx([0.8320, 0.1680], abs=1e-4)


def test_the_quantisers_vectors() -> None:
    for p, bits, units in [
        ((0.5, 0.3, 0.2), 1, (1, 0, 0)),
        ((0.5, 0.3, 0.2), 2, (1, 1, 1)),
        ((0.5, 0.3, 0.2), 3, (4, 2, 1)),
        ((0.6, 0.25, 0.1, 0.05), 2, (2, 1, 0, 0)),
        ((0.6, 0.25, 0.1, 0.05), 3, (4, 2, 1, 0)),
    ]:
        row = quantise(torch.tensor([p], dtype=torch.float64), bits)[0] * (2**bits - 1)
        assert row.tolist() == pytest.approx(units)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_the_quantiser_is_the_oracles(bits: int) -> None:
    torch.manual_seed(bits)
    rows = torch.randn(200, 5, dtype=torch.float64).mul(2).softmax(1)
    ours = quantise(rows, bits)
    torch.testing.assert_close(ours, oracle.quantise(rows, bits), atol=1e-12, rtol=0)
    assert (ours.sum(1) - 1).abs().max() < 1e-12


def test_coded_bits_by_hand() -> None:
    eye = torch.eye(4)
    first, second = eye[[1, 1, 2, 3]], eye[[1, 2, 2, 3]]
    assert coded_bits(first) == pytest.approx(6.0)
    assert coded_bits(second, first) == pytest.approx(3.245, abs=1e-3)
    assert coded_bits(first, first) == 0
    uniform = soft_cross_entropy(torch.zeros(2, 3), torch.tensor([[0.5, 0.5, 0.0]] * 2))
    assert uniform.item() == pytest.approx(math.log(3))


def test_the_scores_vectors() -> None:
    assert sigma(1000, 0.01, 0.1, 1e-5) == pytest.approx(9.6896, abs=1e-4)
    x, labels = torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([1.0, 0.0]).double()
    assert logistic_regression(x, labels, 0.1).item() == pytest.approx(1.633506, abs=1e-6)
    assert logistic_regression(x, labels, 0.01).item() == pytest.approx(3.359275, abs=1e-6)
    torch.manual_seed(0)
    local, others, rest = (torch.randn(n, 4).double() for n in (9, 7, 5))
    noise = torch.randn(4).double()
    expected = oracle.scores(local, others, rest, 0.01, noise)
    ours = certainty(local, others, rest, 0.01, noise)
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
