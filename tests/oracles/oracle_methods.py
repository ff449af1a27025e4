"""Reference federated rounds in functional torch, float64: FedProx, FedGKD, Vote, MOON, FedDistill.

Written from the paper's equations and from ``FACTS.md`` alone; nothing is imported from the
package, so that agreement means something. FedGKD+ is "fedgkd" on a net with a projection head.

The net is an MLP, a dict of tensors under the names of its ``state_dict``::

    features.1     Linear(d, h), ReLU
    features.3.0   Linear(h, h), ReLU      } the projection head,
    features.3.2   Linear(h, p)            } present or not
    classifier     Linear(h or p, classes)

Gradients come from autograd; everything around them (SGD, averages, buffers, reports) is spelt out.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BETA_1, BETA_2, ADAM_EPS = 0.9, 0.999, 1e-8
Model = dict[str, Tensor]
Data = tuple[Tensor, Tensor]  # x (n, ...), y (n,) integer labels
Report = tuple[Tensor, Tensor]  # per-label mean logits (classes, classes), held labels (classes,)


class Optimizer:
    """SGD or Adam, as torch has them, behind a clip; a new one for a new state.

    The gradient of all tensors together is multiplied by min(1, clip / (norm + 1e-6)), then
    weight_decay · w is added. SGD: v ← momentum · v + g, the first v being g; w ← w - lr · v. Adam:
    w ← w - lr · m̂ / (√v̂ + ε), with the moments m̂, v̂ corrected for their start at zero.
    """

    def __init__(self, kind: str, lr: float, clip: float | None, rho: float = 0, wd: float = 0):
        self.kind, self.lr, self.clip, self.momentum, self.weight_decay = kind, lr, clip, rho, wd
        self.steps, self.m, self.v = 0, Model(), Model()

    def step(self, w: Model, grads: Model) -> Model:
        self.steps += 1
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        factor = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        new = Model()
        for name, value in w.items():
            g = factor * grads[name] + self.weight_decay * value
            if self.kind == "sgd":
                self.v[name] = g if self.steps == 1 else self.momentum * self.v[name] + g
                new[name] = value - self.lr * self.v[name]
                continue
            self.m[name] = BETA_1 * self.m.get(name, 0 * g) + (1 - BETA_1) * g
            self.v[name] = BETA_2 * self.v.get(name, 0 * g) + (1 - BETA_2) * g**2
            m_hat = self.m[name] / (1 - BETA_1**self.steps)
            v_hat = self.v[name] / (1 - BETA_2**self.steps)
            new[name] = value - self.lr * m_hat / (v_hat.sqrt() + ADAM_EPS)
        return new


def leaves_of(w: Model) -> Model:
    """Return copies that gradients are taken of."""
    return {name: value.detach().clone().requires_grad_() for name, value in w.items()}


def gradients(loss: Tensor, leaves: Model) -> Model:
    """Return ∂loss/∂leaves, zero for those that the loss does not depend on."""
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def copied(w: Model) -> Model:
    """Return the state in float64, detached."""
    return {name: value.detach().clone().double() for name, value in w.items()}


def complete(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, complete; raise on foreign ones."""
    if foreign := given.keys() - defaults.keys():
        raise TypeError(f"no such settings: {sorted(foreign)}")
    return defaults | given


