"""Reference federated rounds, float64: SCAFFOLD, FedDyn, FedLSD, FedNTD, FedNova, FedExP, FedGMT.

Also the server optimizers of Reddi et al. (Algorithm 2), FedAvgM, and the local cross-entropies
that know the client's label counts (prior-adjusted, FedLC, FedRS).
Written from the equations in ``METHODS.md`` and ``FACTS.md`` alone; nothing is imported from the
package, so that agreement means something. The net is the MLP of `oracle_methods`; every tensor of
it is a parameter. Gradients come from autograd; everything around them is spelt out.

Letters: w is the model sent, θ_k what client k sends back, d_k and c_k its state, η its learning
rate, r its momentum; N counts all clients; the weights p_k over the cohort S sum to one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.oracle_methods import (
    Data,
    Model,
    Optimizer,
    aggregate,
    complete,
    copied,
    forward,
    gradients,
    leaves_of,
)

# The settings of each method and server optimizer, with the sources' value; None: has to be given.
# "uniform" makes p_k = 1/|S| instead of n_k / Σ n.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {"uniform": False},
    "scaffold": {"uniform": False},
    "feddyn": {"uniform": True, "alpha": None, "server_term": True},
    "fedlsd": {"uniform": False, "form": None, "beta": None, "tau": 3.0},
    "fedntd": {"uniform": False, "beta": 1.0, "tau": 1.0},
    "fednova": {"uniform": False, "mu": 0.0},
    "fedexp": {"uniform": False, "eps": None},
    "fedgmt": {"uniform": False, "gamma": 1.0, "tau": 3.0, "alpha": 0.95, "beta": 10.0}
    | {"server_term": True, "bias_corrected": False, "prox": False},
}
SERVERS: dict[str, dict[str, Any]] = {
    "avgm": {"lr": 1.0, "beta": 0.9},
    "adagrad": {"lr": None, "b1": None, "tau": 1e-3},
    "yogi": {"lr": None, "b1": 0.9, "b2": 0.99, "tau": 1e-3},
    "adam": {"lr": None, "b1": 0.9, "b2": 0.99, "tau": 1e-3},
}


def plus(a: Model, b: Model, factor: float = 1.0) -> Model:
    """Return a + factor · b."""
    return {name: a[name] + factor * b[name] for name in a}


def zeros(a: Model) -> Model:
    """Return zeros shaped like the model."""
    return {name: torch.zeros_like(value) for name, value in a.items()}


def squared(a: Model) -> Tensor:
    """Return ‖a‖² over all tensors of the model."""
    return torch.stack([(value**2).sum() for value in a.values()]).sum()


def adjusted_logits(
    logits: Tensor, counts: Tensor, kind: str, tau: float = 1.0, alpha: float = 0.5
) -> Tensor:
    """Return the logits (batch, classes) that the local cross-entropy sees.

    counts holds n_c, how often the client's whole training data has class c; absent: n_c = 0.

    - "prior": s_c + τ·log(n_c / n); absent classes -inf.
    - "fedlc": s_c - τ·n_c^(-1/4); absent classes -inf.
    - "fedrs": s_c of held, α·s_c of absent classes. Not a mask, even with α = 0.
    """
    held, n = counts > 0, counts.double()
    if kind == "fedrs":
        return logits * torch.where(held, torch.ones_like(n), alpha)
    some = n.clamp(min=1)  # the absent ones are masked below, whatever τ is
    shift = (some / n.sum()).log() if kind == "prior" else -(some**-0.25)
    return (logits + tau * shift).masked_fill(~held, -math.inf)


def cross_entropy(
    logits: Tensor, y: Tensor, prior: Mapping[str, Any] | None = None, counts: Tensor | None = None
) -> Tensor:
    """Return the batch mean of log Σ_c e^(s_c) - s_y, of `adjusted_logits` if prior is given."""
    if prior is not None:
        logits = adjusted_logits(logits, counts, **prior)
    return (logits.logsumexp(1) - logits.gather(1, y[:, None])[:, 0]).mean()


def soft_cross_entropy(teacher: Tensor, student: Tensor, tau: float) -> Tensor:
    """Return -Σ_c p_c log q_c, p and q at temperature τ, mean over the batch; no τ²."""
    return -((teacher / tau).softmax(1) * (student / tau).log_softmax(1)).sum(1).mean()


def kl(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """Return KL(p ‖ q), p and q at temperature τ, mean over the batch; no τ²."""
    log_p, log_q = (teacher / tau).log_softmax(1), (student / tau).log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def non_true(logits: Tensor, y: Tensor) -> Tensor:
    """Return (batch, classes - 1): every row without the logit of its own label."""
    rows = [torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(logits, y.tolist(), strict=True)]
    return torch.stack(rows)


def local_loss(method: str, w: Model, x: Tensor, y: Tensor, **context: Any) -> Tensor:
    """Return the loss of one batch, differentiable in w (θ) only.

    Context: all of the method's settings but uniform; start, teacher and dual (models) where named
    below; prior and counts for CE = `cross_entropy`, if any. Distillation uses raw logits: p is the
    teacher's, q the trained net's.

    - "fedavg", "scaffold", "fedexp": CE.
    - "fednova": CE + (μ/2)‖θ - start‖².
    - "feddyn": CE + (α/2)‖θ - (start - dual)‖².
    - "fedlsd": (1-β)·CE + β·τ²·softCE(p, q) if form is "convex", CE + β·τ²·KL(p ‖ q) if "additive".
    - "fedntd": CE + β·τ²·KL(p ‖ q), both softmaxes over the classes other than y.
    - "fedgmt": CE + γ·τ²·KL(p ‖ q) + ⟨dual, θ⟩/β, with prox also ‖θ - start‖²/(2β); no KL without
      a teacher.
    """
    logits = forward(w, x)[1]
    loss = cross_entropy(logits, y, context.get("prior"), context.get("counts"))
    if method in ("fedavg", "scaffold", "fedexp"):
        return loss
    if method == "fednova":
        return loss + context["mu"] / 2 * squared(plus(w, context["start"], -1))
    if method == "feddyn":
        center = plus(context["start"], context["dual"], -1)
        return loss + context["alpha"] / 2 * squared(plus(w, center, -1))
    beta, tau, target = context["beta"], context["tau"], None
    if context["teacher"] is not None:
        with torch.no_grad():
            target = forward(context["teacher"], x)[1]
    if method == "fedgmt":
        if target is not None:
            loss = loss + context["gamma"] * tau**2 * kl(target, logits, tau)
        loss = loss + sum((context["dual"][name] * w[name]).sum() for name in w) / beta
        distance = squared(plus(w, context["start"], -1))
        return loss + distance / (2 * beta) if context["prox"] else loss
    if method == "fedntd":
        return loss + beta * tau**2 * kl(non_true(target, y), non_true(logits, y), tau)
    if context["form"] == "convex":
        return (1 - beta) * loss + beta * tau**2 * soft_cross_entropy(target, logits, tau)
    return loss + beta * tau**2 * kl(target, logits, tau)


def local_update(
    method: str, w: Model, data: Data, batches: Sequence[Tensor], **context: Any
) -> Model:
    """Train one client for one round from a fresh optimizer; return its net.

    One step per batch: g ← ∇L + correction (c - c_k, or zeros); clip g; g ← g + weight_decay·θ;
    v ← momentum·v + g, the first v being g; θ ← θ - lr·v. The context holds what is named here (no
    clip or None: no clipping) and that of `local_loss` but start, which is w.
    """
    theta, names = w, ("lr", "clip", "momentum", "weight_decay")
    sgd = Optimizer("sgd", *(context[name] for name in names))
    for batch in batches:
        leaves = leaves_of(theta)
        loss = local_loss(method, leaves, data[0][batch], data[1][batch], start=w, **context)
        theta = sgd.step(theta, plus(gradients(loss, leaves), context["correction"]))
    return theta


def effective_steps(rho: float, lr: float, steps: int) -> float:
    """Return SCAFFOLD's divisor A = Σ η·v over the steps, v ← r·v + 1; lr = 1 gives K' itself."""
    return sum(lr * sum(rho**j for j in range(step + 1)) for step in range(steps))


def nova_normaliser(steps: int, rho: float = 0.0, lr: float = 0.0, mu: float = 0.0) -> float:
    """Return FedNova's a_k: v ← r·v + 1 - η·μ·a, then a ← a + v, both from zero."""
    v = a = 0.0
    for _ in range(steps):
        v = rho * v + 1 - lr * mu * a
        a += v
    return a


