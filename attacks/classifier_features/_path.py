"""The path that weights take over a client's local steps, of which a server knows both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.types import LocalTraining, Observation

_DECAY = 0.75
"""Of the gradient from step to step, as long as nothing is known of the steps."""


def as_one_gradient(observation: Observation, share: float = 0.0) -> Observation:
    """Turns an update of several steps into one gradient: the mean of its steps' gradients.

    It is taken for that of the weights moved by a `share` of the update. Near for a small learning
    rate, and no more than a start for a large one.
    """
    factor = mean_gradient_factor(observation.training)
    return replace(
        observation,
        parameters={
            name: value + share * observation.update[name] if share else value
            for name, value in observation.parameters.items()
        },
        update={name: value * factor for name, value in observation.update.items()},
        training=replace(
            observation.training,
            algorithm="fedsgd",
            batch_size=observation.training.num_images,
            steps=1,
        ),
    )


def positions(training: LocalTraining, sizes: Sequence[float]) -> list[float]:
    """Computes the share of the update that is made before each step.

    `sizes` are those of the steps' gradients along it, in any unit.
    """
    found, position, velocity = [], 0.0, 0.0
    for size in sizes:
        found.append(position)
        velocity = training.momentum * velocity + size
        position += velocity
    return [each / position for each in found]


def decaying(training: LocalTraining) -> list[float]:
    """Computes the share of the update before each step whose gradient decays as is usual."""
    return positions(training, [_DECAY**step for step in range(training.steps)])


def middle(training: LocalTraining, shares: Sequence[float]) -> float:
    """Computes the share of the update at which one gradient is the mean of all steps'."""
    weights = step_weights(training)
    return sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights)
