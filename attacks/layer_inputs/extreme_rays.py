"""Features of a batch from the inputs of a layer that are never negative.

There may be more images than classes. The gradient of any linear layer, or of a convolution to a
single pixel, has the row space of its inputs (`_layers`).
After ReLU these are the extreme rays of a cone in it (`_cone`). What the network computes from them
are features; behind fully connected layers ReLU's zeros lead back to the images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import ModelSpec, Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.layer_inputs._cone import SignalOf, find_rays
from fedsim_attacks.layer_inputs._layers import (
    Inputs,
    Layer,
    RowSpace,
    Signal,
    build_answer,
    certify_inputs,
    inputs_drift,
    recover_earlier,
    trace_layers,
)

_OFF, _ROUNDING = 5.0, 1e-6
"""Distance below 0 from which ReLU is surely off: standard deviations; share of the largest."""


@final
class ExtremeRays(DirectAttack):
    """Recovers features from inputs of a layer that are never negative, by linear programs.

    Layers are tried in their order until one shows all images; the one that takes pixels last.
    """

    paper: ClassVar[str] = (
        "fedsim: extreme rays of the non-negative cone in the row space of a layer's gradient, by "
        "linear programs with reweighting (unique: Donoho and Stodden, NeurIPS 2003; nearest: "
        "Kariyappa et al., ICML 2023)"
    )

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns features (N, d), their mean where not found, labels and images if inputs tell.

        An AttackFailed says that no layer is eligible, or that no input stands out.
        """
        layers = trace_layers(observation)
        count = observation.num_images
        eligible = [layer for layer in layers if _is_eligible(layer)]
        if not eligible:
            raise AttackFailed(
                "the model has no linear layer before its classifier, or convolution to a single "
                "pixel, whose inputs are never negative, whose scale is known, and from which each "
                "image's features follow (batch norm in training mode makes them depend on the "
                "other images); classifier_fit needs none, but fewer images than classes"
            )
        best: Inputs | None = None
        programs, reasons = 0, []
        # Pixels last: they are rays only if many are at an end of their range.
        for layer in sorted(eligible, key=lambda layer: layer.pixels):
            try:
                found, tried = _inputs(layer, count, observation.model, rng)
            except AttackFailed as error:
                reasons.append(str(error))
                continue
            programs += tried
            if best is None or len(found.values) > len(best.values):
                best = found
            if len(found.values) == count:
                break
        if best is None or not len(best.values):
            names = ", ".join(layer.name for layer in eligible)
            raise AttackFailed("; ".join(reasons) or f"no input of {names} stands out")
        pixels: Inputs | None = best if len(best.values) == count else None
        # ReLU's zeros lead from layer to layer, back to the image.
        while pixels is not None and not pixels.layer.pixels:
            pixels = recover_earlier(pixels, layers, count)
        if best.layer.pixels:
            pixels = best
        elif pixels is not None and inputs_drift(observation):
            best = pixels
        answer = build_answer(observation, best, pixels, programs)
        return replace(answer, certified=certify_inputs(observation, answer))


def _is_eligible(layer: Layer) -> bool:
    """Says whether a layer's inputs are bounded, and give features at the scale that is known."""
    if layer.features is None:
        return False
    if layer.pixels:
        return layer.bias is not None
    return layer.nonnegative and (layer.bias is not None or layer.scale_free)


def _inputs(layer: Layer, count: int, spec: ModelSpec, rng: torch.Generator) -> tuple[Inputs, int]:
    """Finds inputs of `layer` at their scale; also returns how many programs that took."""
    space = RowSpace.decompose(layer, count)
    entries = _pixel_bounds(space.rows, spec) if layer.pixels else space.rows
    rays = find_rays(entries, space.rows, space.deviation, rng, _signals(layer, space))
    values = rays.combinations @ space.rows
    errors = rays.spread / values.norm(dim=1)
    if layer.bias is None:
        values = values * (layer.length / values.norm(dim=1, keepdim=True))
        return Inputs(layer, values, errors, space.separate), rays.tried
    scale = values[:, -1:]
    # The scale has an error of its own, which divides all entries.
    errors = errors * (1 + values.norm(dim=1) / scale[:, 0].abs() / values.shape[1] ** 0.5)
    return Inputs(layer, values[:, :-1] / scale, errors, space.separate), rays.tried


def _signals(layer: Layer, space: RowSpace) -> SignalOf | None:
    """Returns the function from an input to its error signal, told by neurons left off by ReLU."""
    bias = layer.bias
    if bias is None or not layer.rectified:
        return None
    reach = layer.weights.norm(dim=1)

    def signal_of(combined: Tensor, error: float) -> Signal | None:
        values = combined[:-1] / combined[-1]
        outputs = layer.weights @ values + bias
        entry = error * float(values.norm()) / len(values) ** 0.5
        # Only neurons that errors of the input cannot have switched on are taken for off.
        return space.signal(outputs < -_OFF * entry * reach - _ROUNDING * outputs.abs().max())

    return signal_of


def _pixel_bounds(rows: Tensor, spec: ModelSpec) -> Tensor:
    """Computes how far combinations of rows (r, n + 1) are from a pixel of 0 and of 1: (r, 2 n)."""
    channels = len(spec.mean)
    each = (rows.shape[1] - 1) // channels
    mean, std = (
        rows.new_tensor(values).repeat_interleave(each) for values in (spec.mean, spec.std)
    )
    constant = rows[:, -1:]
    # pixel = std x + mean, and 1 - pixel: both are linear in (x, 1), and neither is negative.
    low = std * rows[:, :-1] + mean * constant
    spread = (std.square() + (mean.square()).maximum((1 - mean).square())).sqrt()
    return torch.cat([low / spread, (constant - low) / spread], 1)
