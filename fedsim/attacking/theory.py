"""Applies theory's error rate of attacks to one observation."""

from __future__ import annotations

import math
from dataclasses import replace

from fedsim.models.local import mean_gradient_factor, update_noise
from fedsim.privacy.recovery import TensorBound, tensor_bound, tensor_rate
from fedsim.types import Observation


def observed_rate(observation: Observation) -> float | None:
    """Returns theory's error rate of attacks on an observation (`tensor_rate`); None if unknown.

    It is unknown without a two-layer head, if noise is all of the update, and where entries were
    removed, rounded or mixed.
    """
    head = observation.model.parameters.get("head")
    seen = observation.update.get("head.output.weight")
    variance = update_noise(observation)
    effect = observation.effect
    if not head or seen is None or variance is None or not observation.training.sums_gradients:
        return None
    if not replace(effect, noise=(), drawn=False).exact:
        return None
    images, training = observation.num_images, observation.training
    factor = mean_gradient_factor(training)
    variance *= factor**2
    # E[(signal + noise)²] = signal² + variance: the noise is independent of the signal.
    energy = factor**2 * float(seen.double().square().mean()) - variance
    # By chance the noise may be larger than all that was observed.
    part = math.sqrt(max(energy, 0.0) / images)
    if variance and not part:
        return None
    return tensor_rate(
        width=head.get("planted") or head["width"],
        dimension=observation.parameters["head.hidden.weight"].shape[1],
        images=images,
        classes=observation.model.num_classes,
        noise=math.sqrt(variance) / part if variance else 0.0,
        kept=1 - training.dropout,
    )


def observed_bound(observation: Observation) -> TensorBound:
    """Returns the paper's bound of the error of attacks on an observation (`tensor_bound`)."""
    head, effect = observation.model.parameters.get("head"), observation.effect
    if not head or "head.output.weight" not in observation.update:
        return TensorBound(reason="the model has no two-layer head")
    if effect.removed:
        return TensorBound(
            reason="entries that are kept depend on the weights, so that Stein's lemma does not "
            "apply (section 3.6)"
        )
    rate, training = observed_rate(observation), observation.training
    if rate is None:
        return TensorBound(
            reason="entries are rounded, mixed or an optimizer's steps, or noise is unknown or all "
            "there is"
        )
    planted = head.get("planted") or 0
    found = tensor_bound(
        rate,
        width=max(1, math.floor((1 - training.dropout) * (planted or head["width"]))),
        dimension=observation.parameters["head.hidden.weight"].shape[1],
        images=observation.num_images,
        classes=observation.model.num_classes,
        activation=head.get("activation", "relu"),
        steps=1 if training.algorithm == "fedsgd" else training.steps,
    )
    # Assumption A.1 is of weights N(0, I) and of unit features.
    assumed = {
        "the weights of the head are not planted, and so not normal": not planted,
        "features are not brought to unit length": not head.get("unit_features", False),
    }
    broken = next((why for why, is_so in assumed.items() if is_so), None)
    return replace(found, reason=broken or found.reason)
