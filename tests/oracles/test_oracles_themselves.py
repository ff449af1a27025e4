"""The oracles against numbers of METHODS.md, identities of the methods, and torch's optimizers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import oracle_nets as nets
from tests.oracles import oracle_server as server

SMALL, DEEP = nets.mlp("features.1", "classifier"), nets.mlp("a", "b", "c")


def state(net: nets.Net, seed: int, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """A random state of an MLP whose layers have these widths."""
    names = ("features.1", "classifier") if net is SMALL else ("a", "b", "c")
    random = torch.Generator().manual_seed(seed)
    w = {}
    for name, (before, after) in zip(names, pairwise(sizes), strict=True):
        for kind, shape in (("weight", (after, before)), ("bias", (after,))):
            values = torch.randn(shape, generator=random, dtype=torch.float64)
            w[f"{name}.{kind}"] = values / before**0.5
    return w


def small(seed: int) -> dict[str, Tensor]:
    return state(SMALL, seed, (4, 6, 3))


def deep(seed: int) -> dict[str, Tensor]:
    return state(DEEP, seed, (4, 5, 5, 3))


def data(seed: int, n: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn((n, 4), generator=random, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=random)


def drawn(n: int, size: int, *seed: int) -> list[Tensor]:
    """One pass over n rows, shuffled."""
    random = torch.Generator().manual_seed(hash(seed) % 2**31)
    return list(torch.randperm(n, generator=random).split(size))


def close(a: Any, b: Any, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# FedMD


PUBLIC = data(99, 12)
CLIENTS = [data(k, n) for k, n in enumerate((8, 5, 6))]
FEDMD: dict[str, Any] = {"public_lr": 0.01, "distil_lr": 0.02, "digest_decay": 0.05, "lr": 0.03}


def rows(t: int) -> Tensor:
    return torch.randperm(12, generator=torch.Generator().manual_seed(t))[:7]


def phases(t: int, k: int, phase: str) -> list[Tensor]:
    n = {"public": 12, "digest": 7}.get(phase, len(CLIENTS[k][1]))
    return drawn(n, 3, t, k, len(phase)) + drawn(n, 3, t, k, len(phase), 1)


def fedmd(cohorts: list[list[int]], **changes: Any) -> dict[str, list[Any]]:
    settings: dict[str, Any] = {"labels": PUBLIC[1], "rows": rows, "batches": phases} | FEDMD
    start = [small(1), deep(2), small(3)]
    return nets.run_fedmd(
        [SMALL, DEEP], start, CLIENTS, cohorts, public=PUBLIC[0], **(settings | changes)
    )


def test_fedmds_vectors() -> None:
    first, second = (torch.tensor([z]).double() for z in nets.FEDMD_LOGITS)
    mean = nets.mixed_logits([first, second])
    assert mean[0].tolist() == list(nets.FEDMD_MEAN)
    leaf = first.clone().requires_grad_()
    distance = nets.mae(mean, leaf)
    distance.backward()  # type: ignore[no-untyped-call]
    assert distance.item() == pytest.approx(nets.FEDMD_MAE, abs=1e-15)
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx(nets.FEDMD_GRADIENT, abs=1e-15)


def test_fedmd_averages_logits_not_probabilities() -> None:
    votes = [torch.tensor([z]).double() for z in nets.FEDMD_VOTES]
    assert nets.mixed_logits(votes).argmax() == 0
    shares = torch.stack([z.softmax(1) for z in votes]).mean(0)[0]
    assert shares.tolist() == pytest.approx(nets.FEDMD_PROBABILITIES, abs=1e-3)


def test_fedmds_bytes() -> None:
    count, classes, expected = nets.FEDMD_BYTES
    assert count * classes * nets.FEDMD["itemsize"] == expected
    out = fedmd([[0, 1], [0, 2], [1, 2]])
    assert out["bytes_up"] == [dict.fromkeys(c, 7 * 3 * 4) for c in ([0, 1], [0, 2], [1, 2])]
    assert out["bytes_down"][0] == {0: 0, 1: 0}
    assert out["bytes_down"][1] == {0: 84, 2: 84}  # 2 does not digest it


def test_fedmd_by_torchs_optimizers() -> None:
    """Three rounds of two clients again, with torch.optim objects that live as long as they do."""
    out = fedmd([[0, 1]] * 3)
    own = [small(1), deep(2)]
    for w in own:
        for value in w.values():
            value.requires_grad_()
    private = [torch.optim.Adam(w.values(), lr=0.03) for w in own]
    digest = [torch.optim.Adam(w.values(), lr=0.02) for w in own]
    before: Tensor | None = None
    for t in (1, 2, 3):
        for k, net in enumerate((SMALL, DEEP)):
            public = torch.optim.Adam(own[k].values(), lr=0.01)

            def steps(
                by: Any, name: str, loss: Callable[[Tensor], Tensor], t: int = t, k: int = k
            ) -> None:
                for batch in phases(t, k, name):
                    by.zero_grad()
                    loss(batch).backward()  # type: ignore[no-untyped-call]
                    by.step()

            def fit(x: Tensor, y: Tensor, net: Any = net, k: int = k) -> Any:
                return lambda b: torch.nn.functional.cross_entropy(net.forward(own[k], x[b]), y[b])

            def digested(x: Tensor, target: Tensor, net: Any = net, k: int = k) -> Any:
                return lambda b: (
                    torch.nn.functional.l1_loss(net.forward(own[k], x[b]), target[b])
                    + 0.05 * own[k][net.last].square().sum()
                )

            if before is None:
                steps(public, "public", fit(*PUBLIC))
                steps(private[k], "start", fit(*CLIENTS[k]))
            else:
                steps(digest[k], "digest", digested(PUBLIC[0][rows(t - 1)], before))
                steps(private[k], "revisit", fit(*CLIENTS[k]))
            close(dict(own[k]), out["models"][t - 1][k])
        with torch.no_grad():
            now = PUBLIC[0][rows(t)]
            before = (SMALL.forward(own[0], now) + DEEP.forward(own[1], now)) / 2
        close(before, out["consensus"][t - 1])
    steps_made = {name: each[0] for name, each in out["optimizers"][-1][0].items()}
    assert steps_made == {"private": 3 * 6, "digest": 2 * 6}


def test_who_joins_late_starts_and_who_is_absent_stays() -> None:
    out = fedmd([[0, 1], [1, 2], [0, 2]])
    assert [sorted(stage) for stage in out["stages"][1].values()] == [
        ["digest", "revisit"],
        ["public", "start"],
    ]
    assert out["models"][1][0] is out["models"][0][0]
    assert out["trained"] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    close(out["consensus"][1], (out["logits"][1][1] + out["logits"][1][2]) / 2)
    # Client 0 was not in round 2, and digests its consensus in round 3 all the same.
    z = nets.logits_of(SMALL, out["models"][0][0], PUBLIC[0][rows(2)])
    assert out["mae"][2][0] == pytest.approx((z - out["consensus"][1]).abs().mean().item())
    members = [SMALL, DEEP, SMALL]
    both = nets.ensemble(members, out["models"][0], out["trained"][0], PUBLIC[0])
    logits = [nets.logits_of(members[k], out["models"][0][k], PUBLIC[0]) for k in (0, 1)]
    close(both, torch.stack(logits).mean(0))


def test_identical_parties_have_nothing_to_digest() -> None:
    def batches(t: int, k: int, phase: str) -> list[Tensor]:
        return [torch.arange(7)] if phase == "digest" else drawn(8, 3, t)

    out = nets.run_fedmd(
        *([SMALL], [small(1), small(1)], [CLIENTS[0], CLIENTS[0]], [[0, 1]] * 3),
        **{"public": PUBLIC[0], "labels": PUBLIC[1], "rows": rows, "batches": batches},
        digest_decay=0.0,
    )
    for t in (1, 2):
        assert out["mae"][t] == {0: 0.0, 1: 0.0}
        for name, value in out["models"][t - 1][0].items():
            assert torch.equal(out["stages"][t][0]["digest"][name], value)


def test_without_labels_there_is_no_public_start() -> None:
    out = fedmd([[0, 1]], labels=None)
    assert list(out["stages"][0][0]) == ["start"]


def test_stratum_gaps() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    assert nets.stratum_gaps(labels, torch.tensor([0, 1, 4, 6])).tolist() == [0, 0, 0]
    assert nets.stratum_gaps(labels, torch.tensor([0, 1, 2, 3])).tolist() == [2, 1, 1]


# FedDF with prototypes


VAL = data(98, 9)
FEDDF: dict[str, Any] = {"steps": 7, "distil_lr": 0.02, "distil_clip": 0.3, "tau": 1.5}
FEDDF |= {"validate_every": 2, "patience": 4, "optimizer": "sgd", "lr": 0.3, "momentum": 0.9}


def feddf(architectures: list[nets.Net], cohorts: list[list[int]], **changes: Any) -> Any:
    settings: dict[str, Any] = {"val": VAL} | FEDDF | changes
    return nets.run_feddf(
        *(architectures, [small(1), deep(2)][: len(architectures)], CLIENTS, cohorts),
        public=PUBLIC[0],
        batches=lambda t, k: drawn(len(CLIENTS[k][1]), 4, t, k),
        public_batches=lambda t, kind: [b for i in range(4) for b in drawn(12, 4, t, i)],
        **settings,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_one_architecture_is_feddf(weighted: bool) -> None:
    cohorts = [[0, 1, 2], [0, 2], [1, 2]]
    ours = feddf([SMALL], cohorts, weighted=weighted)
    plain = server.run(
        *("feddf", small(1), CLIENTS, cohorts),
        batches=lambda t, k: drawn(len(CLIENTS[k][1]), 4, t, k),
        public=PUBLIC[0],
        public_batches=lambda t, who: [b for i in range(4) for b in drawn(12, 4, t, i)],
        val=VAL,
        weighted=weighted,
        **FEDDF,
    )
    for t in range(3):
        close(ours["models"][t][0], plain["models"][t])
        assert ours["evaluations"][t][0] == plain["evaluations"][t]


def test_without_steps_every_group_has_its_own_mean() -> None:
    out = feddf([SMALL, DEEP], [[0, 1, 2], [0, 2]], steps=0)
    local = out["locals"][0]
    for name, value in out["models"][0][0].items():
        close(value, (local[0][name] + local[2][name]) / 2, atol=1e-15)
    assert all(torch.equal(out["models"][0][1][name], local[1][name]) for name in local[1])
    assert out["models"][1][1] is out["models"][0][1]  # nobody of it took part
    assert out["trained"] == [[0, 1], [0, 1]]
    sizes = [4 * (4 * 6 + 6 + 6 * 3 + 3), 4 * (4 * 5 + 5 + 5 * 5 + 5 + 5 * 3 + 3)]
    assert out["bytes_up"][0] == {0: sizes[0], 1: sizes[1], 2: sizes[0]}
    assert out["bytes_down"][1] == {0: sizes[0], 2: sizes[0]}


def test_all_clients_teach_every_student() -> None:
    out = feddf([SMALL, DEEP], [[0, 1, 2]])
    local, x = out["locals"][0], PUBLIC[0]
    z = [nets.logits_of(net, local[k], x) for k, net in enumerate((SMALL, DEEP, SMALL))]
    close(out["target"][0], torch.stack(z).mean(0))
    for kind, net in enumerate((SMALL, DEEP)):
        last = feddf([SMALL, DEEP], [[0, 1, 2]], val=None)["models"][0][kind]
        before = nets.kl(out["target"][0], nets.logits_of(net, out["means"][0][kind], x), 1.5)
        assert nets.kl(out["target"][0], nets.logits_of(net, last, x), 1.5) < before


def test_one_client_is_its_own_model() -> None:
    """KL 0, but for rounding, which Adam lets grow from step to step: so one step."""
    out = feddf([SMALL, DEEP], [[1]], steps=1)
    close(out["models"][0][1], out["locals"][0][1], atol=1e-8)
    assert out["models"][0][0].keys() == small(1).keys()
    close(out["models"][0][0], small(1), atol=0)
    assert out["trained"] == [[1]]


def test_the_start_is_no_candidate() -> None:
    """The start is right on all of the validation data, and its first successor is taken."""
    w = small(1)
    val = (VAL[0], nets.logits_of(SMALL, w, VAL[0]).argmax(1))
    target = -5 * nets.logits_of(SMALL, w, PUBLIC[0])
    o = nets.FEDDF | {"steps": 20, "distil_lr": 0.5, "validate_every": 2, "patience": 4}
    chosen, evaluations, made = nets.distil(
        *(SMALL, w, PUBLIC[0], target, [torch.arange(12)] * 20, val, o)
    )
    assert nets.accuracy(SMALL, w, val) == 1
    best = max(share for _, share in evaluations)
    assert best < 1 and nets.accuracy(SMALL, chosen, val) == best
    step = next(step for step, share in evaluations if share == best)
    assert made == evaluations[-1][0] and (made == 20 or made - step == 4)
