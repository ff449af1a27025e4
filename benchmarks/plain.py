"""FedAvg as one writes it by hand: no package, a loop, two processes of one thread.

Its clients, batches and weights are those of the runs that it is compared with: every client's
samples in stored order, the cohort's clients dealt to the processes in turn.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp
from fedgkd_pl.federation.hardware import keep_memory
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

State = dict[str, Tensor]


@dataclass
class Work:
    """What every client trains.

    Attributes:
        net: makes the net, the same every time.
        images: bytes or floats of all samples.
        labels: of all samples.
        rows: the samples of every client.
        batch: samples a step.
        epochs: passes over a client's samples.
        mean: of the channels, where images are bytes.
        std: alike.
        momentum: of SGD.
        rate: of SGD.
        clip: norm of the gradient; 0 for none.
        tuned: channels-last, a fused optimizer, memory that is kept: what ours has by itself.
        compile: compile net and loss, for full batches.
        dtype: of weights and images.
        half: autocast to bfloat16.
        cpu: count seconds of this process's CPU.
    """

    net: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor
    rows: Sequence[range]
    batch: int
    epochs: int
    mean: Tensor | None = None
    std: Tensor | None = None
    momentum: float = 0.0
    rate: float = 0.05
    clip: float = 0.0
    tuned: bool = False
    compile: bool = False
    dtype: torch.dtype = torch.float32
    half: bool = False
    cpu: bool = False


class Loop:
    """Trains one client after the other."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.net = work.net().to(work.dtype)
        if work.tuned:
            keep_memory()
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.loss = torch.compile(self._loss) if work.compile else self._loss

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.work.half):
            return cross_entropy(self.net(x), y)

    def train(self, state: State, client: int) -> State:
        """The client's model after its epochs."""
        work, net = self.work, self.net
        net.load_state_dict(state)
        net.train()
        rows = work.rows[client]
        images, labels = work.images[rows.start : rows.stop], work.labels[rows.start : rows.stop]
        optimizer = torch.optim.SGD(
            net.parameters(),
            lr=work.rate,
            momentum=work.momentum,
            weight_decay=1e-5 if work.momentum else 0.0,
            fused=work.tuned or None,
        )
        for _ in range(work.epochs):
            for first in range(0, len(labels), work.batch):
                x = images[first : first + work.batch]
                if work.mean is not None and work.std is not None:
                    x = x.float().div_(255).sub_(work.mean).div_(work.std).to(work.dtype)
                if work.tuned and x.dim() == 4:
                    x = x.contiguous(memory_format=torch.channels_last)
                y = labels[first : first + work.batch]
                optimizer.zero_grad()
                loss = self.loss if len(y) == work.batch else self._loss
                loss(x, y).backward()  # type: ignore[no-untyped-call]
                if work.clip:
                    nn.utils.clip_grad_norm_(net.parameters(), work.clip)
                optimizer.step()
        return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def _process(connection: Connection, work: Work) -> None:
    torch.set_num_threads(1)
    loop = Loop(work)
    while True:
        task = connection.recv()
        if task is None:
            return
        state, clients = task
        connection.send([(client, loop.train(state, client)) for client in clients])


class Plain:
    """The server: sends the model, averages what comes back.

    Args:
        work: what clients train.
        processes: 1 trains in this one.
    """

    def __init__(self, work: Work, processes: int) -> None:
        self.work = work
        self.state: State = {
            name: t.detach().clone() for name, t in work.net().to(work.dtype).state_dict().items()
        }
        self.workers: list[tuple[mp.Process, Connection]] = []
        if processes == 1:
            torch.set_num_threads(1)
            self.loop = Loop(work)
        for _ in range(processes if processes > 1 else 0):
            ours, theirs = mp.get_context("spawn").Pipe()
            process = mp.get_context("spawn").Process(target=_process, args=(theirs, work))
            process.start()
            self.workers.append((process, ours))

    def round(self, cohort: Sequence[int]) -> float:
        """Trains a cohort and averages; the seconds it took."""
        clock = time.process_time if self.work.cpu else time.perf_counter
        start = clock()
        if self.workers:
            for number, (_, connection) in enumerate(self.workers):
                connection.send((self.state, cohort[number :: len(self.workers)]))
            found = [answer for _, connection in self.workers for answer in connection.recv()]
        else:
            found = [(client, self.loop.train(self.state, client)) for client in cohort]
        sizes = [len(self.work.rows[client]) for client, _ in found]
        self.state = {
            name: sum(n * state[name].double() for n, (_, state) in zip(sizes, found, strict=True))
            .div(sum(sizes))
            .to(tensor.dtype)
            for name, tensor in self.state.items()
        }
        return clock() - start

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self.workers:
            connection.send(None)
            process.join()
