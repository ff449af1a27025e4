"""Reference rounds of FedWeIT (Yoon et al., ICML 2021) on sequences of tasks, in float64 torch.

Written from ``METHODS.md`` and the design of issue 20; facts that they leave open (when θ_old is
taken, whose B is evaluated, what becomes of channels nobody sends) were looked up in the authors'
published code. Nothing is imported from the package, so that agreement means something. The net is
any function (state, x) → logits of all classes.
Gradients come from autograd; composition, loss, masks, optimizer and rounds are spelt out.

    θ_t = B ⊙ σ(m_t) + A_t + Σ_j a_tj KB_tj        for every layer that is decomposed
    L   = CE + λ1 Σ_{i≤t} |A_i| + λ1 |m_t| + λ2 Σ_{i<t} ‖B ⊙ σ(m_i) + A_i - θ_i_old‖²

The output channel comes first, as in torch; the vectors of METHODS.md, which have it last, are
transposed below. "Position" is a client's place in its own order of tasks, from 0.

What the sources leave open, and what is done here (defaults; the published code's way is a setting
where it has a name below):

- λ2's term has no half (paper).
- The penalty is on A of the current and of all old tasks, and on m of the current one, by λ1 too.
  Sums, not means. None on a, biases or head.
- A of old tasks is trained (paper: A_1:t). m, a, KB, biases and head of old tasks never change.
  σ(m_t) is inside the gradient. No weight decay.
- θ_i_old, of *all* i < t, is taken anew when a client begins position t, from its own B as it
  trained it last, before it merges what it receives; from unpruned A; without KB.
- A client begins a position in its first round there. Then: θ_old, merge of B, new parameters, new
  optimizer. Optimizer state is kept over the rounds of a position, also that of B, although B is
  merged anew in each. No schedule of the rate, no early stop.
- All tasks' new A are B_0 / 3, B_0 the net's initial weights (not the B of that time); biases,
  norm layers and head of every task begin at the net's initial values. m and a are given by `init`
  (random in the sources).
- Head: the whole last layer is a task's own; CE and argmax see only the outputs of its classes. One
  last layer for all tasks with other classes' outputs masked has the same rows for those classes.
- Up, every round: B ⊙ 1[|m_t| > thr], with thr = sorted |m_t| at floor(0.3 · out), after training,
  and the binary masks. Up in a position's last round: A_t ⊙ 1[|A_t| > λ1] of the cohort. B is not
  weighted by n_k.
- A channel that nobody sends is zero (METHODS.md's formula as it stands), so that all clients keep
  their own. Merging is per element: own B where the received one is exactly 0.
- KB of position t: the A sent in the last round of position t - 1, own included, by client number,
  fixed, one for all clients. A client that begins late gets the same. Position 0 has none, nor has
  a position before whose start nobody sent any.
- Evaluated: every task begun so far, as B ⊙ σ(m_i) + pruned A_i + Σ_j a_ij KB_ij. "thetas" have the
  B that the client would have next (own, merged with the server's new one).
- F = mean over i < T of max over i ≤ t ≤ T of a_ti, minus a_Ti: accuracies on a task before it was
  begun do not count.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.oracle_methods import (
    Data,
    Model,
    Optimizer,
    complete,
    copied,
    gradients,
    leaves_of,
)

Forward = Callable[[Model, Tensor], Tensor]

SETTINGS: dict[str, Any] = {"lam1": 1e-3, "lam2": 100.0}
SETTINGS |= {"optimizer": "adam", "lr": 1e-3 / 3, "momentum": 0.0, "clip": None}
SPARSITY = 0.3
EPSILON = 1e-15

# METHODS.md's numbers, output channel first.
VECTOR: dict[str, Any] = {
    "B": ((1.0, 3.0), (2.0, 4.0)),
    "m": (0.0, math.log(3)),
    "A": ((0.1, 0.0), (0.0, -0.2)),
    "KB": (((1.0, 0.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 1.0))),
    "a": (0.5, -0.5),
    "theta": ((1.1, 1.5), (1.5, 2.3)),
    "dB": ((0.1, 0.0), (0.0, 0.2)),
    "drift": 0.025,  # ‖dB ⊙ σ(m)‖²
    "drift_term": 2.5,  # λ2 = 100
}
MEAN_VECTOR: dict[str, Any] = {
    "masks": ((1.0, 0.0), (1.0, 1.0)),
    "B": (((2.0, 4.0), (9.0, 9.0)), ((4.0, 8.0), (6.0, 10.0))),  # before masking
    "mean": ((3.0, 6.0), (6.0, 10.0)),
}
KEPT_OF_TEN = 6  # of ten channels with different |m|


@dataclass
class Task:
    """What a client has for one of its tasks; all but kb by layer (rest: by name)."""

    classes: tuple[int, ...]
    m: Model
    A: Model
    a: Model
    rest: Model
    kb: list[Model] = field(default_factory=list)


@dataclass
class Client:
    """A client's state; tasks and θ_old by position."""

    B: Model
    tasks: dict[int, Task] = field(default_factory=dict)
    old: dict[int, Model] = field(default_factory=dict)
    optimizer: Optimizer | None = None


