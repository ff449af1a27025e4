"""The small-work case, in plain torch so that every peer can import it.

1,000 clients of 50 samples, batch 10, one epoch, a cohort of 50, a CNN of two layers, SGD 0.05:
five steps of a client take few milliseconds, so what a simulator adds to them is what is measured.
"""

import torch
from torch import Tensor, nn

CLIENTS, SAMPLES, BATCH, EPOCHS, COHORT, RATE = 1000, 50, 10, 1, 50, 0.05
SHAPE, CLASSES = (1, 28, 28), 10


def net() -> nn.Module:
    """Two convolutions and a classifier: 20,490 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, CLASSES)),
    )


def data() -> tuple[Tensor, Tensor]:
    """Random images and labels of all clients: client k owns rows 50 k to 50 k + 49."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS * SAMPLES, *SHAPE, generator=generator)
    return inputs, torch.randint(CLASSES, (CLIENTS * SAMPLES,), generator=generator)
