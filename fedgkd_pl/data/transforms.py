"""Batched image transforms that run where the batch is."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad


class ImageTransform:
    """Bytes to normalised images; in training each is cropped and flipped on its own.

    Args:
        mean: mean of each channel, in [0, 1].
        std: standard deviation of each channel.
        padding: zero padding of the random crop; 0 for none.
        flip: whether to flip half of the images left to right.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], padding: int = 4, flip: bool = True
    ) -> None:
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.padding = padding
        self.flip = flip

    @property
    def random(self) -> bool:
        """Whether two passes over the same images differ."""
        return self.padding > 0 or self.flip

    def __call__(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Float images of bytes (batch × channels × height × width).

        ``generator`` draws crops and flips, on the CPU so that they are the same on every device;
        None for evaluation.
        """
        if generator is not None:
            images = self._augment(images, generator)
        mean, std = (by_channel(values, images.device) for values in (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)

    def _augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        batch, channels, height, width = images.shape
        device, shifts = images.device, 2 * self.padding + 1
        corner = torch.randint(shifts, (2, batch, 1), generator=generator)
        flip = torch.rand(batch, 1, generator=generator, dtype=torch.float32) < 0.5
        corner, flip = (drawn.to(device, non_blocking=True) for drawn in (corner, flip))
        rows = corner[0] + torch.arange(height, device=device)
        columns = torch.arange(width, device=device).expand(batch, width)
        if self.flip:
            columns = torch.where(flip, columns.flip(1), columns)
        columns = corner[1] + columns
        padded = pad(images, [self.padding] * 4)
        pixels = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
        pixels = pixels.view(batch, 1, -1).expand(batch, channels, -1)
        return padded.flatten(2).gather(2, pixels).view(images.shape)


@lru_cache
def by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A number for every channel of images, moved to a device once."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


class Scale:
    """Numbers to floats in [0, 1].

    Args:
        maximum: the value that becomes 1.
        shape: of a sample, where it is stored in another one.
    """

    random = False

    def __init__(self, maximum: float, shape: Sequence[int] | None = None) -> None:
        self.maximum = maximum
        self.shape = shape

    def __call__(self, values: Tensor, generator: torch.Generator | None) -> Tensor:
        """The scaled values; nothing is random."""
        values = values if self.shape is None else values.reshape(len(values), *self.shape)
        return values.float() / self.maximum


class Ids:
    """Whole numbers, unchanged, as a net's embedding takes them."""

    random = False

    def __call__(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """The ids as int64; nothing is random."""
        return ids.long()
