"""The loss of a task: of classes, of labels that a sample may have several of, or of numbers.

The cross-entropy is plain or adjusted to the classes that a client holds. With s the logits, n_c
the client's samples of class c and π_c their share:

    CrossEntropy      −s_y + log Σ_c e^{s_c}
    PriorAdjusted     −(s_y + τ log π_y) + log Σ_{c held} e^{s_c + τ log π_c}
    MarginAdjusted    the same with −τ n_c^{−1/4} in place of τ log π_c   (FedLC)
    RestrictedSoftmax −s_y + log( Σ_{c held} e^{s_c} + Σ_{c absent} e^{α s_c} )   (FedRS)

Only a client's own cross-entropy is adjusted: distillation, reports and evaluation see s. The
counts never leave the client. Logits may have a height and a width, with a label for each pixel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from fedgkd_pl.data.examples import FAR
from fedgkd_pl.errors import positive, require
from fedgkd_pl.federation.hardware import wide
from fedgkd_pl.storage.recorded import Recorded
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss, mse_loss

Targets = Literal["classes", "labels", "values"]


class LocalLoss(Recorded, ABC):
    """The loss of a batch of outputs and targets."""

    needs_counts = True  # whether ``counts`` is used
    targets: Targets = "classes"  # what it needs: class numbers, zeros and ones, or numbers
    name = "ce"  # in what clients report

    @abstractmethod
    def __call__(self, logits: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        """The mean over a batch; ``counts``: the client's samples of every class, as floats."""

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample or number, which evaluation takes the mean of."""
        return cross_entropy(outputs, y, reduction="none")

    def for_metrics(self, y: Tensor) -> Tensor:
        """Targets as torchmetrics take them: zeros and ones are whole numbers."""
        return y.long() if self.targets == "labels" else y


class CrossEntropy(LocalLoss):
    """The plain one."""

    needs_counts = False

    def __call__(self, logits: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        """The mean over a batch."""
        return cross_entropy(logits, y)


class PriorAdjusted(LocalLoss):
    """Cross-entropy of logits + τ·log(the client's label shares); absent classes are left out.

    Menon et al., Long-tail learning via logit adjustment, ICLR 2021, with each client's own shares.

    Args:
        tau: τ > 0.
    """

    def __init__(self, tau: float = 1.0) -> None:
        positive(tau=tau)
        self.tau = tau

    def __call__(self, logits: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        """The mean over a batch."""
        assert counts is not None
        return _adjusted(logits, y, self.tau * (counts / counts.sum()).log(), counts)


class MarginAdjusted(LocalLoss):
    """Cross-entropy of logits − τ·n_c^(−1/4); absent classes are left out.

    Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration (FedLC),
    ICML 2022. Unlike in the paper's equation, the true class is a part of the sum: without it the
    loss has no lower bound.

    Args:
        tau: τ > 0.
    """

    def __init__(self, tau: float = 1.0) -> None:
        positive(tau=tau)
        self.tau = tau

    def __call__(self, logits: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        """The mean over a batch."""
        assert counts is not None
        return _adjusted(logits, y, -self.tau * counts.clamp(min=1) ** -0.25, counts)


class RestrictedSoftmax(LocalLoss):
    """Cross-entropy in which the logits of absent classes are multiplied by α.

    Li and Zhan, FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID
    Data, KDD 2021.

    Args:
        alpha: α; 1 is plain cross-entropy.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        require(0 <= alpha <= 1, "alpha", "must be in [0, 1]", alpha)
        self.alpha = alpha

    def __call__(self, logits: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        """The mean over a batch."""
        assert counts is not None
        kept = (counts > 0) | (logits < FAR / 2)  # the latter are of other tasks, and stay hidden
        return cross_entropy(torch.where(kept, logits, self.alpha * logits), y)


class _MeanOfEach(LocalLoss):
    needs_counts = False
    function: Callable[..., Tensor]

    def __call__(self, logits: Tensor, y: Tensor, counts: Tensor | None) -> Tensor:
        return self.each(logits, y).mean()

    def each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See :meth:`LocalLoss.each`."""
        return self.function(outputs, y, reduction="none")


class BinaryCrossEntropy(_MeanOfEach):
    """Of samples that may have several labels: a column of zeros and ones for each."""

    targets = "labels"
    name = "bce"
    function = staticmethod(binary_cross_entropy_with_logits)


class SquaredError(_MeanOfEach):
    """Of numbers: (outputs − targets)²."""

    targets = "values"
    name = "mse"
    function = staticmethod(mse_loss)


class AbsoluteError(_MeanOfEach):
    """Of numbers: |outputs − targets|."""

    targets = "values"
    name = "mae"
    function = staticmethod(l1_loss)


def _adjusted(logits: Tensor, y: Tensor, shift: Tensor, counts: Tensor) -> Tensor:
    """Autocast's logits are shifted in float32 at least; the gradient of absent classes is 0."""
    logits = wide(logits)
    shifted = logits + torch.where(counts > 0, shift, 0).to(logits)
    return cross_entropy(shifted.masked_fill(counts == 0, float("-inf")), y)
