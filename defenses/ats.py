"""ATS: training on images transformed by policies that were searched for their privacy."""

from __future__ import annotations

from itertools import product
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedsim.contracts.defense import uniform
from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.views import apply_view
from fedsim.types import Augmentation, Effect, ImageChange, InputSpec, LocalTraining
from fedsim_defenses.changed_batch import BatchDefense

_SHIFT, _CONTRAST = 150 / 331 / 9, 0.5 / 9
"""Translation, as a share of the side, and change of contrast, by each of nine magnitudes."""


class Operation(BaseModel):
    """Describes one change of an image, whose direction is drawn: a step of a policy of `ATS`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["translate_x", "translate_y", "contrast"]
    """Shift along the width or height, or change of contrast."""
    magnitude: Annotated[int, Field(ge=0, le=9)]
    """Size in ninths of the largest: 45% of the side, or half of the contrast."""

    def changes(self) -> tuple[ImageChange, ImageChange]:
        """Returns the change in both directions, that of the smaller `by` first."""
        if self.name == "contrast":
            sizes = [1 + sign * self.magnitude * _CONTRAST for sign in (-1, 1)]
        else:
            sizes = [sign * self.magnitude * _SHIFT for sign in (-1, 1)]
        low, high = (ImageChange(name=self.name, by=size) for size in sizes)
        return low, high


TransformPolicy = Annotated[tuple[Operation, ...], Field(min_length=1, max_length=4)]
"""Operations in the order in which they act on an image."""

_HYBRID = (
    (
        Operation(name="translate_x", magnitude=9),
        Operation(name="contrast", magnitude=6),
        Operation(name="translate_y", magnitude=2),
    ),
    (
        Operation(name="translate_y", magnitude=3),
        Operation(name="contrast", magnitude=7),
        Operation(name="contrast", magnitude=7),
    ),
)
"""Policies 3-1-7 and 43-18-18, found for CIFAR-100 and ResNet-20, by the authors' `policy.py`."""


@final
class ATS(BatchDefense):
    """Replaces each image by a view of it: a policy is drawn, and the direction of each operation.

    The default is the two policies that the authors found for CIFAR-100 with ResNet-20. Policies
    are not searched for here. What enters from outside of the image is black.
    """

    paper: ClassVar[str] = (
        "Gao, Guo, Zhang, Qiu, Wen and Liu, Privacy-preserving Collaborative Learning with "
        "Automatic Transformation Search, CVPR 2021, section 5"
    )

    policies: Annotated[tuple[TransformPolicy, ...], Field(min_length=1, max_length=8)] = _HYBRID
    """Policies of one to four operations each, of which one is drawn for each image."""

    def change(
        self, images: Tensor, labels: Tensor, spec: InputSpec, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns a view of each image (B, C, H, W), and `labels`. See `BatchDefense.change`."""
        views = self._views()
        # Policies are equally likely, however many views they have.
        policies, places = uniform((2, len(images)), rng)
        chosen = []
        for policy, place in zip(policies.tolist(), places.tolist(), strict=True):
            own = views[int(policy * len(views))]
            chosen.append(own[int(place * len(own))])
        parts = [
            apply_view(image[None], view, spec) for image, view in zip(images, chosen, strict=True)
        ]
        return torch.cat(parts), labels

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns `before`: each image is in one input alone. See `TrainingDefense.guarantee`."""
        return before

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect whose `batch` replaces each image by one of the policies' views."""
        # Policies may share views, of which an attacker has to try each only once.
        views = dict.fromkeys(view for policy in self._views() for view in policy)
        return Effect(batch=(Augmentation(views=tuple(views), copies=False),))

    def _views(self) -> list[list[tuple[ImageChange, ...]]]:
        return [list(product(*(each.changes() for each in policy))) for policy in self.policies]
