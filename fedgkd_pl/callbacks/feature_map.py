"""The paper's t-SNE of what the models see, every few rounds."""

from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.errors import SettingError, require
from fedgkd_pl.federation.callback import FederatedCallback
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.federation.precision import evaluating
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.federation.task import require_classes
from fedgkd_pl.plots.plane import FeatureMapData, Floats, encode_feature_map, feature_map
from fedgkd_pl.plots.style import opaque
from fedgkd_pl.runs.files import output_folder
from fedgkd_pl.runs.folder import FEATURE_MAPS
from fedgkd_pl.seeds import seeded
from fedgkd_pl.storage.files import commit
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger


class FeatureMap(FederatedCallback):
    """Embeds what the global and one client's model see in test samples in the plane, by t-SNE.

    The client is that with the smallest number among those of the round that answered. Every map
    is written as ``features-round<NNN>.npz`` into the run's folder and drawn in TensorBoard. The
    run itself is not changed by it.

    Args:
        every_n_rounds: how often; the last round always has a map.
        max_samples: how many samples are drawn, the same ones every time.
        split: ``test`` or ``val``.
        seed: of the drawing and of t-SNE.
    """

    def __init__(
        self,
        every_n_rounds: int = 10,
        max_samples: int = 1000,
        split: Literal["test", "val"] = "test",
        seed: int = 0,
    ) -> None:
        require(every_n_rounds >= 1, "every_n_rounds", "must be at least 1", every_n_rounds)
        require(max_samples >= 4, "max_samples", "must be at least 4", max_samples)
        require(split in ("test", "val"), "split", "must be test or val", split)
        require(0 <= seed < 2**32, "seed", "must be in [0, 2³²)", seed)
        self.every_n_rounds = every_n_rounds
        self.max_samples = max_samples
        self.split = split
        self.seed = seed
        self.answer: ClientUpdate | None = None  # of the round's first client, until it is used
        self.round = 0  # whose answer it is

    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        """Refuses a net without features or classes, and a split that is too small."""
        require_classes(model, data, self)
        for net in model.every_net():
            if not callable(getattr(net, "features", None)):
                name = type(net).__name__
                raise SettingError(
                    "callbacks",
                    f"FeatureMap needs the net's features, which {name} does not have "
                    "(SplitNet gives them to any net)",
                )
        samples = len(getattr(data, self.split))
        require(samples >= 4, "split", f"FeatureMap needs 4 samples, {self.split} has {samples}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nobody has answered."""
        self.answer = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A round begins: nobody has answered."""
        self.answer = None

    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Keeps the model of the first client; answers come largest client first."""
        first = self.answer is None or update.client < self.answer.client
        if first and update.weights:  # which stay with clients, perhaps
            self.answer = update
            self.round = pl_module.round

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the map, before the round is committed to ``last.ckpt``."""
        if self.round % self.every_n_rounds == 0 or _is_last(trainer):
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the last map of a run that was stopped early, which is not known before."""
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, server: FederatedServer) -> None:
        """Once a round, and not where no client has answered, such as just after a resume."""
        if self.answer is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data = self._look(trainer, server, self.answer)
        self.answer = None
        file = output_folder(trainer) / FEATURE_MAPS.replace("*", f"{data.round:03d}")
        commit(file, [encode_feature_map(data)])
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("features", opaque(feature_map([data])), data.round)

    def _look(
        self, trainer: Trainer, server: FederatedServer, answer: ClientUpdate
    ) -> FeatureMapData:
        examples: Examples = getattr(server.datamodule, self.split)
        rng = np.random.default_rng(self.seed)
        rows = rng.permutation(len(examples))[: self.max_samples]
        results = []
        theirs = server.nets[server.net_index(answer.client)]
        for like, state in (server.net, server.global_state()), (theirs, answer.weights):
            net = deepcopy(like).eval()  # so that the server's keeps its mode and weights
            with seeded(self.seed):  # for nets that draw numbers even when they are evaluated
                features, acc = _evaluate(trainer, net, state, examples, rows)
            results.append((embed(features, self.seed), acc))
        (global_points, global_acc), (local_points, local_acc) = results
        labels = examples.targets[rows].cpu().numpy()
        return FeatureMapData(
            global_points=global_points,
            local_points=local_points,
            labels=labels,
            global_acc=global_acc,
            local_acc=local_acc,
            client=answer.client,
            round=self.round,
        )


def embed(features: Floats, seed: int = 0) -> Floats:
    """t-SNE of at least 4 samples, on one thread: the same features give the same points.

    Where all features are alike, or not finite, as those of a net that has collapsed, all points
    are in the middle; t-SNE would end the process there.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    flat = features.reshape(len(features), -1)
    if not np.isfinite(flat).all() or np.ptp(flat, axis=0).max() <= 1e-9 * np.abs(flat).max():
        return np.zeros((len(flat), 2))
    if flat.shape[1] < 2:  # PCA needs two columns
        flat = np.pad(flat, ((0, 0), (0, 2 - flat.shape[1])))
    perplexity = min(30.0, (len(flat) - 1) / 3)
    with threadpool_limits(limits=1):
        tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1)
        return np.asarray(tsne.fit_transform(flat), dtype=np.float64)


@torch.no_grad()
def _evaluate(
    trainer: Trainer,
    net: Any,
    state: State,
    examples: Examples,
    rows: "np.ndarray[Any, np.dtype[np.int64]]",
) -> tuple[Floats, float]:
    """The features of some examples and the accuracy on all."""
    net.load_state_dict(state)
    plugin, device = trainer.precision_plugin, trainer.strategy.root_device
    batch_size = trainer.datamodule.eval_batch_size  # type: ignore[attr-defined]
    everything, drawn = examples.to(device), examples[torch.from_numpy(rows)].to(device)
    right, features = 0, []
    with evaluating(plugin, device):
        for x, y in Batches(everything, batch_size):
            right += int((net(plugin.convert_input(x)).argmax(1) == y).sum())
        for x, _ in Batches(drawn, batch_size):
            features.append(net.features(plugin.convert_input(x)).cpu().double().numpy())
    return np.concatenate(features), right / len(examples)


def _is_last(trainer: Trainer) -> bool:
    """Whether no round will follow, as far as is known when a round ends."""
    steps = 0 <= trainer.max_steps <= trainer.global_step
    return steps or trainer.current_epoch + 1 == trainer.max_epochs
