"""Whether a model's update shows images by its form, so that no descent has to find the way."""

from __future__ import annotations

import math

from fedsim.forecasting.plan import Plan


def reads_in_closed_form(plan: Plan) -> bool:
    """Whether the first layer's update gives images away without a search.

    That is so of an imprint module, and of a KAN of no more images than hidden units, each behind
    noise and clipping at most, and of a single gradient.
    """
    effect, spec = plan.first.effect, plan.first.model
    altered = not effect.known or effect.removed or effect.rounded or effect.mixed
    if altered or plan.training.algorithm != "fedsgd":
        return False
    if spec.parameters.get("imprint"):
        return True
    hidden = spec.parameters.get("hidden", 32)
    return spec.name == "kan" and plan.first.num_images <= int(hidden)


def rows_are_the_image(plan: Plan) -> bool:
    """Whether each row of the first layer's exact gradient is a multiple of the only image."""
    first, effect = plan.first, plan.first.effect
    altered = not effect.known or effect.removed or effect.rounded or effect.mixed
    if altered or first.num_images != 1 or plan.training.algorithm != "fedsgd":
        return False
    weight = next((value for value in first.parameters.values() if value.ndim > 1), None)
    pixels = math.prod(first.model.input_shape)
    return weight is not None and weight.ndim == 2 and weight.shape[1] == pixels
