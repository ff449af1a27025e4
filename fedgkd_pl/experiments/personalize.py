"""``fedgkd-pl personalize``: the global model of a run, fine-tuned by each client for itself."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from fedgkd_pl.callbacks.client_evaluation import scores_of_all
from fedgkd_pl.callbacks.evaluate import SplitRunner
from fedgkd_pl.config.build import Experiment, build_command
from fedgkd_pl.config.request import open_run
from fedgkd_pl.engines.base import LocalEngine, schedule
from fedgkd_pl.errors import RunFailed, require
from fedgkd_pl.experiments.report import personalized
from fedgkd_pl.experiments.runs import Run
from fedgkd_pl.federation import message as messages
from fedgkd_pl.federation.checks import check_resumed, task_of
from fedgkd_pl.federation.client_trainer import Job
from fedgkd_pl.federation.own_module import has_outputs
from fedgkd_pl.federation.round import job_of
from fedgkd_pl.methods.fedavg import FedAvg
from fedgkd_pl.plots.figures import worst_tenth
from fedgkd_pl.plots.style import save
from fedgkd_pl.runs.files import csv_text
from fedgkd_pl.runs.folder import PERSONALIZED, RunFolder
from fedgkd_pl.runs.resume import check_net, check_settings, checkpoint_of
from fedgkd_pl.seeds import derive
from fedgkd_pl.storage.files import write_text
from rich.progress import track
from torch.optim import Optimizer

log = logging.getLogger("fedgkd_pl")
NO_OWN = "its clients kept no test samples: train with --data.client_test_fraction 0.2"
Row = dict[str, float]


def personalize(
    run: str | Path,
    epochs: int | None = None,
    lr: float | None = None,
    ckpt_path: str = "last",
    output_dir: str | Path | None = None,
    settings: Sequence[str] = (),
    progress: bool = False,
) -> list[Row]:
    """Lets each client fine-tune a run's global model on its own training samples.

    The clients train as FedAvg's do, without teachers, with the run's loss, optimizer, clipping and
    precision. Each is tested on its own test samples, before and after. Writes
    ``personalized.csv`` and ``personalized.svg``.

    Args:
        run: the folder of a run, finished or stopped, that was trained with
            ``data.client_test_fraction``.
        epochs: of each client; by default as many as in a round of the run.
        lr: of each client; by default that of the run's next round.
        ckpt_path: ``last``, ``best`` (by validation) or a checkpoint file of the run.
        output_dir: where to write; by default the run's folder.
        settings: further flags of ``fedgkd-pl fit`` that do not decide the result, such as
            ``["--data.data_dir", "data", "--import", "my_methods"]``.
        progress: whether to show a bar.

    Returns:
        A row for every client, as in the file.
    """
    require(epochs is None or epochs >= 1, "epochs", "must be at least 1", epochs)
    require(lr is None or (lr > 0 and isfinite(lr)), "lr", "must be positive", lr)
    folder = open_run("run", str(run))
    output = folder.path if output_dir is None else Path(output_dir)
    require(output.is_dir() or not output.exists(), "output_dir", "is not a folder", str(output))
    experiment = _load(folder, ckpt_path, settings)
    rows = _rows(experiment, epochs, lr, progress)
    write_text(output / PERSONALIZED, csv_text(list(rows[0]), rows))
    save(personalized(Run(output, {})), (output / PERSONALIZED).with_suffix(".svg"))
    return rows


def _load(folder: RunFolder, ckpt_path: str, settings: Sequence[str]) -> Experiment:
    """The run's method with the weights of a checkpoint, and its data."""
    file = checkpoint_of(folder, ckpt_path)
    flags = ["--config", str(folder.config), "--ckpt_path", str(file), *settings]
    made = build_command("test", flags)
    model, data, checkpoint = made.model, made.data, made.start.checkpoint
    with made.whole_keys():
        made.check(trains=False)
        check_settings(checkpoint, made.fixed)
        check_resumed(model, data, checkpoint["fedgkd_pl"])
        check_net(checkpoint, model)
        fits = isinstance(model, FedAvg) and model.client_nets.index is None
        fits = fits and task_of(model, data) == "classes" and has_outputs(model.net)
        text = "needs a method of FedAvg's kind with one net for all, which gives logits of classes"
        require(fits, "model", text, type(model).__name__)
        text = "has clients with parts of their own, which are personal already"
        require(not model.is_personal, "run", text, str(folder.path))
        require("test" in data.client_splits, "run", NO_OWN, str(folder.path))
    device = made.trainer.strategy.root_device
    made.trainer.precision_plugin.convert_module(model)  # before doubles are loaded
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"])
    model.to(device)
    model.lay_out(data, device)
    return made


