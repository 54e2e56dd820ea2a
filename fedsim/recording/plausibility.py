"""Checks whether a recording can be what it says: counts, shapes, and an attack's memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from fedsim.system import memory, paths
from fedsim.types import MOST_STEPS, Augmentation, Observation
from fedsim.words import number_of

_CANDIDATES, _STEP = 8, 1 << 14
"""Number of tensors of images that an attack holds, and bytes that it keeps of a local step."""
_MOST = 1_000_000
"""Maximum of every other count in a recording."""


def inconsistencies(
    seen: Observation, parameters: Collection[str], buffers: Collection[str]
) -> Iterator[str]:
    """Yields a text for each fault by which a recording, of these names, would mislead attacks."""
    training = seen.training
    if not 1 <= training.steps <= MOST_STEPS:
        yield f"training.steps: expected 1 to {MOST_STEPS}, got {training.steps}"
    for name, count in (
        ("training.batch_size", training.batch_size),
        ("num_clients", seen.num_clients),
        ("releases", seen.releases),
    ):
        if not 1 <= count <= _MOST:
            yield f"{name}: expected 1 to {_MOST}, got {count}"
    for name, value in (("lr", training.lr), ("momentum", training.momentum)):
        # The chain is false for NaN as well.
        if not 0 <= value < math.inf or (name == "lr" and not value):
            yield f"training.{name}: expected a finite number above 0, got {value}"
    if seen.payload == "update":
        spec = seen.model
        channels, shape = spec.input_shape[0], spec.input_shape
        if not (min(shape) >= 1 and max(shape) <= _MOST):
            yield f"model.input_shape: expected 1 to {_MOST} each, got {shape}"
        if not 1 <= spec.num_classes <= _MOST:
            yield f"model.num_classes: expected 1 to {_MOST}, got {spec.num_classes}"
        for name, values in (("mean", spec.mean), ("std", spec.std)):
            good = all(map(math.isfinite, values)) and (name == "mean" or min(values) > 0)
            if len(values) != channels or not good:
                yield f"model.{name}: expected {channels} finite numbers, got {values}"
        # An attack holds its candidates, their gradient, its optimizer's state and what their
        # update is computed of, for each step that it goes through.
        images = seen.num_images * math.prod(spec.input_shape)
        for change in seen.effect.batch:
            if isinstance(change, Augmentation):
                images *= max(1, len(change.views))
        weights = sum(tensor.numel() for tensor in seen.parameters.values())
        needed = _CANDIDATES * 4 * images + training.steps * (8 * weights + _STEP)
        if needed > memory.limit():
            yield (
                "training.steps, training.batch_size, num_clients, model.input_shape: an attack "
                f"on {number_of(seen.num_images, 'image')} in {number_of(training.steps, 'step')} "
                f"takes about {needed / paths.GIB:.1f} GiB, and there are "
                f"{memory.limit() / paths.GIB:.1f}"
            )
    # Names without tensors were dropped on loading, so that each one is looked for here.
    for name in parameters:
        before, update = seen.parameters.get(name), seen.update.get(name)
        if before is None or update is None:
            yield f"parameter {name}: named, but not recorded"
        elif before.shape != update.shape or not update.is_floating_point():
            yield (
                f"parameter {name}: expected an update of {tuple(before.shape)} floating-point "
                f"numbers, got {tuple(update.shape)} of {update.dtype}"
            )
    if not parameters:
        yield "no parameters are named"
    if lost := set(buffers) - set(seen.buffers):
        yield f"buffer {min(lost)}: named, but not recorded"
