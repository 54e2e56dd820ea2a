"""Features behind a model's head: which attack recovers them, and what they tell of their images.

A user may name one. Else a two-layer head, planted or not, is solved by `best_features`. Behind an
ordinary linear classifier `classifier_fit` is asked where the classifier's gradient can determine
the features of so many images, and `extreme_rays`, which reads layers before it, where it cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.contracts.plugins import PluginError
from fedsim.models.head import TwoLayerHead
from fedsim.models.victim import rebuild
from fedsim.system.device import move_tensors
from fedsim.types import Observation, Reconstruction
from fedsim.words import number_of
from fedsim_attacks.classifier_features._classifier_gradient import (
    ClassifierGradient,
    derive_signals,
)
from fedsim_attacks.head_features._head_gradient import HeadGradient, Objective, labels_of

Head = HeadGradient | ClassifierGradient
FeatureSource = str | dict[str, Any]
"""`suited`, `none`, or an attack that answers features: its name, or `{name: ..., parameters}`."""
SUITED, NONE = "suited", "none"


def resolved(source: FeatureSource) -> FeatureSource:
    """Completes `source`, an attack that recovers features, by its default parameters.

    Returns `{name: ..., each parameter: ...}`; `suited` and `none` stay as they are.

    Raises:
        ValueError: there is no such attack, a parameter is wrong, or it reads no updates.
    """
    if source in (SUITED, NONE):
        return source
    named: Mapping[str, Any] = {"name": source} if isinstance(source, str) else source
    name = named.get("name")
    if not isinstance(name, str):
        raise ValueError("expected an attack's name, or {name: ..., its parameters}")
    try:
        attack = create(name, {key: named[key] for key in named if key != "name"})
    except ValidationError as error:
        wrong = [".".join([name, *map(str, e["loc"])]) + f": {e['msg']}" for e in error.errors()]
        raise ValueError("; ".join(wrong)) from None
    except PluginError as error:
        raise ValueError(str(error)) from None
    if "update" not in attack.reads:
        raise ValueError(f"{name} reads no update of a model: name an attack that answers features")
    return {"name": name, **attack.model_dump(mode="json")}


def source_attack(source: FeatureSource) -> Attack[Any] | None:
    """Makes the attack of a `resolved` source; None for `suited`, `none` and any other text."""
    if isinstance(source, str):
        return None
    return create(source["name"], {key: source[key] for key in source if key != "name"})


def head_of(observation: Observation) -> Head:
    """Reads the gradient of the head off an observation, into the CPU's memory.

    The many small problems that follow are slower on an accelerator.

    Raises:
        AttackFailed: the head is neither two-layer nor one linear layer, or nothing is left of its
            update.
    """
    observation = move_tensors(observation, "cpu")
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return HeadGradient.read(observation)
    return ClassifierGradient.read(observation)


def recover(
    observation: Observation, knowledge: Knowledge, seed: int, source: FeatureSource = SUITED
) -> Reconstruction:
    """Recovers features, and labels behind an ordinary classifier, by a suitable attack.

    The answer's `features_by` is that attack's name.

    Args:
        observation: what the server saw.
        knowledge: what the attacker is granted.
        seed: seed of the attack that recovers features.
        source: that attack as `resolved` returns it, or `suited` to choose one by the head. Any
            other text, such as an attack's bare name, is taken for `suited`.

    Raises:
        AttackFailed: the head is neither two-layer nor one linear layer, or no gradient tells the
            features of all images.
    """
    if not isinstance(source, str):
        attack = source_attack(source)
        assert attack is not None
        return _ask(source["name"], observation, knowledge, seed, attack)
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return _ask("best_features", observation, knowledge, seed)
    classifier = ClassifierGradient.read(observation)
    if classifier.excess:
        return _read_before(classifier, observation, knowledge, seed)
    return _ask("classifier_fit", observation, knowledge, seed)


def try_recovery(
    observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction | None:
    """Recovers features by `recover`; None where an ordinary classifier does not tell them.

    `seed` is that of the attack that recovers them.

    Raises:
        AttackFailed: the head is neither two-layer nor one linear layer, or nothing is left of its
            update.
    """
    if not isinstance(head_of(observation), ClassifierGradient):
        return recover(observation, knowledge, seed)
    try:
        return recover(observation, knowledge, seed)
    except AttackFailed:
        return None


def _read_before(
    classifier: ClassifierGradient, observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction:
    """Recovers features from a layer before the classifier, which holds too few.

    Error signals of the head are read off all features together: one that is wrong spoils the
    others. So they have to be determined, every one.
    """
    try:
        found = _ask("extreme_rays", observation, knowledge, seed)
    except AttackFailed as error:
        raise AttackFailed(
            f"{classifier.excess}; nor does a layer before it tell them: {error}; observe smaller "
            "batches"
        ) from error
    assert found.determined is not None
    certain = int(found.determined.sum())
    if certain < classifier.num_images:
        raise AttackFailed(
            f"{classifier.excess}; a layer before it determines those of {certain}, and all are "
            "needed; observe smaller batches"
        )
    return found


def _ask(
    name: str,
    observation: Observation,
    knowledge: Knowledge,
    seed: int,
    attack: Attack[Any] | None = None,
) -> Reconstruction:
    answer = solve(attack or create(name), observation, knowledge, seed).reconstruction
    if answer.features is None or len(answer.features) != observation.num_images:
        images = number_of(observation.num_images, "image")
        raise AttackFailed(f"{name} answers no features of {images}")
    return replace(answer, features_by=name)


def relative_noise_variance(observation: Observation, head: Head) -> float:
    """Estimates the noise's variance in an entry of the body's update u, divided by |u|².

    Added noise is the same in all entries. The variance of stochastic rounding is an upper bound,
    averaged over tensors with a spacing each. `head` is the head's part of the same update. Returns
    0 where no noise is declared, and where nothing is left of the body's update.
    """
    body = [tensor for name, tensor in observation.update.items() if name.startswith("body.")]
    energy = float(sum(tensor.double().square().sum() for tensor in body))
    if not energy or not head.noise:
        return 0.0
    if head.noisy:
        return head.noise / head.divisor**2 / energy
    spacings = [(float(t[t != 0].abs().min()) if t.any() else 0.0, t.numel()) for t in body]
    # Stochastic rounding to a spacing s has a mean variance of s² / 6.
    rounding = sum(count * spacing**2 / 6 for spacing, count in spacings)
    return rounding / sum(count for _, count in spacings) / energy


def noise_share(observation: Observation, head: Head, names: Collection[str] = ()) -> float:
    """Estimates the share of |update|² that is noise, in the body's tensors `names` or in all.

    `head` is the head's part of the same update. The estimate may exceed 1. It is 0 where no noise
    is declared, and where nothing is left of these tensors.
    """
    body = {name: t for name, t in observation.update.items() if name.startswith("body.")}
    part = [body[name] for name in names or body]
    energy, whole = (
        float(sum(t.double().square().sum() for t in of)) for of in (part, body.values())
    )
    if not energy:
        return 0.0
    return (
        relative_noise_variance(observation, head) * sum(t.numel() for t in part) * whole / energy
    )


class Signals(NamedTuple):
    """Labels, error signals and clipping of images, as their features tell them."""

    labels: Tensor
    """(N,) int64."""
    errors: Tensor
    """e_i (N, d): the derivative of the mean loss in the features."""
    scale: Tensor
    """Factor (0-d) that the client's defense has applied to its update; 1 unless it clips."""


