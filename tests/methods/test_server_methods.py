"""FedDF, CFD and FedAUX, whose servers train, against the bare-torch oracle."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fedgkd_pl import FedAvg
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.methods.cfd import coded_bits, quantise, soft_cross_entropy
from fedgkd_pl.methods.fedaux import certainty, logistic_regression, sigma, split_public
from fedgkd_pl.methods.feddf import weighted_mean
from fedgkd_pl.seeds import derive
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conftest import Table, fit, same
from tests.oracles import oracle_server as oracle
from tests.support.methods import LOCAL, SERVER, batches_of, build, cohorts, double, table

ROUNDS = 4


def rows_of(examples: Examples, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """The rows of endless batches, found by drawing them again."""
    numbered = Examples(torch.arange(len(examples)), examples.targets, lambda x, _: x)
    batches = Batches(numbered, batch_size, torch.Generator().manual_seed(seed))
    while True:
        for rows, _ in batches:
            yield rows


def client_seed(round: int, client: int) -> int:
    torch.manual_seed(derive(0, "model", round, client))
    return int(torch.randint(2**62, ()))


def reference(model: FedAvg, data: Table, name: str, **changes: Any) -> dict[str, Any]:
    data.setup()
    assert data.public is not None
    public, batches = data.public, batches_of(data, epochs=2)
    size: int = model.distil_batch_size  # type: ignore[assignment]
    settings = SERVER[name][2] | changes
    drawn = public
    if name == "FedAUX":
        negatives, drawn = split_public(public, 0.2, 0)
        inputs = torch.cat([negatives.inputs, drawn.inputs]).double()
        noise = {}
        for k, (x, _) in enumerate(data.arrays()):
            first = next(t for t, drawn_ in enumerate(cohorts(data, 50), 1) if k in drawn_)
            torch.manual_seed(derive(0, "model", first, k))
            scale = oracle.sigma(len(x) + len(negatives), 0.01, 50.0, 1e-5)
            noise[k] = scale * torch.randn(6, dtype=torch.float64)
        settings["noise"] = noise
    else:
        inputs = public.inputs.double()

    def public_batches(round: int, who: int | str) -> Iterator[torch.Tensor]:
        seed = derive(0, "server", round) if who == "server" else client_seed(round, int(who))
        return rows_of(drawn, size, seed)

    return oracle.run(
        SERVER[name][1],
        double(model.net.state_dict()),
        [(torch.from_numpy(x).double(), torch.from_numpy(y)) for x, y in data.arrays()],
        cohorts(data, ROUNDS),
        batches=lambda round, client: [torch.from_numpy(b) for b in batches(round, client)],
        public=inputs,
        public_batches=public_batches,
        val=(data.val.inputs.double(), data.val.targets) if name == "FedDF" else None,
        **LOCAL,
        **settings,
    )


def trained(model: FedAvg, data: Table) -> list[dict[str, torch.Tensor]]:
    seen: list[dict[str, torch.Tensor]] = []
    step = model.server_step

    def keep(mean: Any) -> None:
        step(mean)
        seen.append(double(model.net.state_dict()))

    model.server_step = keep  # type: ignore[method-assign]
    fit(model, data, ROUNDS, precision="64-true")
    return seen


def agree(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    for round, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        for key in b:
            torch.testing.assert_close(a[key], b[key], atol=1e-9, rtol=0, msg=f"{key}, {round}")


@pytest.mark.parametrize("participation", [1.0, 0.67], ids=["all", "two of three"])
@pytest.mark.parametrize("name", SERVER)
def test_whole_rounds(name: str, participation: float) -> None:
    data, model = table(participation=participation), build(name)
    expected = reference(model, data, name)
    agree(trained(model, data), expected["models"])
    assert not same(expected["models"][-1], expected["means"][-1] if name != "CFD" else {})
    if name == "CFD":
        bits = [sum(each.values()) for each in expected["bits_up"]]
        sizes = [math.ceil(b / 8) for each in expected["bits_up"] for b in each.values()]
        assert model.bytes_up == sum(sizes) and sum(bits) > 0
        downs = [math.ceil(b / 8) for each in expected["bits_down"] for b in each.values()]
        assert model.bytes_down == sum(downs) > 0


@pytest.mark.parametrize("bits", [1, 32])
def test_whole_rounds_of_cfd_with_other_bits(bits: int) -> None:
    data = table(participation=0.67)
    model = build("CFD", bits_up=bits, bits_down=bits)
    expected = reference(model, data, "CFD", bits_up=bits, bits_down=bits)
    agree(trained(model, data), expected["models"])


def test_a_checkpoint_of_cfd_does_not_grow_with_the_clients(tmp_path: Path) -> None:
    """What was sent to each and received is in files of their own, as clients' states are."""
    sizes = []
    for clients in (3, 30):
        save = ModelCheckpoint(tmp_path / str(clients), save_last=True)
        data = table(sizes=(5,) * clients)
        fit(build("CFD"), data, 2, callbacks=[save], enable_checkpointing=True)
        sizes.append((tmp_path / str(clients) / "last.ckpt").stat().st_size)
    assert sizes[1] < sizes[0] + 27 * 200


def test_feddf_stops_early_and_keeps_the_best() -> None:
    """The oracle's evaluations say so; the table's rounds must show it."""
    data, model = table(), build("FedDF", distil_steps=40, patience=6)
    expected = reference(model, data, "FedDF", steps=40, patience=6)
    agree(trained(model, data), expected["models"])
    assert any(steps < 40 for steps in expected["steps"])


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
    _, expected = oracle.scores(local, others, rest, 0.01, noise)
    ours = certainty(local, others, rest, 0.01, noise)
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
