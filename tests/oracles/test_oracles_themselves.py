"""The oracles against numbers of METHODS.md, identities of the methods, and torch's optimizers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles import oracle_fedweit as weit
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


# FedWeIT


TASKS = ((0, 1), (2, 3))
ORDERS = (TASKS, TASKS[::-1])  # of two clients
WEIT: dict[str, Any] = {"lam1": 0.02, "lam2": 3.0, "lr": 0.05}
HIDDEN = 7


def weit_net(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """One layer is decomposed; its bias and the head are local."""
    return (x @ w["hidden"].T + w["bias"]).relu() @ w["head"].T


def weit_start() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    shapes = {"hidden": (HIDDEN, 4), "bias": (HIDDEN,), "head": (4, HIDDEN)}
    return {
        name: torch.randn(shape, generator=random, dtype=torch.float64) / 2
        for name, shape in shapes.items()
    }


def weit_data(seed: int, n: int) -> tuple[Tensor, Tensor]:
    x, _ = data(seed, n)
    return x, torch.arange(n) % 4


WEIT_CLIENTS = [weit_data(20, 12), weit_data(21, 16)]


def weit_batches(t: int, k: int) -> list[Tensor]:
    """Round t of two rounds per task."""
    classes = torch.tensor(ORDERS[k][(t - 1) // 2])
    own = torch.isin(WEIT_CLIENTS[k][1], classes).nonzero()[:, 0]
    return [own[part] for part in drawn(len(own), 3, t, k)]


def weit_init(k: int, position: int, size: int) -> dict[str, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(100 * k + position)
    m, a = (torch.randn(n, generator=random, dtype=torch.float64) for n in (HIDDEN, size))
    return {"m": {"hidden": m}, "a": {"hidden": a}}


def fedweit(rounds: int = 4, cohorts: Any = None, **changes: Any) -> dict[str, list[Any]]:
    options: dict[str, Any] = {"orders": ORDERS, "rounds_per_task": 2, "batches": weit_batches}
    options |= {"init": weit_init} | WEIT | changes
    cohorts = cohorts or [[0, 1]] * rounds
    return weit.run(weit_net, weit_start(), ["hidden"], WEIT_CLIENTS, cohorts, **options)


def vector(name: str) -> Tensor:
    return torch.tensor(weit.VECTOR[name], dtype=torch.float64)


def test_fedweits_vectors() -> None:
    B, m, A, kb, a = (vector(name) for name in ("B", "m", "A", "KB", "a"))
    close(weit.effective(B, m, A, a, kb), vector("theta"), atol=1e-15)
    assert not torch.allclose(weit.effective(B.T, m, A, a, kb), vector("theta"))
    drift = ((vector("dB") * weit.gate(m, B)) ** 2).sum()
    assert drift.item() == pytest.approx(weit.VECTOR["drift"])
    before = {"w": weit.effective(B, m, A)}
    task = weit.Task((0, 1), {"w": m}, {"w": A}, {"w": torch.zeros(0)}, {})
    for half, name in ((False, "drift_term"), (True, "half_drift_term")):
        terms = weit.loss_terms(
            lambda w, x: x @ w["w"].T,
            *({"w": B + vector("dB")}, {0: task, 1: task}, 1, {0: before}),
            *(torch.eye(2).double(), torch.tensor([0, 1])),
            weit.SETTINGS | {"half_drift": half},
        )
        assert terms["drift"].item() == pytest.approx(weit.VECTOR[name])
    assert terms["A"].item() == pytest.approx(1e-3 * 2 * 0.3)  # of both tasks
    assert terms["m"].item() == pytest.approx(1e-3 * 1.0986123)  # of the current one


def test_the_masked_means_vector() -> None:
    masks, Bs, mean = (
        torch.tensor(weit.MEAN_VECTOR[name], dtype=torch.float64) for name in ("masks", "B", "mean")
    )
    sent = [(B * mask[:, None], mask) for B, mask in zip(Bs, masks, strict=True)]
    close(weit.masked_mean(sent, torch.zeros(2, 2).double()), mean, atol=1e-13)
    before = torch.tensor([[5.0, 6.0], [7.0, 8.0]]).double()
    alone = [sent[0]]
    assert weit.masked_mean(alone, before)[1].tolist() == [7, 8]
    zero = weit.masked_mean(alone, before, "zero")
    assert zero[1].tolist() == [0, 0]
    close(weit.merged(before, zero), torch.tensor([[2.0, 4.0], [7.0, 8.0]]).double(), atol=1e-13)


def test_the_threshold_is_strict() -> None:
    m = torch.tensor([0.5, -0.1, 0.9, -0.3, 0.2, 1.0, -0.8, 0.4, -0.6, 0.7])
    mask = weit.upload_mask(m)
    assert mask.sum() == weit.KEPT_OF_TEN
    assert mask.tolist() == [float(abs(v) > 0.4 + 1e-6) for v in m.tolist()]
    assert weit.upload_mask(torch.ones(5)).sum() == 0  # equals go together
    assert weit.upload_mask(torch.tensor([0.3])).sum() == 0


def test_forgetting() -> None:
    assert weit.forgetting([[0.9], [0.8, 0.7], [0.6, 0.75, 0.5]]) == pytest.approx(0.15)
    assert weit.forgetting([[0.4, 1.0], [0.6, 0.3]]) == 0  # got better; not begun does not count
    with pytest.raises(ValueError):
        weit.forgetting([[0.9]])


def test_fedweit_by_torchs_adam() -> None:
    """Two clients, two tasks of two rounds, again with tensors, loops and torch.optim.Adam."""
    out = fedweit()
    w0 = weit_start()
    server_B, kb, senders = w0["hidden"], [], set()
    own = [w0["hidden"].clone().requires_grad_() for _ in (0, 1)]
    m: list[list[Tensor]] = [[], []]
    A: list[list[Tensor]] = [[], []]
    rest: list[Any] = [None, None]
    old: list[Any] = [None, None]
    adam: list[Any] = [None, None]
    for t in (1, 2, 3, 4):
        up, adaptives = [], []
        for k in (0, 1):
            position = (t - 1) // 2
            if t == 3:
                with torch.no_grad():
                    old[k] = own[k] * m[k][0].sigmoid()[:, None] + A[k][0]
            with torch.no_grad():
                own[k].copy_(torch.where(server_B == 0, own[k], server_B))
            if t in (1, 3):
                first = weit_init(k, position, len(kb))
                m[k].append(first["m"]["hidden"].requires_grad_())
                A[k].append((w0["hidden"] / 3).requires_grad_())
                rest[k] = [w0["bias"].clone(), w0["head"].clone(), first["a"]["hidden"]]
                for value in rest[k]:
                    value.requires_grad_()
                adam[k] = torch.optim.Adam([own[k], m[k][-1], *A[k], *rest[k]], lr=0.05)
            bias, head, a = rest[k]
            for batch in weit_batches(t, k):
                x, y = WEIT_CLIENTS[k][0][batch], WEIT_CLIENTS[k][1][batch]
                theta = own[k] * m[k][-1].sigmoid()[:, None] + A[k][-1]
                if kb:
                    theta = theta + torch.einsum("j,joi->oi", a, torch.stack(kb))
                logits = torch.relu(x @ theta.T + bias) @ head.T
                closed = [c for c in range(4) if c not in ORDERS[k][position]]
                logits = logits.index_fill(1, torch.tensor(closed), -1e9)
                loss = torch.nn.functional.cross_entropy(logits, y)
                loss = loss + 0.02 * sum(each.abs().sum() for each in [*A[k], m[k][-1]])
                if old[k] is not None:
                    drift = own[k] * m[k][0].detach().sigmoid()[:, None] + A[k][0] - old[k]
                    loss = loss + 3.0 * drift.square().sum()
                adam[k].zero_grad()
                loss.backward()
                adam[k].step()
            mask = (m[k][-1].abs() > m[k][-1].abs().sort()[0][2]).double().detach()  # 0.3 · 7
            up.append((own[k].detach() * mask[:, None], mask))
            adaptives.append((A[k][-1] * (A[k][-1].abs() > 0.02)).detach().clone())
            ours = out["clients"][t - 1][k]
            close(ours.B["hidden"], own[k].detach())
            for i in range(position + 1):
                close(ours.tasks[i].A["hidden"], A[k][i].detach())
                close(ours.tasks[i].m["hidden"], m[k][i].detach())
            close(ours.tasks[position].rest, {"bias": bias.detach(), "head": head.detach()})
        count = (up[0][1] + up[1][1])[:, None]
        server_B = torch.where(count > 0, (up[0][0] + up[1][0]) / count.clamp(min=1), server_B)
        close(out["B"][t - 1]["hidden"], server_B)
        senders |= set(count.flatten().tolist())
        kb = adaptives if t == 2 else kb
    assert senders == {0, 1, 2}  # of a channel
    assert [len(each) for each in out["kb"]] == [0, 0, 2, 2]
    task = out["clients"][-1][1].tasks[1]
    close(task.a["hidden"], rest[1][2].detach())
    # Evaluated: pruned A, with a and KB of its own task.
    B = torch.where(server_B == 0, own[1].detach(), server_B)
    theta = B * m[1][1].detach().sigmoid()[:, None] + adaptives[1]
    theta = theta + torch.einsum("j,joi->oi", rest[1][2].detach(), torch.stack(kb))
    close(out["thetas"][-1][1][1]["hidden"], theta)
    first = B * m[1][0].detach().sigmoid()[:, None] + weit.pruned(A[1][0].detach(), 0.02)
    close(out["thetas"][-1][1][0]["hidden"], first)


def test_the_terms_by_hand() -> None:
    out = fedweit()
    before, after = out["clients"][1][0], out["received"][2][0]
    first = out["losses"][2][0][0]  # the second task's first batch
    A, m = weit_start()["hidden"] / 3, weit_init(0, 1, 2)["m"]["hidden"]
    penalty = 0.02 * (A.abs().sum() + before.tasks[0].A["hidden"].abs().sum())
    assert first["A"] == pytest.approx(penalty.item())
    assert first["m"] == pytest.approx(0.02 * m.abs().sum().item())
    moved = (after["hidden"] - before.B["hidden"]) * before.tasks[0].m["hidden"].sigmoid()[:, None]
    assert first["drift"] == pytest.approx(3.0 * moved.square().sum().item()) and moved.any()
    assert first["decay"] == 0
    assert all(terms["drift"] == 0 for terms in out["losses"][1][0])


def test_fedavg_is_a_special_case() -> None:
    """Masking off, A, m and what is local frozen, no penalty, SGD: θ is FedAvg's."""
    frozen = ("A", "m", "a", "rest")
    none = {"lam1": 0.0, "lam2": 0.0, "masked": False, "freeze": frozen, "optimizer": "sgd"}
    out = fedweit(rounds=2, **none)
    w0 = weit_start()
    theta = w0["hidden"] * 4 / 3  # B_0 + A
    for t in (1, 2):
        trained = []
        for k in (0, 1):
            w = theta
            for batch in weit_batches(t, k):
                w = w.detach().requires_grad_()
                z = weit_net(w0 | {"hidden": w}, WEIT_CLIENTS[k][0][batch])
                (g,) = torch.autograd.grad(
                    weit.task_ce(z, WEIT_CLIENTS[k][1][batch], ORDERS[k][0]), w
                )
                w = w - 0.05 * g
            trained.append(w.detach())
        theta = (trained[0] + trained[1]) / 2
        for k in (0, 1):
            close(out["thetas"][t - 1][k][0]["hidden"], theta)
