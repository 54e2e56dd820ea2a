"""Applies theory's error rate of attacks to one observation."""

from __future__ import annotations

import math
from dataclasses import replace

from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.privacy.recovery import TensorBound, tensor_bound, tensor_rate
from fedsim.types import Observation


def observed_rate(observation: Observation) -> float | None:
    """Returns theory's error rate of attacks on an observation (`tensor_rate`); None if unknown.

    Theory says nothing without a two-layer head, if noise is all of the update, and where entries
    were removed, rounded or mixed.

    The noise is the one that defenses announce. One image's part of an entry of ∂L/∂A, the gradient
    in the output weights A of the head, is estimated. It is the entries' mean square less the
    noise's variance. Clipping is in both already.
    """
    head = observation.model.parameters.get("head")
    seen = observation.update.get("head.output.weight")
    variance = _noise(observation)
    effect = observation.effect
    if not head or seen is None or variance is None:
        return None
    if not replace(effect, noise=(), drawn=False).exact:
        return None
    images, training = observation.num_images, observation.training
    factor = mean_gradient_factor(training)
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
    """Returns the paper's bound of the error of attacks on an observation.

    Its `reason` names the condition of the theorem that fails, if any.
    """
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
            reason="entries are rounded or mixed, or noise is unknown or all there is"
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


def _noise(observation: Observation) -> float | None:
    """Returns the variance of announced noise on an entry of the mean gradient; None: unknown."""
    training = observation.training
    weights = step_weights(training)
    total, variance = sum(weights), 0.0
    if not observation.effect.known:
        return None
    for noise in observation.effect.noise:
        if noise.on == "sum" or (noise.correlation and observation.releases > 1):
            return None  # what all releases share does not average out
        # Of an update it is scaled to the mean gradient; of steps, summed by their weights.
        if noise.on == "update":
            variance += mean_gradient_factor(training) ** 2 * noise.variance
        else:
            taken = _variance_of_sum(weights, noise.correlation, observation.round)
            variance += taken * noise.variance / total**2
    # The mean of several clients' updates, and of several releases of one.
    return variance / (observation.num_clients * observation.releases)


def _variance_of_sum(weights: list[float], correlation: float, round: int) -> float:
    """Returns the variance of Σ_t w_t (z_t - λ z_(t-1)) of unit z; z_0 is 0 in round 1."""
    # Collected by z_t: Σ_t (w_t - λ w_(t+1)) z_t - λ w_1 z_0, whose terms are independent.
    following = [*weights[1:], 0.0]
    kept = sum((w - correlation * f) ** 2 for w, f in zip(weights, following, strict=True))
    return kept + (correlation * weights[0]) ** 2 * (round > 1)