def by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per output channel, shaped to multiply a weight."""
    return values.reshape((len(like),) + (1,) * (like.dim() - 1))


def gate(m: Tensor, like: Tensor) -> Tensor:
    """Return σ(m), one per output channel, shaped to multiply a weight."""
    return by_channel(m.sigmoid(), like)


def effective(B: Tensor, m: Tensor, A: Tensor, a: Sequence[Any] = (), kb: Any = ()) -> Tensor:
    """Return B ⊙ σ(m) + A + Σ_j a_j KB_j of one layer."""
    theta = B * gate(m, B) + A
    for factor, other in zip(a, kb, strict=True):
        theta = theta + factor * other
    return theta


def pruned(A: Tensor, lam1: float) -> Tensor:
    """Return A with the elements of at most λ1 set to 0."""
    return A * (A.abs() > lam1)


def upload_mask(m: Tensor) -> Tensor:
    """Return 1 for the channels with |m| strictly above the one at floor(0.3 · out)."""
    threshold = m.abs().sort().values[math.floor(SPARSITY * len(m))]
    return (m.abs() > threshold).double()


def masked_mean(sent: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the server's new B of one layer, Σ B̂ / (Σ masks + 1e-15).

    Args:
        sent: (B̂, mask) of every client, B̂ with the channels not sent set to 0.

    """
    total = sum(each for each, _ in sent)
    return total / (by_channel(sum(mask for _, mask in sent), total) + EPSILON)


def merged(own: Tensor, received: Tensor) -> Tensor:
    """Return the B that a client goes on with: its own where the received one is 0."""
    return torch.where(received == 0, own, received)


def task_ce(logits: Tensor, y: Tensor, classes: Sequence[int]) -> Tensor:
    """Return the mean cross-entropy over the outputs of the task's classes alone."""
    places = torch.tensor([list(classes).index(int(label)) for label in y])
    return F.cross_entropy(logits[:, list(classes)], places)


def task_accuracy(logits: Tensor, y: Tensor, classes: Sequence[int]) -> float:
    """Return the share of rows whose largest output among the task's classes is their label's."""
    picked = torch.tensor(list(classes))[logits[:, list(classes)].argmax(1)]
    return int((picked == y).sum()) / len(y)


def theta_old(B: Model, tasks: Mapping[int, Task]) -> dict[int, Model]:
    """Return B ⊙ σ(m_i) + A_i by position and layer: unpruned, without KB."""
    return {
        i: {name: effective(B[name], task.m[name], task.A[name]) for name in B}
        for i, task in tasks.items()
    }


