"""A user's own layers and transforms at other precisions; and steps that really step."""

from functools import partial

import pytest
import torch
from fedgkd_pl import FedAvg, LocalEngine
from fedgkd_pl.data.examples import Examples, Splits
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Table, fit, same


class Island(nn.Module):
    """A layer that asks for float32, as people write it for numerical reasons."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weight = next(self.layer.parameters())
            out: Tensor = self.layer(x.to(weight.dtype))
            return out


class Noisy:
    """A user's transform that draws and multiplies in whatever dtype is the default."""

    random = True

    def __init__(self) -> None:
        self.mix = torch.eye(4) + 0.1

    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = 0.0 if generator is None else torch.rand(x.shape, generator=generator).float()
        return (x + noise) @ self.mix


class NoisyTable(Table):
    def load(self) -> Splits:
        all_ = Examples(torch.from_numpy(self.x), torch.from_numpy(self.y), Noisy())
        return Splits(all_, all_[:6])


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_a_pool_gives_the_same_for_layers_and_transforms_of_a_user(precision: str) -> None:
    models = []
    for workers in (1, 2):
        torch.manual_seed(0)
        net = nn.Sequential(Island(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))
        optimizer, engine = partial(SGD, lr=0.1), LocalEngine(workers=workers)
        models.append(FedAvg(net, local_epochs=2, optimizer=optimizer, engine=engine))
        fit(models[-1], NoisyTable(sizes=(11, 7), batch_size=4), rounds=2, precision=precision)
        assert not models[-1].results.failures
    assert same(models[0].global_state(), models[1].global_state())


def test_a_frozen_layer_does_not_move() -> None:
    """The server's weight decay is for what is trained."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    layers[0].requires_grad_(False)
    before = {name: t.clone() for name, t in layers.state_dict().items()}
    server = partial(SGD, lr=1.0, weight_decay=0.05, momentum=0.5)
    model = FedAvg(layers, server_optimizer=server)
    fit(model, Table(sizes=(8, 5)), rounds=4)
    after = model.global_state()
    assert all(torch.equal(after[f"0.{n}"], before[f"0.{n}"]) for n in ("weight", "bias"))
    assert not torch.equal(after["1.weight"], before["1.weight"])
