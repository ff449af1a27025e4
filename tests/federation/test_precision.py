"""The same numbers whoever trains, at every precision; and steps that really step."""

from functools import partial

import pytest
import torch
from fedgkd_pl import MLP, FedAvg, LocalEngine, OtherData
from fedgkd_pl.data.examples import Examples, Splits
from fedgkd_pl.data.transforms import ImageTransform
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Table, fit, same
from tests.support.methods import CLASSES, EVERY, SETTINGS

IN_SHORT = [("FedGKD", "32-true"), ("FedMD", "64-true"), ("SCAFFOLD", "bf16-mixed")]
ALL = [(name, kind) for name in EVERY for kind in ("32-true", "64-true", "bf16-mixed")]
NIGHTLY = [pytest.param(*case, marks=pytest.mark.nightly) for case in ALL if case not in IN_SHORT]


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


def net() -> MLP:
    torch.manual_seed(0)
    made = MLP(12, [8], num_classes=3, projection=6)
    made.features[1] = Island(made.features[1])  # type: ignore[index, arg-type]
    return made


class Noisy:
    """A user's transform that draws and multiplies in whatever dtype is the default."""

    random = True

    def __init__(self) -> None:
        self.images = ImageTransform((0.5,) * 3, (0.25,) * 3, padding=1)
        self.mix = torch.eye(12) + 0.1

    def __call__(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        flat = self.images(images, generator).flatten(1)
        if generator is None:
            return flat
        noise = torch.rand(flat.shape, generator=generator).float()
        return (flat + noise) @ self.mix


class Pictures(Table):
    """2 × 2 images with crop, flip, noise and a product."""

    def load(self) -> Splits:
        random = torch.Generator().manual_seed(3)
        images = torch.randint(256, (len(self.y), 3, 2, 2), generator=random, dtype=torch.uint8)
        all_ = Examples(images, torch.from_numpy(self.y), Noisy())
        return Splits(all_, all_[:6])


def pictures() -> Pictures:
    public = OtherData(Pictures(sizes=(9,), val_fraction=0.1))
    return Pictures(sizes=(11, 7), batch_size=4, val_fraction=0.1, public=public)


@pytest.mark.parametrize(("name", "precision"), IN_SHORT + NIGHTLY)
def test_a_pool_gives_the_same_at_every_precision(name: str, precision: str) -> None:
    method = partial(CLASSES[name], **SETTINGS.get(name, {}))
    models = []
    for workers in (1, 2):
        torch.manual_seed(0)
        optimizer, engine = partial(SGD, lr=0.01), LocalEngine(workers=workers)
        models.append(method(net(), local_epochs=2, optimizer=optimizer, engine=engine))
        fit(models[-1], pictures(), rounds=2, precision=precision)
        assert not models[-1].results.failures
    assert same(models[0].global_state(), models[1].global_state())
    assert models[0].client_states.keys() == models[1].client_states.keys()
    for client, state in models[0].client_states.items():
        assert same(state, models[1].client_states[client])


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
