"""What gradient matching optimizes: images, and their labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Candidate:
    """What is optimized: normalized images, and the logits of soft labels or fixed labels."""

    images: Tensor
    """(N, C, H, W)."""
    labels: Tensor | None
    """(N,) int64, where they are fixed."""
    logits: Tensor | None
    """(N, K), where they are not."""

    @property
    def variables(self) -> list[Tensor]:
        """The tensors to optimize."""
        return [self.images] if self.logits is None else [self.images, self.logits]

    def targets(self) -> Tensor:
        """Returns labels (N,) int64 or probabilities (N, K), differentiable in the logits."""
        if self.logits is not None:
            return self.logits.softmax(1)
        assert self.labels is not None
        return self.labels

    def hard_labels(self) -> Tensor:
        """Returns the labels, the likeliest of soft ones: (N,) int64."""
        return self.targets() if self.logits is None else self.logits.argmax(1)
