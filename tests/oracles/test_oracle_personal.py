"""The oracle of personal parts against METHODS.md's numbers, hand-made ones and torch's own SGD."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles import oracle_methods, oracle_more
from tests.oracles.oracle_methods import Model
from tests.oracles.oracle_personal import logits_of, run

ROUNDS = [[0, 1], [2, 0], [1, 3], [0, 2, 3], [1, 0]]
SIZES = (9, 14, 6, 11)
HEAD = {"classifier.weight", "classifier.bias"}
LR = 0.1


def double(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(a: Model, b: Model, atol: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0)


def all_close(a: Sequence[Model], b: Sequence[Model], atol: float = 1e-12) -> None:
    for one, other in zip(a, b, strict=True):
        close(one, other, atol)


def same(a: Model, b: Model) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def only(w: Model, names: Any) -> Model:
    return {name: value for name, value in w.items() if name in names}


def net() -> Model:
    g = torch.Generator().manual_seed(7)
    shapes = {"features.1.weight": (6, 5), "features.1.bias": (6,)}
    shapes |= {"classifier.weight": (3, 6), "classifier.bias": (3,)}
    return {n: torch.randn(s, generator=g, dtype=torch.float64) / 2 for n, s in shapes.items()}


def data() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(8)
    xs = [torch.randn(n, 5, generator=g, dtype=torch.float64) for n in SIZES]
    return [(x, torch.randint(3, (len(x),), generator=g)) for x in xs]


def batches(t: int, k: int) -> list[Tensor]:
    """Two epochs of batches of four, the last one shorter."""
    g = torch.Generator().manual_seed(100 * t + k)
    return [b for _ in range(2) for b in torch.randperm(SIZES[k], generator=g).split(4)]


def federated(method: str, cohorts: Sequence[Sequence[int]] = ROUNDS, **given: Any) -> Any:
    given = {"batches": batches, "lr": LR, "momentum": 0.9} | given
    return run(method, net(), data(), cohorts, **given)


# F = ½(y - 3)² with y = w·h·x, one sample x = 2 a client, of which N may be more than take part.


def product(w: Model, x: Tensor) -> Tensor:
    return w["w"] * w["h"] * x


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean() / 2


def scalar(
    method: str, cohorts: list[list[int]], steps: int = 1, N: int = 1, **given: Any
) -> tuple[list[list[float]], list[dict[int, dict[str, float]]]]:
    given = {"forward": product, "loss": half_square, "x": 2.0, "y": [3.0] * N, "lr": 0.1} | given
    w0 = given.pop("w0", {"w": double(1.0).sum(), "h": double(0.5).sum()})
    x, ys = double(given.pop("x")), given.pop("y")
    clients = [(x, double(y)) for y in ys]
    one = torch.tensor([0])
    out = run(method, w0, clients, cohorts, batches=lambda t, k: [one] * steps, **given)
    kept = [
        {k: {n: v.item() for n, v in model.items()} for k, model in seen.items()}
        for seen in out["personal"]
    ]
    return [[v.item() for v in model.values()] for model in out["models"]], kept


def test_the_vector_of_personal_heads() -> None:
    models, kept = scalar("fedavg", [[0]], personal={"h"})
    assert models == [pytest.approx([1.2, 0.5])]  # the server's head is w_0's
    assert kept == [{0: {"h": pytest.approx(0.9)}}]
    for head_steps in (1, lambda t, k: t + k):
        models, kept = scalar("fedrep", [[0]], steps=2, personal={"h"}, head_steps=head_steps)
        assert models == [pytest.approx([1.216, 0.5])]
        assert kept == [{0: {"h": pytest.approx(0.9)}}]
    models, kept = scalar("fedbabu", [[0]], frozen={"h"})
    assert models == [pytest.approx([1.2, 0.5])]
    assert kept == [{0: {}}]


def test_a_half_of_fedrep_has_a_velocity_of_its_own_from_its_first_step() -> None:
    models, kept = scalar("fedrep", [[0]], steps=4, personal={"h"}, head_steps=2, momentum=0.5)
    # h: g = -4, h = .9; g = -2.4, v = -2.4 - 2, h = 1.34. Then w: y = 2.68, g = -.8576,
    # w = 1.08576; y = 2.9098368, g = -.241637376, v = g - .4288, w = 1.1528037376
    assert kept == [{0: {"h": pytest.approx(1.34)}}]
    assert models == [pytest.approx([1.1528037376, 0.5])]


def test_clipping_sees_the_half_that_moves() -> None:
    # |g_h| = 4, alone: a step of lr · clip; with g_w = -2 the norm would be √20
    models, kept = scalar("fedrep", [[0]], steps=2, personal={"h"}, head_steps=1, clip=1.0)
    assert kept[0][0]["h"] == pytest.approx(0.6, abs=1e-6)
    assert models[0][0] == pytest.approx(1.1, abs=1e-6)
    models, kept = scalar("fedavg", [[0]], personal={"h"}, clip=1.0)  # Π and shared together
    assert kept[0][0]["h"] == pytest.approx(0.5 + 0.4 / math.sqrt(20), abs=1e-6)
    models, _ = scalar("fedbabu", [[0]], frozen={"h"}, clip=1.0)  # the frozen do not count
    assert models[0][0] == pytest.approx(1.1, abs=1e-6)


DITTO: dict[str, Any] = {
    "w0": {"v": double(0.0).sum()},
    "forward": lambda w, x: w["v"] * x,
    "x": 1.0,
    "y": [20.0, 1.0],  # client 0 takes w from 0 to 2, then client 1 begins at v = w_0 = 0
}


def test_the_vector_of_ditto() -> None:
    models, kept = scalar("ditto", [[0], [1]], lam=0.5, **DITTO)
    assert models == [pytest.approx([2.0]), pytest.approx([1.9])]
    assert kept[0] == {0: {"v": pytest.approx(2.0)}}  # the anchor is where v begins
    assert kept[1] == {0: {"v": pytest.approx(2.0)}, 1: {"v": pytest.approx(0.2)}}

    # The anchor stays at w_t = 2 while w goes to 1, so v goes to 4/3; w_0 = 2 for whom begins
    far = DITTO | {"w0": {"v": double(2.0).sum()}, "y": [1.0, 1.0]}
    models, kept = scalar("ditto", [[0]], steps=400, lam=0.5, **far)
    assert models == [pytest.approx([1.0])]
    assert kept == [{0: {"v": pytest.approx(4 / 3)}}]


def test_ditto_diverges_with_steps_that_are_too_long() -> None:
    # v ← v - η((v - 1) + λ(v - w_t)) has the factor 1 - η(1 + λ): η = .1, λ = 20 gives -1.1
    _, kept = scalar("ditto", [[0]], steps=50, lam=20.0, **DITTO | {"y": [1.0]})
    assert kept[0][0]["v"] == pytest.approx((1 - 1.1**50) / 21)
    _, kept = scalar("ditto", [[0]], steps=500, lam=18.0, **DITTO | {"y": [1.0]})
    assert kept[0][0]["v"] == pytest.approx(1 / 19)


def test_scaffold_controls_the_shared_part_alone() -> None:
    models, kept = scalar("scaffold", [[0], [0], [1]], N=2, personal={"h"})
    # c_0 = g_w = -2, c = -1; then g_w = -1.512 - (-2) + (-1), g_h = -2.016 as it is;
    # c_0 = -1.512, c = -.756; then client 1, from h_0 and w = 1.2512: g_w = -1.7488 - .756
    assert models == [pytest.approx([w, 0.5]) for w in (1.2, 1.2512, 1.50168)]
    assert [seen[0]["h"] for seen in kept] == pytest.approx([0.9, 1.1016, 1.1016])
    assert kept[2][1]["h"] == pytest.approx(0.5 + 0.1 * 1.7488 * 1.2512 * 2)
    assert oracle_more.effective_steps(0.9, 1.0, 720) == pytest.approx(7110)


def test_scaffolds_divisor_counts_momentum() -> None:
    # Two steps, momentum .5, F = ½(v - 1)², lr .1: from 0 g = -1, then -.9 and velocity -1.4: .24.
    # K' = 2.5, c_0 = -.96, c = -.48. Round 2: shift +.48. g = -.76 + .48 = -.28, .268;
    # g = -.732 + .48 = -.252, velocity -.392, .3072
    models, _ = scalar("scaffold", [[0], [0]], steps=2, momentum=0.5, **DITTO | {"y": [1.0, 1.0]})
    assert models == [pytest.approx([0.24]), pytest.approx([0.3072])]


def test_fedgkds_teacher_wears_the_clients_own_head() -> None:
    # Logits (w·h·x, 0), y = 0: per logit d of the first class, CE has σ(d) - 1, KL σ(d_s) - σ(d_t)
    def pair(w: Model, x: Tensor) -> Tensor:
        return torch.stack([product(w, x), torch.zeros_like(x)], dim=1)

    def sigma(d: float) -> float:
        return 1 / (1 + math.exp(-d))

    w, h, means, x, lr, gamma = 1.0, {0: 0.5, 1: 0.5}, [], 2.0, 0.1, 3.0
    expected, heads = [], []
    for k in (0, 0, 0, 1, 0):
        d, slope = w * h[k] * x, 0.0
        if means:
            last = means[-2:]
            slope = gamma / 2 * (sigma(d) - sigma(sum(last) / len(last) * h[k] * x))
        slope += sigma(d) - 1
        w, h[k] = w - lr * slope * h[k] * x, h[k] - lr * slope * w * x
        means.append(w)
        expected.append([w, 0.5])
        heads.append(dict(h) if len(means) > 3 else {0: h[0]})

    clients = [(double(x), torch.tensor([0]))] * 2
    w0 = {"w": double(1.0).sum(), "h": double(0.5).sum()}
    out = run(
        *("fedgkd", w0, clients, [[0], [0], [0], [1], [0]]),
        **{"batches": lambda t, k: [torch.tensor([0])], "lr": lr, "personal": {"h"}},
        **{"forward": pair, "gamma": gamma, "buffer_size": 2},
    )
    got = [[v.item() for v in model.values()] for model in out["models"]]
    assert got == [pytest.approx(values, abs=1e-14) for values in expected]
    kept = [{k: pi["h"].item() for k, pi in seen.items()} for seen in out["personal"]]
    assert kept == [pytest.approx(values, abs=1e-14) for values in heads]


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("fedavg", {}),
        ("fedrep", {"head_steps": 0}),
        ("fedbabu", {}),
        ("ditto", {"lam": 0.7}),
        ("fedgkd", {"gamma": 0.0}),
    ],
)
def test_without_personal_names_it_is_fedavg(method: str, given: dict[str, Any]) -> None:
    plain = {"batches": batches, "lr": LR, "momentum": 0.9}
    known = oracle_methods.run("fedavg", net(), data(), ROUNDS, **plain)["models"]
    all_close(federated(method, **given)["models"], known)


def test_without_personal_names_the_others_are_those_of_the_other_oracles() -> None:
    plain = {"batches": batches, "lr": LR, "momentum": 0.9}
    gkd = {"gamma": 2.0, "buffer_size": 2}
    known = oracle_methods.run("fedgkd", net(), data(), ROUNDS, **plain, **gkd)["models"]
    all_close(federated("fedgkd", **gkd)["models"], known)
    for clip in (None, 0.5):
        known = oracle_more.run("scaffold", net(), data(), ROUNDS, **plain, clip=clip)["models"]
        all_close(federated("scaffold", clip=clip)["models"], known)


def alone(k: int) -> Model:
    """Return what client k has after training from w_0 in its rounds of ROUNDS, on its own."""
    own = [t for t, cohort in enumerate(ROUNDS, start=1) if k in cohort]
    known = oracle_methods.run(
        *("fedavg", net(), data(), [[k]] * len(own)),
        **{"batches": lambda t, _: batches(own[t - 1], k), "lr": LR, "momentum": 0.9},
    )
    return known["models"][-1]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_with_everything_personal_it_is_local_training(method: str) -> None:
    out = federated(method, personal=set(net()))
    assert all(same(model, net()) for model in out["models"])
    assert [set(seen) for seen in out["personal"]] == [{0, 1}, {0, 1, 2}] + [{0, 1, 2, 3}] * 3
    for k, model in out["personal"][-1].items():
        close(model, alone(k))


def test_ditto_without_a_pull_trains_locally_beside_fedavg() -> None:
    free, pulled = federated("ditto", lam=0.0), federated("ditto", lam=1.0)
    for k, v in free["personal"][-1].items():
        close(v, alone(k))
        assert not same(v, pulled["personal"][-1][k])
    assert all(map(same, free["models"], pulled["models"]))


def test_fedbabu_is_fedavg_with_the_head_frozen() -> None:
    out = federated("fedbabu", frozen=HEAD)["models"]
    assert all(map(same, out, federated("fedavg", frozen=HEAD)["models"]))
    assert all(same(only(model, HEAD), net()) for model in out)
    # FedRep that never moves its head is the same thing
    kept = federated("fedrep", personal=HEAD, head_steps=0)
    assert all(map(same, out, kept["models"]))
    assert same(kept["personal"][-1][2], net())


def test_fedper_with_one_client_is_fedavg() -> None:
    whole, split = (
        federated("fedavg", [[1]] * 3)["models"],
        federated("fedavg", [[1]] * 3, personal=HEAD),
    )
    for model, body, seen in zip(whole, split["models"], split["personal"], strict=True):
        close(model, body | seen[1])
        assert same(only(body, HEAD), net())


def test_a_latecomer_has_the_initial_head_under_the_body_of_its_round() -> None:
    out = federated("fedavg", personal=HEAD)  # client 3 comes in round 3
    start = out["models"][1] | only(net(), HEAD)
    known = oracle_methods.run(
        *("fedavg", start, data(), [[3]]),
        **{"batches": lambda t, k: batches(3, k), "lr": LR, "momentum": 0.9},
    )["models"][0]
    close(out["personal"][2][3], only(known, HEAD))
    assert same(out["personal"][2][0], out["personal"][1][0])  # who is absent keeps its own


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto", "fedgkd", "scaffold"])
def test_frozen_names_stay_and_low_rank_products_are_averaged_exactly(method: str) -> None:
    # W + B·A with A frozen: the mean of B is the mean of the products. B = 0 at the start.
    def adapted(w: Model, x: Tensor) -> Tensor:
        base = only(w, {"features.1.bias", *HEAD})
        return logits_of(base | {"features.1.weight": w["W"] + w["B"] @ w["A"]}, x)

    g = torch.Generator().manual_seed(9)
    w0 = {"W": net()["features.1.weight"], "A": torch.randn(2, 5, generator=g).double()}
    w0 |= {"B": torch.zeros(6, 2).double()} | only(net(), {"features.1.bias", *HEAD})
    given: dict[str, Any] = {"batches": batches, "lr": LR, "forward": adapted}
    given |= {"frozen": {"W", "A"}, **({"head_steps": 2} if method == "fedrep" else {})}
    if method in ("fedavg", "fedgkd", "scaffold"):
        given["personal"] = HEAD
    out = run(method, w0, data(), [[0, 1], [2]], **given)
    assert all(same(only(model, {"W", "A"}), w0) for model in out["models"])
    products = [run(method, w0, data(), [[k]], **given)["models"][0]["B"] @ w0["A"] for k in (0, 1)]
    mean = (SIZES[0] * products[0] + SIZES[1] * products[1]) / (SIZES[0] + SIZES[1])
    torch.testing.assert_close(out["models"][0]["B"] @ w0["A"], mean, atol=1e-12, rtol=0)
    assert mean.abs().max() > 0.01
    for pi in out["personal"][-1].values():
        assert not {"W", "A"} & pi.keys() or same(only(pi, {"W", "A"}), w0)


def torch_client(
    method: str, received: Model, t: int, k: int, own: Model | None, *, clip: float, **given: Any
) -> tuple[Model, Model | None]:
    """Train as a client of torch would: its SGD, its clipping, its KL; Ditto batch by batch."""

    def parameters(w: Model) -> Model:
        return {name: torch.nn.Parameter(value.clone()) for name, value in w.items()}

    def sgd(w: Model, names: Any) -> torch.optim.SGD:
        return torch.optim.SGD([w[name] for name in w if name in names], lr=LR, momentum=0.9)

    def step(w: Model, names: Any, by: Any, addition: Callable[[Model], Tensor]) -> None:
        for name in w:
            w[name].requires_grad_(name in names)
            w[name].grad = None
        (F.cross_entropy(logits_of(w, x), y) + addition(w)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([w[name] for name in w if name in names], clip)
        by.step()

    def addition(w: Model) -> Tensor:
        if method == "scaffold":
            return sum((c * w[name]).sum() for name, c in given["shift"].items())
        if given.get("teacher") is None:
            return torch.zeros(())
        with torch.no_grad():
            target = logits_of(given["teacher"], x).softmax(1)
        log_q = logits_of(w, x).log_softmax(1)
        return given["gamma"] / 2 * F.kl_div(log_q, target, reduction="batchmean")

    def pull(v: Model) -> Tensor:
        return given["lam"] / 2 * sum(((v[name] - received[name]) ** 2).sum() for name in v)

    w, body = parameters(received), received.keys() - HEAD
    by, of_head, of_body = sgd(w, received), sgd(w, HEAD), sgd(w, body)
    v = parameters(own) if method == "ditto" and own else None
    of_v = sgd(v, v) if v else None
    for i, batch in enumerate(batches(t, k)):
        x, y = data()[k][0][batch], data()[k][1][batch]
        if method == "fedrep":
            half = (HEAD, of_head) if i < given["head_steps"] else (body, of_body)
            step(w, *half, addition)
            continue
        if v:
            step(v, v, of_v, pull)
        step(w, w, by, addition)
    detached = [{n: p.detach() for n, p in m.items()} if m else None for m in (w, v)]
    return detached[0] or {}, detached[1]


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto", "fedgkd", "scaffold"])
def test_rounds_as_torchs_own_sgd_makes_them(method: str) -> None:
    given: dict[str, Any] = {"ditto": {"lam": 0.6}, "fedgkd": {"gamma": 4.0, "buffer_size": 2}}
    given = given.get(method, {"head_steps": 3} if method == "fedrep" else {})
    pi = set() if method == "ditto" else HEAD
    clip = 0.8  # of every method about half of the steps are clipped
    out = federated(method, personal=pi, clip=clip, **given)

    w, kept = net(), {}
    body = [name for name in w if name not in pi]
    c = {name: torch.zeros_like(w[name]) for name in body}
    c_k = dict.fromkeys(range(4), c)
    for t, cohort in enumerate(ROUNDS, start=1):
        trained, old = [], c
        for k in cohort:
            received, context = w | (kept.get(k, {}) if pi else {}), dict(given)
            last = out["models"][: t - 1][-2:]
            if method == "fedgkd" and last:
                context["teacher"] = received | {
                    name: torch.stack([model[name] for model in last]).mean(0) for name in body
                }
            context["shift"] = {name: old[name] - c_k[k][name] for name in body}
            theta, v = torch_client(
                method, received, t, k, kept.get(k, net()), clip=clip, **context
            )
            kept[k] = v or only(theta, pi)
            trained.append(theta)
            K, rho = len(batches(t, k)), 0.9
            divisor = LR * (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)
            new = {n: c_k[k][n] - old[n] + (received[n] - theta[n]) / divisor for n in body}
            c = {n: c[n] + (new[n] - c_k[k][n]) / 4 for n in body}
            c_k[k] = new
        n = [SIZES[k] for k in cohort]
        w = w | {
            name: sum(a / sum(n) * theta[name] for a, theta in zip(n, trained, strict=True))
            for name in body
        }
        close(out["models"][t - 1], w)
        assert out["personal"][t - 1].keys() == kept.keys()
        for k, mine in kept.items():
            close(out["personal"][t - 1][k], mine)


def test_what_is_given_is_not_changed_and_has_to_make_sense() -> None:
    w0 = net()
    run("ditto", w0, data(), ROUNDS, batches=batches, lr=LR)
    assert same(w0, net())
    for given in ({"personal": {"head"}}, {"personal": HEAD, "frozen": HEAD}):
        with pytest.raises(ValueError, match="names"):
            federated("fedavg", **given)
    with pytest.raises(ValueError, match="Ditto"):
        federated("ditto", personal=HEAD)
    for method, more in (("fedrep", {}), ("fedavg", {"lam": 1.0})):
        with pytest.raises(TypeError, match="settings"):
            federated(method, **more)
