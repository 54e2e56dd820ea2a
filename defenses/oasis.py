"""OASIS: training on each image together with rotated, sheared and flipped copies of it."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.views import apply_view
from fedsim.types import Augmentation, Effect, ImageChange, InputSpec, LocalTraining
from fedsim_defenses.changed_batch import BatchDefense

Degrees = Annotated[float, Field(gt=-360, lt=360)]
Slope = Annotated[float, Field(ge=-4, le=4)]


@final
class Oasis(BatchDefense):
    """Adds changed copies of each image to the batch, with its label: the gradient is their mean.

    Gradients of an image and of its copies are then seen as a sum only. By default copies are those
    of the paper's major rotation with shearing; the size of the shear is ours.
    """

    paper: ClassVar[str] = (
        "Jeter, Nguyen, Alharbi and Thai, OASIS: Offsetting Active Reconstruction Attacks in "
        "Federated Learning, ICDCS 2024, arXiv 2311.13739"
    )

    rotations: Annotated[tuple[Degrees, ...], Field(max_length=16)] = (90.0, 180.0, 270.0)
    """Angles of the rotated copies in degrees, counterclockwise."""
    shears: Annotated[tuple[Slope, ...], Field(max_length=16)] = (0.5,)
    """Slopes of the sheared copies: columns by which a row moves left, for each row below the
    center."""
    flips: bool = False
    """Whether there are two more copies, mirrored from left to right and from top to bottom."""

    def change(
        self, images: Tensor, labels: Tensor, spec: InputSpec, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns the images, then copy by copy, and labels (M, K). See `BatchDefense.change`."""
        views = self._views()
        inputs = torch.cat([apply_view(images, view, spec) for view in views])
        # Inputs are ordered by view, each of which has the labels of the whole batch.
        return inputs, labels.repeat(len(views), 1)

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect whose `batch` adds the copies of each image."""
        return Effect(batch=(Augmentation(views=self._views(), copies=True),))

    def _views(self) -> tuple[tuple[ImageChange, ...], ...]:
        changes = [ImageChange(name="rotate", by=by) for by in self.rotations]
        changes += [ImageChange(name="shear", by=by) for by in self.shears]
        if self.flips:
            changes += [ImageChange(name="flip_x"), ImageChange(name="flip_y")]
        # The view without a change is the image itself, which stays in the batch.
        return ((), *((change,) for change in changes))
