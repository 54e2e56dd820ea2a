"""Measures accuracy on a test set beside chance, the set's size and an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from fedsim.words import number_of

_DIVERGED = 2.0
"""Ratio of a model's test loss to the loss at chance from which a model without skill counts as
diverged."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """States the share of a test set that a model classified correctly, with an interval."""

    share: float
    """Share of the test set, in [0, 1]."""
    examples: int
    """Size of the test set."""
    chance: float
    """Share of the test set's most frequent class, which needs no model."""
    low: float
    high: float
    """`low` and `high` are the ends of Wilson's interval of the share, at `confidence`."""
    confidence: float

    @property
    def is_chance(self) -> bool:
        """Whether the interval does not lie above chance."""
        return self.low <= self.chance

    @property
    def skill(self) -> float:
        """`share` less `chance`: how much of the test set is right beyond chance."""
        return self.share - self.chance

    def overlaps(self, other: Accuracy) -> bool:
        """Returns whether the intervals of this accuracy and the `other` one overlap."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        """Formats as `91.2% of 80 test examples (83.0 to 95.7%; chance 25.0%)`."""
        return (
            f"{self.share:.1%} of {number_of(self.examples, 'test example')} "
            f"({100 * self.low:.1f} to "
            f"{self.high:.1%}; chance {self.chance:.1%})"
        )


@cache  # of all attacks on one defense it is the same
def accuracy(share: float, examples: int, chance: float, *, confidence: float = 0.95) -> Accuracy:
    """Returns an accuracy with Wilson's interval (JASA 22, 1927).

    Args:
        share: Share of the test set, in [0, 1], that was classified correctly. Several runs on one
            test set give their mean, and the set counts once.
        examples: Size of the test set, at least one.
        chance: Share of the test set's most frequent class.
        confidence: Confidence of the interval.
    """
    from scipy.special import ndtri

    # Wilson's interval keeps its level where the normal one fails: near 0, near 1 and for few
    # examples.
    right, z = round(share * examples), float(ndtri((1 + confidence) / 2))
    middle = (2 * right + z**2) / (2 * (examples + z**2))
    half = z * math.sqrt(4 * right * (1 - right / examples) + z**2) / (2 * (examples + z**2))
    return Accuracy(
        share=share,
        examples=examples,
        chance=chance,
        low=middle - half if right else 0.0,
        high=middle + half if right < examples else 1.0,
        confidence=confidence,
    )


def learning_problem(
    accuracy: Accuracy, test_loss: float | None, *, trains: bool = True
) -> str | None:
    """Returns why a model of this `accuracy` cannot show what a defense costs, or None.

    `test_loss` is the mean cross-entropy on the test set, in nats; None where it was not finite. A
    release in closed form `trains` no model.
    """
    if not accuracy.is_chance:
        return None
    if not trains:
        return (
            f"what is released predicts no better than chance: accuracy {accuracy}; use more rows, "
            "or test on more"
        )
    # At most the entropy of the classes, which is the loss of always answering their frequencies.
    chance_loss = -math.log(accuracy.chance)
    if test_loss is None or (chance_loss > 0 and test_loss > _DIVERGED * chance_loss):
        loss = "is not finite" if test_loss is None else f"{test_loss:.3g}"
        return (
            f"training diverged: accuracy {accuracy}, test loss {loss}; lower the learning rate or "
            "the noise"
        )
    return (
        f"the model learned nothing that its test set could show: accuracy {accuracy}; train "
        "longer, or test on more images"
    )
