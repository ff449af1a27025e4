"""Reference rounds, functional torch, float64, of clients with different nets: FedMD, FedDF.

Written from ``METHODS.md``, ``FACTS.md`` and the design of issue 20 alone; nothing is imported from
the package, so that agreement means something. A net is any function (state, x) → logits; gradients
come from autograd, everything around them (optimizers, means, choice, bytes) is spelt out.

What the sources leave open, and what is done here:

FedMD (Li & Wang 2019), of which T rounds are T + 1 of ours.

- d_t is given (`rows`), not drawn.
- A client's first round, whenever it is: public start, private start, nothing digested, even if
  there is a consensus. Adam is new between the two starts. The private optimizer goes on in all
  later rounds of the client, the digest's Adam too; neither sees the other's steps.
- The consensus of round t is the plain mean over the clients of round t, whatever they have seen.
  Who was not there still digests it in round t + 1. After a round without any answer there is none.
- The L2 term is decay · ΣW² (no half), of the last layer's weight without its bias, in digest only.
- |z - target| has gradient 0 where it is 0. A target that *is* the own output up to rounding (a
  cohort of one client, or equal parties) makes that the sign of a rounding error, and Adam makes it
  a whole step: whole rounds can be compared only where two clients that differ teach.
- Bytes: rows · classes · itemsize (4, whatever the precision); the rows' numbers come from the seed
  and cost nothing. Down: in every round with a consensus, to each client of the cohort, also to one
  that does not digest it. The start's public data is not counted.
- The ensemble is of all parties that have trained so far, not of the cohort; of all, if none has.

FedDF with prototypes (Lin et al. 2020).

- A client gets the model of its architecture; its optimizer is new in every round.
- Students are distilled one after the other, each from its group's mean, by a new Adam, with the
  cosine over all `steps` (not over those made). Teachers are the models as they came from the
  clients, one vote per client, not per architecture. Teachers are answered on all public rows.
- weighted: n_k within the group, in the mean of models only; the logits' mean is uniform always.
- Evaluations (every validate_every steps, of this student alone) choose by accuracy, the first of
  equals; the start is no candidate. Training ends at the first evaluation that lies `patience` or
  more steps behind the best. Without any evaluation the final student is kept.
- A cohort of one is its own teacher: KL and gradient are rounding errors, which Adam (gain lr/ε)
  lets grow by orders of magnitude a step. "One client = its own model" holds for a step or two.
- Bytes: elements of the client's own architecture · itemsize, each way.

Every tensor of a state is a parameter: no buffers, no dropout. Train and eval mode are then alike.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
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
from tests.oracles.oracle_server import ce, kl, mixed_logits, take

Loss = Callable[[Tensor, Tensor, Model], Tensor]  # (target, logits, the trained state) → scalar

# The settings of each method, with their defaults.
FEDMD: dict[str, Any] = {"public_lr": 1e-3, "distil_lr": 1e-3, "digest_decay": 1e-3}
FEDMD |= {"itemsize": 4}
FEDDF: dict[str, Any] = {"steps": 10_000, "distil_lr": 1e-3, "distil_clip": 5.0, "tau": 1.0}
FEDDF |= {"validate_every": 100, "patience": 1000, "weighted": False, "itemsize": 4}
LOCAL: dict[str, Any] = {"optimizer": "adam", "lr": 1e-3, "momentum": 0.0}

# METHODS.md's numbers: two parties' logits, their mean, MAE of the first from it, its gradient.
FEDMD_LOGITS = ((2.0, 0.0, -1.0), (0.0, 4.0, 1.0))
FEDMD_MEAN, FEDMD_MAE = (1.0, 2.0, 0.0), 4 / 3
FEDMD_GRADIENT = (1 / 3, -1 / 3, -1 / 3)
# Three parties of which the logits' mean picks class 0, the probabilities' mean class 1.
FEDMD_VOTES, FEDMD_PROBABILITIES = ((10.0, 0.0), (-4.0, 0.0), (-4.0, 0.0)), (0.345, 0.655)


class Net(NamedTuple):
    """An architecture.

    Attributes:
        forward: (state, x) → logits.
        last: name of the last Linear layer's weight in the state, for FedMD's L2 term.

    """

    forward: Callable[[Model, Tensor], Tensor]
    last: str = ""


def mlp(*layers: str) -> Net:
    """Return an MLP of Linear layers of those names, ReLU between them, inputs flattened."""

    def forward(w: Model, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i, name in enumerate(layers):
            x = (x.relu() if i else x) @ w[f"{name}.weight"].T
            x = x + w[f"{name}.bias"] if f"{name}.bias" in w else x
        return x

    return Net(forward, f"{layers[-1]}.weight")


def logits_of(net: Net, w: Model, x: Tensor) -> Tensor:
    """Return the logits of a model that is not being trained."""
    with torch.no_grad():
        return net.forward(w, x)


def accuracy(net: Net, w: Model, data: Data) -> float:
    """Return the share of rows whose largest logit is their label's."""
    hits = logits_of(net, w, data[0].double()).argmax(1) == data[1]
    return int(hits.sum()) / len(data[1])