def _rows(
    experiment: Experiment, epochs: int | None, lr: float | None, progress: bool
) -> list[Row]:
    """Trains and tests the clients; a row each, by their numbers."""
    model, data = experiment.model, experiment.data
    own, engine = data.client_splits["test"], model.engine
    if engine.states_stay:  # Flower's clients are elsewhere; their data is here
        engine = LocalEngine(threads=getattr(engine, "threads", 1))
    job = _job(experiment, epochs, lr)
    message = messages.Message(1, {"global": model.global_state()})
    if model.schedule is not None and lr is None:
        model.schedule.begin(model.schedule.rounds + 2)  # the round after the checkpoint's
        message.numbers[messages.LR_FACTOR] = model.schedule.factor
    sizes = {client: job.data.index.size(client) for client in own.clients}
    form = messages.Form(messages.like(message.models["global"]), samples=sizes)
    runner = SplitRunner(experiment.trainer, model, data, own.examples)
    runner.tasks = None  # of all classes, as the clients train
    before = scores_of_all(runner, own, model.global_state())
    rows = []
    reason = ""
    with closing(engine.open(job, len(sizes))) as session:
        answers = zip(schedule(job, own.clients), session.run(message, own.clients), strict=True)
        bar: dict[str, Any] = {"transient": True, "disable": not progress}
        for client, given in track(answers, "clients", len(sizes), **bar):
            answer = messages.checked(given, client, form)
            if isinstance(answer, messages.ClientFailure):
                reason = reason or f"client {client}: {answer.reason}"
                log.warning("left out client %d: %s", client, answer.reason)
                continue
            acc, loss = runner.score(answer.weights, own.rows(client))
            row: Row = {"client": client, "samples": sizes[client]}
            row |= {"test_samples": own.index.size(client)}
            row |= {"acc_before": before[client][0], "acc_after": acc}
            rows.append(row | {"loss_before": before[client][1], "loss_after": loss})
    if not rows:
        raise RunFailed(f"all clients failed; {reason}")
    return sorted(rows, key=lambda row: row["client"])


def _job(experiment: Experiment, epochs: int | None, lr: float | None) -> Job:
    """The job of a round, but with FedAvg's client module and with randomness of its own."""
    model, data = experiment.model, experiment.data
    assert isinstance(model, FedAvg)
    job = job_of(model, experiment.trainer, data)
    net = model.net_to_tune()
    client = FedAvg.client_class(net, model.optimizer, model.scheduler)  # without teachers
    if lr is not None:
        text = "the run's module makes its optimizer itself: leave it out"
        require(client.optimizer is not None, "lr", text, lr)
        client.optimizer = partial(_at_rate, client.optimizer, lr)
    client.local_loss, client.num_classes = model.local_loss, data.num_classes
    client.run_seed = data.seed
    trainer = job.trainer | ({} if epochs is None else {"max_epochs": epochs, "max_steps": -1})
    own_seed = replace(job.data, seed=derive(data.seed, "personalize"), tasks=None)
    return replace(job, client=client, data=own_seed, trainer=trainer, states={})


def _at_rate(optimizer: Any, lr: float, parameters: Any) -> Optimizer:
    made: Optimizer = optimizer(parameters)
    for group in made.param_groups:
        group["lr"] = lr
    return made


def show(rows: Sequence[Row]) -> None:
    """Prints before and after beside each other, in percent, and who gains."""
    import pandas as pd

    table = pd.DataFrame(rows)
    names = {"acc_before": "global", "acc_after": "personalized"}
    accs = 100 * table[list(names)].rename(columns=names)
    shown = {"mean": accs.mean(), "worst 10 %": accs.apply(worst_tenth), "spread": accs.std(ddof=0)}
    shown |= {"worst": accs.min(), "best": accs.max()}
    print(f"{len(rows)} clients, each on its own test samples")
    print(pd.DataFrame(shown).round(2).to_string())
    gain = table["acc_after"] - table["acc_before"]
    more, less = (gain > 0).sum(), (gain < 0).sum()
    print(f"clients that gain: {more}, lose: {less}, stay as they were: {len(rows) - more - less}")