def nova_step(
    w: Model, trained: Sequence[Model], weights: Sequence[float], normalisers: Sequence[float]
) -> Model:
    """Return w - τ_eff Σ p_k (w - θ_k)/a_k with τ_eff = Σ p_k a_k."""
    tau = sum(p * a for p, a in zip(weights, normalisers, strict=True))
    new = w
    for theta, p, a in zip(trained, weights, normalisers, strict=True):
        new = plus(new, plus(w, theta, -1), -tau * p / a)
    return new


def exp_step(deltas: Sequence[Model], weights: Sequence[float], eps: float) -> float:
    """Return FedExP's η_g = max(1, Σ p_k‖Δ_k‖² / (2(‖Σ p_k Δ_k‖² + ε))); the p_k sum to one."""
    mean, above = zeros(deltas[0]), 0.0
    for p, delta in zip(weights, deltas, strict=True):
        mean, above = plus(mean, delta, p), above + p * squared(delta)
    return max(1.0, (above / (2 * (squared(mean) + eps))).item())


def server_step(
    w: Model, mean: Model, state: dict[str, Model], kind: str, **given: float
) -> tuple[Model, dict[str, Model]]:
    """Return the next model and state of a server optimizer; Δ = mean - w; state is {} at first.

    - "avgm": v ← β·v + Δ, w ← w + lr·v; v from 0.
    - "adagrad", "yogi", "adam": m ← b1·m + (1-b1)·Δ; then v ← v + Δ², or
      v ← v - (1-b2)·Δ²·sign(v - Δ²), or v ← b2·v + (1-b2)·Δ²; w ← w + lr·m/(√v + τ).
      m from 0, v from τ²; no bias correction.
    """
    o = complete(SERVERS[kind], given)
    delta = plus(mean, w, -1)
    if kind == "avgm":
        v = plus(delta, state["v"], o["beta"]) if state else delta
        return plus(w, v, o["lr"]), {"v": v}
    m = state["m"] if state else zeros(w)
    v = state["v"] if state else {name: torch.full_like(w[name], o["tau"] ** 2) for name in w}
    m = {name: o["b1"] * m[name] + (1 - o["b1"]) * delta[name] for name in w}
    square = {name: delta[name] ** 2 for name in w}
    if kind == "adagrad":
        v = plus(v, square)
    elif kind == "yogi":
        v = plus(v, {n: square[n] * torch.sign(v[n] - square[n]) for n in w}, o["b2"] - 1)
    else:
        v = {name: o["b2"] * v[name] + (1 - o["b2"]) * square[name] for name in w}
    step = {name: m[name] / (v[name].sqrt() + o["tau"]) for name in w}
    return plus(w, step, o["lr"]), {"m": m, "v": v}


