"""The oracles against the numbers of METHODS.md."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import oracle_fedweit as weit
from tests.oracles import oracle_nets as nets


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(a: Any, b: Any, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def test_fedmds_vectors() -> None:
    first, second = (double([z]) for z in nets.FEDMD_LOGITS)
    mean = nets.mixed_logits([first, second])
    assert mean[0].tolist() == list(nets.FEDMD_MEAN)
    leaf = first.clone().requires_grad_()
    distance = nets.mae(mean, leaf)
    distance.backward()  # type: ignore[no-untyped-call]
    assert distance.item() == pytest.approx(nets.FEDMD_MAE, abs=1e-15)
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx(nets.FEDMD_GRADIENT, abs=1e-15)


def test_fedmd_averages_logits_not_probabilities() -> None:
    votes = [double([z]) for z in nets.FEDMD_VOTES]
    assert nets.mixed_logits(votes).argmax() == 0
    shares = torch.stack([z.softmax(1) for z in votes]).mean(0)[0]
    assert shares.tolist() == pytest.approx(nets.FEDMD_PROBABILITIES, abs=1e-3)


def test_fedweits_vectors() -> None:
    B, m, A, kb, a, dB = (double(weit.VECTOR[name]) for name in ("B", "m", "A", "KB", "a", "dB"))
    theta = double(weit.VECTOR["theta"])
    close(weit.effective(B, m, A, a, kb), theta, atol=1e-15)
    assert not torch.allclose(weit.effective(B.T, m, A, a, kb), theta)
    drift = ((dB * weit.gate(m, B)) ** 2).sum()
    assert drift.item() == pytest.approx(weit.VECTOR["drift"])
    before = {"w": weit.effective(B, m, A)}
    task = weit.Task((0, 1), {"w": m}, {"w": A}, {"w": torch.zeros(0)}, {})
    terms = weit.loss_terms(
        lambda w, x: x @ w["w"].T,
        *({"w": B + dB}, {0: task, 1: task}, 1, {0: before}),
        *(torch.eye(2).double(), torch.tensor([0, 1])),
        weit.SETTINGS,
    )
    assert terms["drift"].item() == pytest.approx(weit.VECTOR["drift_term"])
    assert terms["A"].item() == pytest.approx(1e-3 * 2 * 0.3)  # of both tasks
    assert terms["m"].item() == pytest.approx(1e-3 * 1.0986123)  # of the current one


def test_the_masked_means_vector() -> None:
    masks, Bs, mean = (double(weit.MEAN_VECTOR[name]) for name in ("masks", "B", "mean"))
    sent = [(B * mask[:, None], mask) for B, mask in zip(Bs, masks, strict=True)]
    close(weit.masked_mean(sent), mean)
    alone = weit.masked_mean(sent[:1])
    assert alone[1].tolist() == [0, 0]  # a channel that nobody sends
    own = double([[5.0, 6.0], [7.0, 8.0]])
    close(weit.merged(own, alone), double([[2.0, 4.0], [7.0, 8.0]]))


def test_the_threshold_is_strict() -> None:
    m = torch.tensor([0.5, -0.1, 0.9, -0.3, 0.2, 1.0, -0.8, 0.4, -0.6, 0.7])
    mask = weit.upload_mask(m)
    assert mask.sum() == weit.KEPT_OF_TEN
    assert mask.tolist() == [float(abs(v) > 0.4 + 1e-6) for v in m.tolist()]
    assert weit.upload_mask(torch.ones(5)).sum() == 0  # equals go together


def test_forgetting() -> None:
    assert weit.forgetting([[0.9], [0.8, 0.7], [0.6, 0.75, 0.5]]) == pytest.approx(0.15)
    assert weit.forgetting([[0.4, 1.0], [0.6, 0.3]]) == 0  # got better; not begun does not count