def signals(observation: Observation, features: Tensor) -> Signals:
    """Derives labels and error signals from `features` (N, d) in their true lengths.

    A label is the class in which ∂L/∂A pulls a feature up. The scale is that of ∂L/∂A, over what
    the head itself computes. Under dropout the head differs for each image. Error signals are then
    read off ∂L/∂W = S X as e_i = Σ_j s_ji w_j, and are scaled as the update is.
    """
    device = features.device
    found = _signals(move_tensors(observation, "cpu"), features.cpu())
    return Signals(*(each.to(device) for each in found))


def _signals(observation: Observation, features: Tensor) -> Signals:
    head = head_of(observation)
    if isinstance(head, ClassifierGradient):
        return Signals(*derive_signals(head, features))
    model = rebuild(observation).eval()
    with torch.no_grad():
        observed = Objective(head)(features).errors
        labels = labels_of(head, features, observed)
    if head.dropout and head.exact and head.steps == 1:
        # Dropped neurons are in S already, which is read off ∂L/∂W = S X: no head need be run.
        shares = head.grad_hidden.double() @ torch.linalg.pinv(features.double())  # (m, N)
        errors_read = (shares.T @ head.hidden.double()).to(features.dtype)
        return Signals(labels, errors_read, observed.new_ones(()))
    features = features.detach().requires_grad_()
    logits = model.head(features)
    (errors,) = torch.autograd.grad(F.cross_entropy(logits, labels), features)
    expected = (logits.detach().softmax(1) - F.one_hot(labels, logits.shape[1])).T / len(labels)
    # Least squares of observed ≈ scale · expected: what clipping has multiplied by.
    scale = (observed * expected).sum() / expected.square().sum()
    return Signals(labels, errors, scale if head.clipped else torch.ones_like(scale))
