"""Training without labels, on public data, before the first round."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from fedgkd_pl.data.examples import Batches, Examples
from fedgkd_pl.errors import require
from fedgkd_pl.federation.server_training import as_input, server_adam, server_steps
from fedgkd_pl.seeds import derive
from fedgkd_pl.storage.recorded import Recorded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

if TYPE_CHECKING:
    from fedgkd_pl.federation.server import FederatedServer


class SimCLR(Recorded):
    """Contrastive pre-training of a net's features (Chen et al., ICML 2020).

    Two views of an input should be nearer to each other than to the views of all others: with z the
    normalised outputs of a head on the features, which is thrown away afterwards, and i' the other
    view of i, the mean over all 2B views of

        −log( e^{z_i·z_i'/τ} / Σ_{j≠i} e^{z_i·z_j/τ} )

    A view is the data's own augmentation, where it has one, an image moved by up to ``shift``
    pixels, and noise.

    Args:
        epochs: passes over the public data.
        batch_size: inputs a step, each twice.
        lr: Adam's rate.
        temperature: τ.
        shift: pixels, of inputs that are images.
        noise: its standard deviation, in units of the net's input.
        width: of the head's output.
    """

    def __init__(
        self,
        epochs: int = 100,
        batch_size: int = 128,
        lr: float = 1e-3,
        temperature: float = 0.5,
        shift: int = 1,
        noise: float = 0.1,
        width: int = 128,
    ) -> None:
        require(epochs >= 1, "epochs", "must be at least 1", epochs)
        require(batch_size >= 2, "batch_size", "must be at least 2", batch_size)
        require(lr > 0, "lr", "must be positive", lr)
        require(temperature > 0, "temperature", "must be positive", temperature)
        require(shift >= 0, "shift", "must not be negative", shift)
        require(noise >= 0, "noise", "must not be negative", noise)
        require(width >= 1, "width", "must be at least 1", width)
        self.epochs, self.batch_size, self.lr = epochs, batch_size, lr
        self.temperature, self.shift, self.noise, self.width = temperature, shift, noise, width

    def __call__(self, server: "FederatedServer", examples: Examples, features: int) -> None:
        """Trains ``features`` of the server's net, which are so many; its classifier stays."""
        net, like = server.net, next(server.net.parameters())
        random = torch.Generator().manual_seed(derive(server.datamodule.seed, "public", 1))
        head = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(), nn.Linear(features, self.width)
        )
        for parameter in head.parameters():
            nn.init.normal_(parameter, std=features**-0.5, generator=random)
        head.to(like)
        optimizer = server_adam([*net.parameters(), *head.parameters()], self.lr)
        examples = examples.to(like.device)
        batches = Batches(examples, self.batch_size, random)

        def views() -> Iterator[tuple[Tensor]]:
            for _ in range(self.epochs):
                for x, y in batches:
                    if len(y) > 1:
                        yield (x,)

        def loss(x: Tensor) -> Tensor:
            both = torch.cat([self.view(as_input(x, like), random) for _ in range(2)])
            return contrastive(head(net.features(both)), self.temperature)  # type: ignore[operator]

        steps = self.epochs * len(batches)
        server_steps(server, optimizer, views(), loss, steps, name="pretraining")
        net.zero_grad()

    def view(self, x: Tensor, random: torch.Generator) -> Tensor:
        """An input, moved and noisy."""
        if self.shift and x.dim() == 4:
            height, width = x.shape[2:]
            padded = pad(x, [self.shift] * 4)
            top, left = torch.randint(2 * self.shift + 1, (2,), generator=random).tolist()
            x = padded[:, :, top : top + height, left : left + width]
        return x + self.noise * torch.randn(x.shape, generator=random, dtype=torch.float32).to(x)


def contrastive(outputs: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss; the second half of the rows are the other views of the first."""
    z = normalize(outputs, dim=1)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(len(z), device=z.device).bool(), float("-inf"))
    return cross_entropy(similarity, torch.arange(len(z), device=z.device).roll(len(z) // 2))