def _linear(w: Model, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def forward(w: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (z, logits); z is what the classifier sees: the projection's output if there is one.

    Args:
        w: The net.
        x: Inputs, flattened to (batch, d).

    """
    z = _linear(w, "features.1", x.flatten(1)).relu()
    if "features.3.0.weight" in w:
        z = _linear(w, "features.3.2", _linear(w, "features.3.0", z).relu())
    return z, _linear(w, "classifier", z)


def _constant(w: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `forward` of a model that is not being trained."""
    with torch.no_grad():
        return forward(w, x)


def _kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(softmax(teacher) ‖ softmax(student)) of every row, temperature 1."""
    log_p, log_q = teacher.log_softmax(1), student.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _proximal(w: Model, start: Model, mu: float) -> Tensor:
    """Return (μ/2)‖w - w_t‖²; every tensor of the net is a parameter."""
    return mu / 2 * sum(((w[name] - start[name].detach()) ** 2).sum() for name in w)


def _contrast(
    z: Tensor, x: Tensor, start: Model, previous: Model | None, mu: float, tau: float
) -> Tensor:
    """Return μ times MOON's term, mean over the batch: z(w_t) is positive, z(w_prev) negative."""
    if previous is None:
        return z.new_zeros(())
    positive = F.cosine_similarity(z, _constant(start, x)[0], dim=1) / tau
    negative = F.cosine_similarity(z, _constant(previous, x)[0], dim=1) / tau
    # -log(e^p / (e^p + e^n))
    return mu * (torch.logaddexp(positive, negative) - positive).mean()


def _toward_labels(
    logits: Tensor, y: Tensor, targets: Tensor, known: Tensor, coefficient: float
) -> Tensor:
    """Return FedDistill's term; see `local_loss`."""
    rows = known[y]
    distance = _kl(targets.detach()[y[rows]], logits[rows])
    return coefficient * distance.sum() / len(y)


def local_loss(method: str, w: Model, x: Tensor, y: Tensor, **context: Any) -> Tensor:
    """Return the loss of one batch, differentiable in w only: mean cross-entropy plus one term.

    - "fedavg": none.
    - "fedprox": (μ/2)‖w - w_t‖². Context: start (w_t), mu.
    - "fedgkd": (γ/2)·KL(p_teacher ‖ p_w), mean over the rows. Context: teacher (or None: no term),
      gamma.
    - "vote": Σ_m (γ_m/2)·KL(p_m ‖ p_w), mean over the rows. Context: teachers (newest last, may be
      empty), coefficients (the γ_m/2, same order).
    - "moon": -μ·log(e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})), mean
      over the rows. Context: start (w_t, the positive), previous (or None: no term), mu, tau.
    - "distill", "distill+": coefficient · KL(softmax(target of the row's label) ‖ p_w). The sources
      do not name the distance; this is the paper's KD distance, at temperature 1. Only rows whose
      label is known enter, and their sum is divided by the full batch size. Context: targets
      (classes x classes, row = the other clients' average logits for that label), known (bool per
      label), coefficient.

    Args:
        method: One of the names above.
        w: The net being trained.
        x: Inputs of the batch.
        y: Integer labels of the batch.
        **context: What the method needs, as above.

    """
    z, logits = forward(w, x)
    loss = F.cross_entropy(logits, y)
    if method == "fedavg":
        return loss
    if method == "fedprox":
        return loss + _proximal(w, context["start"], context["mu"])
    if method == "fedgkd":
        if context["teacher"] is None:
            return loss
        kl = _kl(_constant(context["teacher"], x)[1], logits).mean()
        return loss + context["gamma"] / 2 * kl
    if method == "vote":
        for teacher, factor in zip(context["teachers"], context["coefficients"], strict=True):
            loss = loss + factor * _kl(_constant(teacher, x)[1], logits).mean()
        return loss
    if method == "moon":
        return loss + _contrast(z, x, **context)
    assert method in ("distill", "distill+")
    return loss + _toward_labels(logits, y, **context)


def vote_coefficients(losses: Sequence[float], capacity: int, lam: float) -> list[float]:
    """Return γ_m/2 = λ·softmax_m(-L_m/β) with β = 1/capacity, in the order of the losses.

    Args:
        losses: Validation losses of the models in the buffer, which may not be full yet.
        capacity: M, how many models the buffer can hold.
        lam: λ, the sum of the coefficients.

    """
    scores = -capacity * torch.tensor([float(loss) for loss in losses], dtype=torch.float64)
    return (lam * scores.softmax(0)).tolist()


def aggregate(models: Sequence[Model], counts: Sequence[int]) -> Model:
    """Return Σ_k (n_k / n) w_k with n = Σ n_k over the models given."""
    n = sum(counts)
    return {
        name: sum(n_k / n * w_k[name] for w_k, n_k in zip(models, counts, strict=True))
        for name in models[0]
    }


def local_update(
    method: str,
    w: Model,
    data: Data,
    batches: Sequence[Tensor],
    *,
    lr: float,
    momentum: float,
    **context: Any,
) -> tuple[Model, Report]:
    """Train one client for one round from a fresh optimizer.

    Args:
        method: See `local_loss`.
        w: The net to start from; left unchanged.
        data: The client's (x, y).
        batches: Index tensors, one SGD step each.
        lr: Learning rate: w ← w - lr · v.
        momentum: v ← momentum · v + g, the first v being g.
        **context: See `local_loss`.

    Returns:
        The trained net, and FedDistill's report: for every label the mean over all samples seen of
        the logits from before that sample's step (a sample seen in two epochs counts twice), and
        which labels were seen. Rows of unseen labels are zero.

    """
    classes = len(w["classifier.bias"])
    sums = torch.zeros(classes, classes, dtype=torch.float64)
    seen = torch.zeros(classes, dtype=torch.float64)
    sgd = Optimizer("sgd", lr, None, momentum)
    for batch in batches:
        x, y = data[0][batch], data[1][batch]
        for label, row in zip(y.tolist(), _constant(w, x)[1], strict=True):
            sums[label] += row
            seen[label] += 1

        leaves = leaves_of(w)
        w = sgd.step(w, gradients(local_loss(method, leaves, x, y, **context), leaves))
    return w, (sums / seen.clamp(min=1)[:, None], seen > 0)


def others_targets(reports: dict[int, Report], client: int, classes: int) -> Report:
    """Return FedDistill's (targets, known) for one client.

    Per label, the plain mean over the other clients whose newest report holds it.

    Args:
        reports: Newest report of every client that has sent one.
        client: The client that is about to train; its own report is left out.
        classes: Number of labels.

    """
    targets = torch.zeros(classes, classes, dtype=torch.float64)
    known = torch.zeros(classes, dtype=torch.bool)
    for label in range(classes):
        rows = [means[label] for k, (means, held) in reports.items() if k != client and held[label]]
        if rows:
            targets[label] = sum(rows) / len(rows)
            known[label] = True
    return targets, known


def run(
    method: str,
    w0: Model,
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    batches: Callable[[int, int], Sequence[Tensor]],
    lr: float,
    momentum: float = 0.0,
    val: Data | None = None,
    buffer_size: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Run whole rounds of one method.

    What clients of the same round learn about each other reaches nobody before the next round.

    - "fedgkd", "vote": the buffer holds the last buffer_size aggregated models, w_0 not among them,
      so round 1 is FedAvg. FedGKD's teacher is their plain mean.
    - "moon": a client's negative is its own model at the end of its last participation.
    - "distill+": reports of earlier rounds give the targets. A client's newest report replaces its
      older one whole: a label it did not see this time is no longer held. A client's own report,
      however old, never counts for itself.
    - "distill": the same, but every client trains on from its own model (w_0 at first) and nothing
      is aggregated; "models" are then n_k-weighted means of the cohort's own models after the
      round, for evaluation only.

    Args:
        method: "fedavg", "fedprox", "fedgkd", "vote", "moon", "distill" or "distill+".
        w0: The initial global model; left unchanged.
        clients: (x, y) of every client; n_k is the length of y.
        cohorts: Ids of the clients that take part, one list per round.
        batches: (round from 1, client id) → index tensors of the local steps.
        lr: Learning rate.
        momentum: SGD's momentum, from zero for every client and round.
        val: The server's (x, y), for "vote".
        buffer_size: M, for "fedgkd" and "vote".
        **settings: The method's own, see `local_loss` and `vote_coefficients`.

    Returns:
        "models": the global model after each round.

    """
    w = copied(w0)
    classes = len(w["classifier.bias"])
    own: dict[int, Model] = dict.fromkeys(range(len(clients)), w) if method == "distill" else {}
    reports: dict[int, Report] = {}
    models: list[Model] = []

    for t, cohort in enumerate(cohorts, start=1):
        buffer = models[-buffer_size:]
        factors: list[float] = []
        if method == "vote":
            losses = [float(F.cross_entropy(_constant(m, val[0])[1], val[1])) for m in buffer]
            factors = vote_coefficients(losses, buffer_size, **settings)

        trained: dict[int, Model] = {}
        sent: dict[int, Report] = {}
        for k in cohort:
            start = own[k] if method == "distill" else w
            context: dict[str, Any] = {}
            if method == "fedprox":
                context = {"start": w, **settings}
            elif method == "fedgkd":
                teacher = aggregate(buffer, [1] * len(buffer)) if buffer else None
                context = {"teacher": teacher, **settings}
            elif method == "vote":
                context = {"teachers": buffer, "coefficients": factors}
            elif method == "moon":
                context = {"start": w, "previous": own.get(k), **settings}
            elif method in ("distill", "distill+"):
                targets, known = others_targets(reports, k, classes)
                context = {"targets": targets, "known": known, **settings}
            trained[k], sent[k] = local_update(
                method, start, clients[k], batches(t, k), lr=lr, momentum=momentum, **context
            )

        own |= trained
        reports |= sent
        w = aggregate([trained[k] for k in cohort], [len(clients[k][1]) for k in cohort])
        models.append(w)

    return {"models": models}