def loss_terms(
    forward: Forward,
    B: Model,
    tasks: Mapping[int, Task],
    position: int,
    old: Mapping[int, Model],
    x: Tensor,
    y: Tensor,
    o: Mapping[str, Any],
) -> Model:
    """Return every term of one batch's loss, with its factor: "ce", "A", "m", "drift".

    Args:
        forward: The net.
        B: By layer.
        tasks: By position: the current one and those before it.
        position: The current one.
        old: θ_old by position, of the tasks before.
        x: Inputs.
        y: Labels, all of the current task's classes.
        o: Settings.

    """
    now, zero = tasks[position], torch.zeros((), dtype=torch.float64)
    weights = dict(now.rest)
    for name in B:
        kb = [other[name] for other in now.kb]
        weights[name] = effective(B[name], now.m[name], now.A[name], now.a[name], kb)
    terms = {"ce": task_ce(forward(weights, x), y, now.classes)}
    terms["A"] = o["lam1"] * sum(
        (task.A[name].abs().sum() for task in tasks.values() for name in B), zero
    )
    terms["m"] = o["lam1"] * sum((now.m[name].abs().sum() for name in B), zero)
    restored = theta_old(B, {i: tasks[i] for i in old})
    terms["drift"] = o["lam2"] * sum(
        (((restored[i][name] - old[i][name]) ** 2).sum() for i in old for name in B), zero
    )
    return terms


def parameters(client: Client, position: int) -> Model:
    """Return what is trained at a position, under one flat name each."""
    now = client.tasks[position]
    groups: dict[str, Model] = {"B": client.B, "m": now.m, "a": now.a, "rest": now.rest}
    groups |= {f"A{i}": task.A for i, task in client.tasks.items()}
    return {
        f"{group}/{name}": value
        for group, values in groups.items()
        for name, value in values.items()
        if value.numel()
    }


def with_parameters(client: Client, position: int, values: Model) -> Client:
    """Return the client with these parameters in the place of its own."""
    new = Client(dict(client.B), {}, client.old, client.optimizer)
    for i, task in client.tasks.items():
        parts = (dict(task.m), dict(task.A), dict(task.a), dict(task.rest))
        new.tasks[i] = Task(task.classes, *parts, task.kb)
    now = new.tasks[position]
    for key, value in values.items():
        group, name = key.split("/", 1)
        if group[0] == "A":
            new.tasks[int(group[1:])].A[name] = value
        else:
            {"B": new.B, "m": now.m, "a": now.a, "rest": now.rest}[group][name] = value
    return new


def local_training(
    forward: Forward,
    client: Client,
    position: int,
    data: Data,
    batches: Iterable[Tensor],
    o: Mapping[str, Any],
) -> Client:
    """Return the client after one step per batch."""
    assert client.optimizer is not None
    for batch in batches:
        values = parameters(client, position)
        leaves = leaves_of(values)
        live = with_parameters(client, position, leaves)
        x, y = data[0][batch].double(), data[1][batch]
        terms = loss_terms(forward, live.B, live.tasks, position, live.old, x, y, o)
        grads = gradients(sum(terms.values()), leaves)
        client = with_parameters(client, position, client.optimizer.step(values, grads))
    return client


def evaluated(client: Client, B: Model, lam1: float) -> dict[int, Model]:
    """Return the whole state of the net for every task begun, by position, with that B."""
    states = {}
    for i, task in client.tasks.items():
        states[i] = dict(task.rest)
        for name in B:
            A, kb = pruned(task.A[name], lam1), [other[name] for other in task.kb]
            states[i][name] = effective(B[name], task.m[name], A, task.a[name], kb)
    return states


def forgetting(a: Sequence[Sequence[float]]) -> float:
    """Return F at the last position T: mean over i < T of max_{i≤t≤T} a_ti - a_Ti.

    Args:
        a: Row t has the accuracies after position t, on the task of position 0, 1, ... at least t.

    """
    last = len(a) - 1
    return sum(max(a[t][i] for t in range(i, last + 1)) - a[last][i] for i in range(last)) / last