def train(
    net: Net, w: Model, x: Tensor, target: Tensor, batches: Iterable[Tensor], loss: Loss, by: Any
) -> Model:
    """Return w after one step per batch."""
    for batch in batches:
        leaves = leaves_of(w)
        value = loss(target[batch], net.forward(leaves, x[batch]), leaves)
        w = by.step(w, gradients(value, leaves))
    return w


def mae(target: Tensor, logits: Tensor) -> Tensor:
    """Return FedMD's distance: |logits - target|, mean over rows and classes."""
    return (logits - target).abs().sum() / logits.numel()


def private_loss(target: Tensor, logits: Tensor, w: Model) -> Tensor:
    """Return the mean cross-entropy, of the private and of the public start training."""
    return ce(target, logits)


def digest_loss(last: str, decay: float, target: Tensor, logits: Tensor, w: Model) -> Tensor:
    """Return MAE + decay · ΣW², W the last layer's weight."""
    return mae(target, logits) + decay * (w[last] ** 2).sum()


def private_optimizer(o: dict[str, Any]) -> Optimizer:
    """Return a new optimizer of the clients' own data."""
    return Optimizer(o["optimizer"], o["lr"], None, o["momentum"])


def run_fedmd(
    nets: Sequence[Net],
    w0: Sequence[Model],
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    public: Tensor,
    labels: Tensor | None,
    rows: Callable[[int], Tensor],
    batches: Callable[[int, int, str], Iterable[Tensor]],
    nets_of: Sequence[int] | None = None,
    **settings: Any,
) -> dict[str, list[Any]]:
    """Run whole rounds of FedMD.

    Args:
        nets: The architectures; client k has nets[k % len(nets)], or as nets_of says.
        w0: The initial state of every client; left unchanged.
        clients: (x, y) of every client.
        cohorts: Ids of the clients that take part, one list per round.
        public: All public inputs.
        labels: Their labels, for the public start; None if there are none (no public batches then).
        rows: Round from 1 → the numbers of d_t among the public inputs.
        batches: (round from 1, client, phase) → index tensors, one step each. In a client's first
            round "public" (of public inputs), then "start" (of its own data); in later ones
            "digest" (of *positions* in d_{t-1}, if there is a consensus), then "revisit" (own).
        nets_of: Number of every client's architecture.
        **settings: Of `FEDMD` and `LOCAL`.

    Returns:
        One entry per round in each: "models" (every client's state, a list), "trained" (those that
        have trained so far), "consensus" (the mean of their logits: what the next round digests),
        "mae" (client → distance from the consensus on all of d_{t-1}, before digesting it),
        "optimizers" (client → "private", "digest" → (steps, m, v)), "bytes_up", "bytes_down"
        (client → bytes).

    """
    o = complete(FEDMD | LOCAL, settings)
    kinds = [k % len(nets) for k in range(len(clients))] if nets_of is None else nets_of
    net_of = [nets[kind] for kind in kinds]
    models, x_public = [copied(w) for w in w0], public.double()
    kept: dict[int, dict[str, Optimizer]] = {}  # of clients that have trained
    consensus: Tensor | None = None
    d: Tensor | None = None  # rows of the consensus
    out: dict[str, list[Any]] = defaultdict(list)

    for t, cohort in enumerate(cohorts, start=1):
        now, logits = rows(t), {}
        before, bytes_down = {}, dict.fromkeys(cohort, 0)
        for k in cohort:
            net, x, y = net_of[k], clients[k][0].double(), clients[k][1]
            phases: list[tuple[str, Tensor, Tensor, Loss, Optimizer]] = []
            if consensus is not None:
                bytes_down[k] = consensus.numel() * o["itemsize"]
            if k not in kept:
                kept[k] = {"private": private_optimizer(o)}
                kept[k]["digest"] = Optimizer("adam", o["distil_lr"], None)
                if labels is not None:
                    adam = Optimizer("adam", o["public_lr"], None)
                    phases.append(("public", x_public, labels, private_loss, adam))
                phases.append(("start", x, y, private_loss, kept[k]["private"]))
            else:
                if consensus is not None:
                    x_d, loss = x_public[d], partial(digest_loss, net.last, o["digest_decay"])
                    before[k] = mae(consensus, logits_of(net, models[k], x_d)).item()
                    phases.append(("digest", x_d, consensus, loss, kept[k]["digest"]))
                phases.append(("revisit", x, y, private_loss, kept[k]["private"]))
            for name, inputs, target, loss, by in phases:
                steps = batches(t, k, name)
                models[k] = train(net, models[k], inputs, target, steps, loss, by)
            logits[k] = logits_of(net, models[k], x_public[now])
        consensus, d = mixed_logits(list(logits.values())), now
        moments = {
            k: {name: (by.steps, dict(by.m), dict(by.v)) for name, by in own.items()}
            for k, own in kept.items()
        }
        row = {"models": list(models), "trained": sorted(kept), "mae": before}
        row |= {"consensus": consensus}
        row |= {"optimizers": moments, "bytes_down": bytes_down}
        row |= {"bytes_up": {k: z.numel() * o["itemsize"] for k, z in logits.items()}}
        for name, value in row.items():
            out[name].append(value)
    return dict(out)