def run(
    method: str,
    w0: Model,
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    batches: Callable[[int, int], Sequence[Tensor]],
    lr: float | Callable[[int], float],
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    prior: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run whole rounds of one method; a client's state changes only in rounds it takes part in.

    - "scaffold": g ← g - c_k + c before clipping; c_k⁺ = c_k - c + (w - θ_k)/A, A from
      `effective_steps`; c += Σ_S (c_k⁺ - c_k)/N.
    - "feddyn", "fedgmt": d_k += θ_k - w; then w ← Σ p_k θ_k + (1/N) Σ d_k over all clients (only
      the mean without server_term). FedGMT's e ← α·e + (1-α)·w with this new w; e_0 = w_0 and e
      teaches, or with bias_corrected e_0 = 0 and e/(1-α^t) after t rounds teaches (round 1: none).
    - "fedlsd", "fedntd": w teaches, w_0 in round 1 too.
    - "fednova": `nova_step`. "fedexp": w ← w + η_g Σ p_k (θ_k - w), η_g from `exp_step`.

    Args:
        method, w0, clients, cohorts, batches, momentum: As of `oracle_methods.run`.
        lr: η, or round from 1 → η of that round.
        weight_decay, clip: Of the local SGD, see `local_update`.
        prior: The local cross-entropy: {"kind": ..., its settings}, see `adjusted_logits`.
        server: {"kind": ..., its settings}, see `SERVERS`; of methods without a server step.
        **settings: The method's own, see `SETTINGS`.

    Returns:
        "models": w after every round.

    """
    options = complete(SETTINGS[method], settings)
    uniform, total, w = options.pop("uniform"), len(clients), copied(w0)
    ema = zeros(w) if options.get("bias_corrected") else w if method == "fedgmt" else None
    control, controls = zeros(w), {k: zeros(w) for k in range(len(clients))}
    duals, state, models = dict(controls), {}, []
    for t, cohort in enumerate(cohorts, start=1):
        eta = lr(t) if callable(lr) else lr
        teacher = w if method in ("fedlsd", "fedntd") else ema
        if options.get("bias_corrected"):
            scale = 1 - options["alpha"] ** (t - 1)
            teacher = {name: e / scale for name, e in ema.items()} if t > 1 else None
        steps = {k: batches(t, k) for k in cohort}
        trained = {}
        sgd = {"lr": eta, "momentum": momentum, "weight_decay": weight_decay, "clip": clip}
        for k in cohort:
            context = {"teacher": teacher, "dual": duals[k], "prior": prior, **options, **sgd}
            context["counts"] = clients[k][1].bincount(minlength=len(w["classifier.bias"]))
            context["correction"] = plus(control, controls[k], -1)  # zero but for SCAFFOLD
            trained[k] = local_update(method, w, clients[k], steps[k], **context)

        counts = [1 if uniform else len(clients[k][1]) for k in cohort]
        weights = [n / sum(counts) for n in counts]
        results = [trained[k] for k in cohort]
        new = aggregate(results, counts)
        if server is not None:
            new, state = server_step(w, new, state, **server)
        if method == "scaffold":
            a = {k: effective_steps(momentum, eta, len(steps[k])) for k in cohort}
            old = control
            for k in cohort:
                fresh = plus(plus(controls[k], old, -1), plus(w, trained[k], -1), 1 / a[k])
                control = plus(control, plus(fresh, controls[k], -1), 1 / total)
                controls[k] = fresh
        elif method in ("feddyn", "fedgmt"):
            for k in cohort:
                duals[k] = plus(duals[k], plus(trained[k], w, -1))
            for dual in duals.values() if options["server_term"] else ():
                new = plus(new, dual, 1 / total)
        elif method == "fednova":
            a = {k: nova_normaliser(len(steps[k]), momentum, eta, options["mu"]) for k in cohort}
            new = nova_step(w, results, weights, [a[k] for k in cohort])
        elif method == "fedexp":
            step = exp_step([plus(theta, w, -1) for theta in results], weights, options["eps"])
            new = plus(w, plus(new, w, -1), step)
        if method == "fedgmt":
            alpha = options["alpha"]
            ema = {name: alpha * ema[name] + (1 - alpha) * new[name] for name in w}
        w = new
        models.append(w)
    return {"models": models}
