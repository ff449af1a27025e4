"""The paper's t-SNE of what the models see, every few rounds."""

from typing import Any

import numpy as np
import torch
from fedgkd_pl.callbacks.dashboard import tensorboards
from fedgkd_pl.callbacks.evaluate import Split, SplitCallback, SplitRunner
from fedgkd_pl.data.datamodule import FederatedDataModule
from fedgkd_pl.errors import at_least, require
from fedgkd_pl.federation.message import ClientUpdate, State
from fedgkd_pl.federation.server import FederatedServer
from fedgkd_pl.runs.files import output_folder
from fedgkd_pl.runs.folder import FEATURE_MAPS
from fedgkd_pl.seeds import seeded
from fedgkd_pl.storage.files import commit
from lightning.pytorch import LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

Floats = NDArray[np.float64]


class FeatureMap(SplitCallback):
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
        split: Split = "test",
        seed: int = 0,
    ) -> None:
        super().__init__(every_n_rounds, split)
        at_least(4, max_samples=max_samples)
        require(0 <= seed < 2**32, "seed", "must be in [0, 2³²)", seed)
        self.drawn, self.seed = max_samples, seed
        self.answer: ClientUpdate | None = None  # of the round's first client, until it is used
        self.round = 0  # whose answer it is

    @override
    def check(self, model: FederatedServer, data: FederatedDataModule) -> None:
        super().check(model, data)
        for net in model.every_net():
            name = type(net).__name__
            reason = f"FeatureMap needs the net's features; SplitNet gives them to {name}"
            require(callable(getattr(net, "features", None)), "callbacks", reason)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Starts a round: nobody has answered."""
        self.answer = None

    @override
    def on_client_end(
        self, trainer: Trainer, pl_module: FederatedServer, update: ClientUpdate, cohort_size: int
    ) -> None:
        """Keeps the model of the first client; answers come largest client first."""
        first = self.answer is None or update.client < self.answer.client
        if first and update.weights:  # which stay with clients, perhaps
            self.answer, self.round = update, pl_module.round

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the map, before the round is committed to ``last.ckpt``."""
        if self.round % self.every_n_rounds == 0 or self.round == trainer.max_epochs:
            self._write(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Writes the last map of a run that was stopped early, which is not known before."""
        self._write(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def _write(self, trainer: Trainer, server: FederatedServer) -> None:
        """Once a round, and not where no client has answered, such as just after a resume."""
        from fedgkd_pl.plots.figures import FeatureMapData, encode_feature_map, feature_map
        from fedgkd_pl.plots.style import opaque

        answer, self.answer = self.answer, None
        if answer is None or self.runner is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        order = np.random.default_rng(self.seed).permutation(len(self.runner.targets))
        rows = torch.from_numpy(order[: self.drawn])
        points, acc = self._look(self.runner, server.global_state(), rows, None)
        local_points, local_acc = self._look(self.runner, server.whole(answer), rows, answer.client)
        labels = self.runner.targets[rows].numpy()
        data = FeatureMapData(
            points, local_points, labels, acc, local_acc, answer.client, self.round
        )
        file = output_folder(trainer) / FEATURE_MAPS.replace("*", f"{data.round:03d}")
        commit(file, [encode_feature_map(data)])
        for logger in tensorboards(trainer):
            logger.experiment.add_figure("features", opaque(feature_map([data])), data.round)

    def _look(
        self, runner: SplitRunner, model: State, rows: Tensor, client: int | None
    ) -> tuple[Floats, float]:
        with seeded(self.seed):  # for nets that draw numbers even when they are evaluated
            acc = runner.score(model, client=client)[0]
            features = runner.outputs(runner.load(model, client).features, rows)
        return embed(features.numpy(), self.seed), acc


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
