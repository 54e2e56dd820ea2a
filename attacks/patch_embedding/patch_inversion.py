"""The image of a vision transformer's update, from its first two parameters.

Lu et al., APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers, CVPR 2022, saw that
the gradient of a learned position embedding is the signal of each token, and solved for the tokens
by the first attention's weights, where that attention gets them as they are: without a norm before
it or a sum around it. The patch embedding's own gradient has the same signals and the pixels
themselves, and needs no attention: so any blocks may follow. That a layer's gradient is linear in
its inputs once its signals are known is how Zhu and Blaschko (R-GAP, ICLR 2021) solve convolutions.
"""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import Classifier, denormalize, normalize
from fedsim.models.victim import rebuild
from fedsim.types import ModelSpec, Observation, Reconstruction
from fedsim.words import number_of
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.labels.label_inference import infer_labels
from fedsim_attacks.patch_embedding._patch_layer import PatchLayer, correlation, find, solve

_PIXEL_MEAN, _PIXEL_SPREAD = 0.5, 0.25
"""Of pixels in [0, 1], before anything is seen."""
_DETERMINED = 0.01
"""Root mean squared error of pixels (40 dB) up to which an image is determined."""
_SAFETY = 3.0
"""Times the standard deviation of its pixels, up to which an image may be off."""


@final
class PatchInversion(DirectAttack):
    """Solves the gradients of patch embedding and position for a transformer's only image.

    It is exact where tokens have more entries than there are patches. The server is honest, and the
    model any whose position embedding is trained: it is found by running it. Clipping leaves the
    answer as it is, and so do several local steps on the image; noise, and what is removed, make it
    as uncertain as they are large, and so do patches beyond the tokens' entries.
    """

    paper: ClassVar[str] = (
        "fedsim: ∂L/∂E = Σ_p (∂L/∂u_p) x_p', after Lu et al., APRIL, CVPR 2022 (signals by the "
        "position embedding u), and Zhu and Blaschko, R-GAP, ICLR 2021 (inputs by a gradient)"
    )

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the image. The loss is the share of the embedding's gradient left unexplained.

        Raises:
            AttackFailed: the update is of several images, a defense mixes its entries, or the model
                embeds no patches with a position that is trained.
        """
        if observation.num_images > 1:
            raise AttackFailed(
                f"the update is of {number_of(observation.num_images, 'image')}, whose signals at "
                "a position come as their sum: patches are solved for of one image"
            )
        if observation.effect.mixed:
            raise AttackFailed(
                "a defense mixes entries, and the patch embedding's gradient is no longer the sum "
                "of its patches"
            )
        victim = rebuild(observation)
        layer = find(victim, observation)
        gradient = observation.update[layer.weight].double().flatten(1)
        rows = observation.update[layer.position].double()
        signals = rows.reshape(-1, rows.shape[-1])[layer.rows]
        if not gradient.any() or not signals.any():
            raise AttackFailed("nothing is left of the update of the patch embedding")
        model = observation.model
        grey = torch.full((1, *model.input_shape), _PIXEL_MEAN, device=gradient.device).double()
        mean = normalize(grey, model)
        spread = normalize(grey + _PIXEL_SPREAD, model) - mean
        # All patches have the same channels in the same columns.
        columns, spreads = (each.flatten()[layer.pixels[0]] for each in (mean, spread))
        patches = solve(signals, gradient, columns, spreads, correlation(_centers(layer, model)))
        image = _placed(patches.values, layer, mean, model)
        error = _SAFETY * _PIXEL_SPREAD * float(patches.variances.mean().sqrt())
        whole = layer.pixels.numel() == math.prod(model.input_shape)
        return Reconstruction(
            images=denormalize(image, model).clamp(0, 1).float(),
            labels=_labels(victim, observation),
            determined=torch.tensor([whole and error <= _DETERMINED], device=gradient.device),
            loss=patches.unexplained,
            iterations=0,
        )


def _placed(values: Tensor, layer: PatchLayer, mean: Tensor, model: ModelSpec) -> Tensor:
    """An image (1, C, H, W) of patches (P, m); `mean` where there are none."""
    flat = mean.flatten().clone()
    flat[layer.pixels.flatten()] = values.flatten()
    return flat.view(1, *model.input_shape)


def _centers(layer: PatchLayer, model: ModelSpec) -> Tensor:
    """Where patches are (P, 2), in sides of an image."""
    _, height, width = model.input_shape
    place = layer.pixels % (height * width)
    where = torch.stack([(place // width).double() / height, (place % width).double() / width], -1)
    return where.mean(1)


def _labels(victim: Classifier, observation: Observation) -> Tensor | None:
    """The label, where the model ends with a linear layer."""
    ends = any(isinstance(part, nn.Linear) for part in victim.head.modules())
    return infer_labels(observation) if ends else None