def run(
    forward: Forward,
    w0: Model,
    layers: Sequence[str],
    clients: Sequence[Data],
    cohorts: Sequence[Sequence[int]],
    *,
    orders: Sequence[Sequence[Sequence[int]]],
    rounds_per_task: int,
    batches: Callable[[int, int], Iterable[Tensor]],
    init: Callable[[int, int, int], Mapping[str, Model]],
    test: Data,
    **settings: Any,
) -> dict[str, list[Any]]:
    """Run whole rounds.

    Args:
        forward: The net, (state, x) → logits of all classes.
        w0: Its initial state; left unchanged.
        layers: Names of the weights that are decomposed; the others are "rest", per task and local.
        clients: (x, y) of every client, of all its tasks.
        cohorts: Ids of the clients that take part, one list per round.
        orders: Client → position → classes of that task.
        rounds_per_task: Round r, from 1, is at position (r - 1) // rounds_per_task.
        batches: (round from 1, client) → index tensors into its data, rows of that round's task.
        init: (client, position, size of KB) → {"m": layer → (out,), "a": layer → (size,)}.
        test: (x, y) of the server, of all classes.
        **settings: Of `SETTINGS`.

    Returns:
        One entry per round in each: "B" (the server's, after it), "clients" (client → a copy of its
        state after training: B, tasks, old), "A_sent" (client → layer → pruned A; empty but in a
        position's last round), "thetas" (client → position → state; of all that have trained),
        "accuracy" (client → position → of "thetas").

    """
    o, start = complete(SETTINGS, settings), copied(w0)
    B = {name: start[name] for name in layers}
    others = {name: value for name, value in start.items() if name not in layers}
    states = {k: Client(dict(B)) for k in range(len(clients))}
    shelf: dict[int, list[Model]] = defaultdict(list)  # KB by the position that gets it
    out: dict[str, list[Any]] = defaultdict(list)

    for t, cohort in enumerate(cohorts, start=1):
        position, ends = (t - 1) // rounds_per_task, t % rounds_per_task == 0
        row: dict[str, Any] = {"A_sent": {}, "clients": {}, "thetas": {}, "accuracy": {}}
        sent: dict[str, list[Any]] = {name: [] for name in layers}
        for k in cohort:
            begins = position not in states[k].tasks
            if begins:
                states[k].old = theta_old(states[k].B, states[k].tasks)
            states[k].B = {name: merged(states[k].B[name], B[name]) for name in layers}
            if begins:
                kb = list(shelf[position])
                m, a = (copied(init(k, position, len(kb))[group]) for group in ("m", "a"))
                A = {name: start[name] / 3 for name in layers}
                task = Task(tuple(orders[k][position]), m, A, a, dict(others), kb)
                states[k].tasks = states[k].tasks | {position: task}
                states[k].optimizer = Optimizer(o["optimizer"], o["lr"], o["clip"], o["momentum"])
            states[k] = local_training(forward, states[k], position, clients[k], batches(t, k), o)
            now = states[k].tasks[position]
            for name in layers:
                keep = upload_mask(now.m[name])
                sent[name].append((states[k].B[name] * by_channel(keep, B[name]), keep))
            if ends:
                row["A_sent"][k] = {name: pruned(now.A[name], o["lam1"]) for name in layers}
            row["clients"][k] = copy.copy(states[k])
        B = {name: masked_mean(sent[name]) for name in layers}
        shelf[position + 1] = [row["A_sent"][k] for k in sorted(row["A_sent"])]
        row["B"] = B
        for k, client in states.items():
            if not client.tasks:
                continue
            following = {name: merged(client.B[name], B[name]) for name in layers}
            row["thetas"][k] = evaluated(client, following, o["lam1"])
            row["accuracy"][k] = {}
            for i, state in row["thetas"][k].items():
                rows = torch.isin(test[1], torch.tensor(client.tasks[i].classes))
                logits = forward(state, test[0][rows].double())
                share = task_accuracy(logits, test[1][rows], client.tasks[i].classes)
                row["accuracy"][k][i] = share
        for name, value in row.items():
            out[name].append(value)
    return dict(out)
