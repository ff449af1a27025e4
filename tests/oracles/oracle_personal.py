"""Reference rounds, functional torch, float64, of clients that keep a part of the net.

FedPer and FedBN ("fedavg" with personal names), FedRep, FedBABU, Ditto, FedGKD, SCAFFOLD. Written
from ``METHODS.md``, ``FACTS.md`` and the FedGKD paper alone; nothing is imported from the package,
so that agreement means something. Gradients come from autograd; everything around them is spelt
out.

Letters: Π is the set of personal names, w the server's model, θ what a client trains, v_k Ditto's
second model of client k, c and c_k SCAFFOLD's control variates, N the number of all clients.

What the sources leave open, and what is done here:

- The cohort's mean is n_k-weighted, as everywhere else; published FedBN and FedBABU: uniform.
- A client's Π, or v_k, is w_0's when it first takes part, whenever that is; not w_t's.
- What ends a run is not here: FedRep's last round (all clients train Π), FedBABU's fine-tuning.
- Clipping looks at the whole gradient that the step uses: Ditto's λ(v - w_t) and SCAFFOLD's
  c - c_k are in it, SCAFFOLD's personal names count in the norm; names that do not move in this
  step do not (a half of FedRep, the frozen).
- FedRep: head before body, an optimizer each, as if they were two trainings. The published code has
  one optimizer for both; which half it moves by stale momentum depends on torch's version.
- Ditto: v_k and w meet only in w_t, which is constant, so "first v, then w, on the same batch" and
  all steps of v before all of w are the same numbers as long as `forward` is a pure function. Its
  personal part is v_k, so it takes no other Π.
- FedGKD: the teacher wears the Π that the client began the round with, constant in that round; for
  a client's first round that is w_0's, untrained, also when the shared part has been taught for
  long. Nobody has a teacher in round 1; while there are fewer than M means, it is of those.
- SCAFFOLD: K', for the client's own number of steps; uses the c of the round's start for all.
- Every tensor is a parameter: a BatchNorm may train on batch statistics in `forward`, its running
  statistics and count are not kept here.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.oracle_methods import (
    Data,
    Model,
    Optimizer,
    aggregate,
    complete,
    copied,
    gradients,
    leaves_of,
)
from tests.oracles.oracle_methods import forward as mlp
from tests.oracles.oracle_more import effective_steps, kl, plus, zeros

Objective = Callable[[Model, Tensor, Tensor], Tensor]  # (θ, x, y) → scalar
Extra = Callable[[Model], Model]  # θ → what is added to the gradient, of some names

# The settings of each method, with the sources' value; None: has to be given.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedrep": {"head_steps": None},
    "fedbabu": {},
    "ditto": {"lam": 1.0},
    "fedgkd": {"gamma": 0.2, "buffer_size": 1},
    "scaffold": {},
}


def part(w: Model, names: Collection[str]) -> Model:
    """Return the named tensors, in the order of w."""
    return {name: value for name, value in w.items() if name in names}


def logits_of(w: Model, x: Tensor) -> Tensor:
    """Return the logits of the MLP of `oracle_methods`."""
    return mlp(w, x)[1]


def objective_of(
    forward: Callable[[Model, Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    teacher: Model | None = None,
    gamma: float = 0.0,
) -> Objective:
    """Return F, plus (γ/2)·KL(p_teacher ‖ p_θ), mean over the batch, if there is a teacher."""

    def objective(theta: Model, x: Tensor, y: Tensor) -> Tensor:
        logits = forward(theta, x)
        if teacher is None:
            return loss(logits, y)
        with torch.no_grad():
            target = forward(teacher, x)
        return loss(logits, y) + gamma / 2 * kl(target, logits)

    return objective


def train(
    start: Model,
    data: Data,
    batches: Sequence[Tensor],
    objective: Objective,
    *,
    moving: Collection[str],
    sgd: tuple[float, float | None, float],
    extra: Extra | None = None,
) -> Model:
    """Return the model after one step per batch from a new optimizer; start is left unchanged.

    Only the moving names have gradients. g ← ∇objective + extra(θ), then clip, velocity and step
    of `Optimizer`; sgd: its lr, clip, momentum.
    """
    theta, by = start, Optimizer("sgd", *sgd)
    for batch in batches if moving else ():
        own = part(theta, moving)
        leaves = leaves_of(own)
        grads = gradients(objective(theta | leaves, data[0][batch], data[1][batch]), leaves)
        added = extra(theta) if extra else {}
        grads = {name: g + added[name] if name in added else g for name, g in grads.items()}
        theta = theta | by.step(own, grads)
    return theta


def toward(anchor: Model, lam: float) -> Extra:
    """Return θ → λ(θ - anchor), the gradient of (λ/2)‖θ - anchor‖²."""
    return lambda theta: {name: lam * (theta[name] - anchor[name]) for name in theta}


def constant(shift: Model) -> Extra:
    """Return θ → shift."""
    return lambda _: shift


def checked(w0: Model, method: str, personal: Collection[str], frozen: Collection[str]) -> None:
    """Raise on names that are nowhere or in two places, and on Ditto with a Π."""
    foreign, both = {*personal, *frozen} - w0.keys(), {*personal} & {*frozen}
    if foreign or both:
        raise ValueError(f"no such names: {sorted(foreign)}; personal and frozen: {sorted(both)}")
    if method == "ditto" and personal:
        raise ValueError("Ditto's personal part is v_k; it takes no personal names")


def run(
    method: str,
    w0: Model,
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    batches: Callable[[int, int], Sequence[Tensor]],
    lr: float,
    momentum: float = 0.0,
    clip: float | None = None,
    personal: Collection[str] = (),
    frozen: Collection[str] = (),
    forward: Callable[[Model, Tensor], Tensor] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **settings: Any,
) -> dict[str, Any]:
    """Run whole rounds of one method; its settings and their defaults are in `SETTINGS`.

    Names are personal (Π), frozen, or shared: sent, trained, sent back and averaged with n_k.

    - "fedavg": Π and the shared are trained together. FedPer: Π is the classifier, FedBN: norms.
    - "fedrep": the first head_steps batches move Π alone, the others the shared alone, each with
      its own new optimizer. head_steps: a number, or (round, client) → number.
    - "fedbabu": "fedavg"; frozen is the classifier.
    - "ditto": beside "fedavg" without Π, on the same batches, v_k moves by
      ∇F(v_k) + λ(v_k - w_t), w_t the model sent; v_k = w_0 at first.
    - "fedgkd": F + (γ/2)·KL(teacher ‖ θ); the teacher is the mean of the shared parts of the last
      buffer_size aggregated models (w_0 is none) with the client's own Π of the round's start.
    - "scaffold": of the shared names, g ← g - c_k + c, c_k⁺ = c_k - c + (w_t - θ_k)/(η·K'),
      c += Σ_S (c_k⁺ - c_k)/N; the personal ones move by plain g.

    Args:
        method: One of the names above.
        w0: The initial model, all names; left unchanged.
        clients: (x, y) of every client; n_k is the length of y.
        cohorts: Ids of the clients that take part, one list per round.
        batches: (round from 1, client id) → index tensors, one step each, all local epochs.
        lr, momentum, clip: Of the local SGD, see `Optimizer`; new for every client and round.
        personal: The names in Π.
        frozen: Names that never move and are w_0's everywhere, in all methods.
        forward: (model, x) → logits, a pure function; without it `logits_of`.
        loss: F, of (logits, y).
        **settings: The method's own.

    Returns:
        One entry per round in each: "models" (the server's whole model; Π and the frozen are
        w_0's), "personal" (client → its Π, in "ditto" its whole v_k; of clients seen so far).

    """
    checked(w0, method, personal, frozen)
    options = complete(SETTINGS[method], settings)
    if missing := [name for name, value in options.items() if value is None]:
        raise TypeError(f"these settings have to be given: {missing}")
    w = w_0 = copied(w0)
    moving = [name for name in w if name not in frozen]
    shared = [name for name in moving if name not in personal]
    plain = objective_of(forward or logits_of, loss)
    fit = partial(train, sgd=(lr, clip, momentum))
    own: dict[int, Model] = {}
    means: list[Model] = []
    control = zeros(part(w, shared))
    controls = dict.fromkeys(range(len(clients)), control)
    out: dict[str, Any] = {"models": [], "personal": []}

    for t, cohort in enumerate(cohorts, start=1):
        sent, begun = part(w, shared), control
        trained = {}
        for k in cohort:
            data, steps = clients[k], batches(t, k)
            if method == "ditto":
                theta = fit(w, data, steps, plain, moving=moving)
                pull = toward(w, options["lam"])
                own[k] = fit(own.get(k, w_0), data, steps, plain, moving=moving, extra=pull)
                trained[k] = part(theta, shared)
                continue

            received = w | own.get(k, {})  # w has w_0's Π, which is what a new client gets
            if method == "fedrep":
                head = options["head_steps"]
                head = head(t, k) if callable(head) else head
                theta = fit(received, data, steps[:head], plain, moving=personal)
                theta = fit(theta, data, steps[head:], plain, moving=shared)
            elif method == "scaffold":
                shift = plus(begun, controls[k], -1)
                theta = fit(received, data, steps, plain, moving=moving, extra=constant(shift))
                scale = 1 / effective_steps(momentum, lr, len(steps))
                new = plus(plus(controls[k], begun, -1), plus(sent, theta, -1), scale)
                control = plus(control, plus(new, controls[k], -1), 1 / len(clients))
                controls[k] = new
            elif method == "fedgkd" and means:
                last = means[-options["buffer_size"] :]
                teacher = received | aggregate(last, [1] * len(last))
                taught = objective_of(forward or logits_of, loss, teacher, options["gamma"])
                theta = fit(received, data, steps, taught, moving=moving)
            else:
                theta = fit(received, data, steps, plain, moving=moving)
            own[k], trained[k] = part(theta, personal), part(theta, shared)

        counts = [len(clients[k][1]) for k in cohort]
        means.append(aggregate([trained[k] for k in cohort], counts))
        w = w | means[-1]
        out["models"].append(w)
        out["personal"].append(dict(own))
    return out