def distil(
    net: Net, w: Model, x: Tensor, target: Tensor, batches: Any, val: Data, o: Any
) -> tuple[Model, int]:
    """Train one student of FedDF; return it and the steps made."""
    adam, made = Optimizer("adam", o["distil_lr"], o["distil_clip"]), 0
    candidates: list[tuple[int, float, Model]] = []

    def loss(target: Tensor, logits: Tensor, w: Model) -> Tensor:
        return kl(target, logits, o["tau"])

    for made, batch in enumerate(take(batches, o["steps"]), start=1):
        adam.lr = o["distil_lr"] / 2 * (1 + math.cos(math.pi * (made - 1) / o["steps"]))
        w = train(net, w, x, target, [batch], loss, adam)
        if made % o["validate_every"]:
            continue
        candidates.append((made, accuracy(net, w, val), w))
        best = max(candidates, key=lambda each: each[1])  # the first of equals
        if made - best[0] >= o["patience"]:
            break
    return (best[2] if candidates else w), made


def run_feddf(
    nets: Sequence[Net],
    w0: Sequence[Model],
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    public: Tensor,
    batches: Callable[[int, int], Iterable[Tensor]],
    public_batches: Callable[[int, int], Iterable[Tensor]],
    val: Data,
    nets_of: Sequence[int] | None = None,
    **settings: Any,
) -> dict[str, list[Any]]:
    """Run whole rounds of FedDF with prototypes.

    Args:
        nets, clients, cohorts, nets_of: As of `run_fedmd`.
        w0: The initial state of every *architecture*; left unchanged.
        public: Public inputs.
        batches: (round from 1, client) → index tensors of its steps, of its own data.
        public_batches: (round from 1, architecture) → index tensors of its student's steps.
        val: (x, y) of the server.
        **settings: Of `FEDDF` and `LOCAL`.

    Returns:
        One entry per round in each: "models" (every architecture's, a list), "trained"
        (architectures that have been in a cohort so far), and by architecture present: "means"
        (students before distillation), "steps"; "bytes_up", "bytes_down" (client → bytes).

    """
    o = complete(FEDDF | LOCAL, settings)
    kinds = [k % len(nets) for k in range(len(clients))] if nets_of is None else list(nets_of)
    models, x_public = [copied(w) for w in w0], public.double()
    seen: set[int] = set()
    out: dict[str, list[Any]] = defaultdict(list)

    for t, cohort in enumerate(cohorts, start=1):
        local = {}
        for k in cohort:
            x, y = clients[k][0].double(), clients[k][1]
            by, own = private_optimizer(o), nets[kinds[k]]
            local[k] = train(own, models[kinds[k]], x, y, batches(t, k), private_loss, by)
        target = mixed_logits([logits_of(nets[kinds[k]], local[k], x_public) for k in cohort])
        means, steps = {}, {}
        for kind in sorted({kinds[k] for k in cohort}):
            group = [k for k in cohort if kinds[k] == kind]
            counts = [len(clients[k][1]) if o["weighted"] else 1 for k in group]
            means[kind] = aggregate([local[k] for k in group], counts)
            models[kind], steps[kind] = distil(
                nets[kind], means[kind], x_public, target, public_batches(t, kind), val, o
            )
            seen.add(kind)
        sizes = {k: o["itemsize"] * sum(v.numel() for v in local[k].values()) for k in cohort}
        row = {"models": list(models), "trained": sorted(seen), "means": means, "steps": steps}
        for name, value in (row | {"bytes_up": sizes, "bytes_down": sizes}).items():
            out[name].append(value)
    return dict(out)
