"""Features behind a model's head: which attack recovers them, and what they tell of their images.

A user may name one. Else a two-layer head is solved by `best_features`. Behind a linear classifier
`classifier_fit` is asked where the classifier's gradient can determine the features of so many
images, and `extreme_rays`, which reads layers before it, where it cannot.

Where noise, pruning or rounding blurs the head's gradient, a fit of features alone ends in local
minima. Images that reproduce the whole update roughly know which features are whose: a fit from
there goes down to the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.contracts.plugins import PluginError
from fedsim.models.base import Classifier
from fedsim.models.head import TwoLayerHead
from fedsim.models.victim import rebuild
from fedsim.system.device import move_tensors
from fedsim.types import Observation, Reconstruction
from fedsim.words import number_of
from fedsim_attacks.classifier_features import _certificates
from fedsim_attacks.classifier_features._classifier_gradient import (
    ClassifierGradient,
    derive_signals,
)
from fedsim_attacks.classifier_features._profile import Consistency, Fits
from fedsim_attacks.head_features import _joint_fit, head_fit
from fedsim_attacks.head_features._head_gradient import (
    HeadGradient,
    Objective,
    labels_of,
    residual_over_noise,
)

Head = HeadGradient | ClassifierGradient
FeatureSource = str | dict[str, Any]
"""`suited`, `none`, or an attack that answers features: its name, or `{name: ..., parameters}`."""
SUITED, NONE = "suited", "none"


def resolved(source: FeatureSource) -> FeatureSource:
    """Completes `source` by default parameters, or raises ValueError; `suited` and `none` stay."""
    if source in (SUITED, NONE):
        return source
    parameters = {"name": source} if isinstance(source, str) else dict(source)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise ValueError("expected an attack's name, or {name: ..., its parameters}")
    try:
        attack = create(name, parameters)
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
    """Reads the head's gradient onto the CPU; AttackFailed of unknown heads, or if it is lost."""
    # The many small problems that follow are slower on an accelerator.
    observation = move_tensors(observation, "cpu")
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return HeadGradient.read(observation)
    return ClassifierGradient.read(observation)


def recover(
    observation: Observation, knowledge: Knowledge, seed: int, source: FeatureSource = SUITED
) -> Reconstruction:
    """Recovers a batch's features (N, d) and, by some attacks, its labels.

    `features_by` of the answer names the attack. AttackFailed if not all images' features are told.

    Args:
        observation: The batch's update.
        knowledge: What the attack that recovers features is granted.
        seed: Seed of that attack.
        source: A `resolved` source that names the attack, or `suited`: what suits the head.
    """
    if source != SUITED:
        return _ask(source, observation, knowledge, seed)
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return _ask("best_features", observation, knowledge, seed)
    classifier = ClassifierGradient.read(observation)
    if classifier.excess:
        return _read_before(classifier, observation, knowledge, seed)
    return _ask("classifier_fit", observation, knowledge, seed)


def try_recovery(
    observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction | None:
    """Recovers features by `recover`; None where an ordinary classifier does not tell them."""
    ordinary = isinstance(head_of(observation), ClassifierGradient)
    with suppress(AttackFailed) if ordinary else nullcontext():
        return recover(observation, knowledge, seed)
    return None


def _read_before(
    classifier: ClassifierGradient, observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction:
    """Recovers features from a layer before the classifier, which holds too few."""
    try:
        found = _ask("extreme_rays", observation, knowledge, seed)
    except AttackFailed as error:
        raise AttackFailed(
            f"{classifier.excess}; nor does a layer before it tell them: {error}; observe smaller "
            "batches"
        ) from error
    # Error signals are read off all features together: one that is wrong spoils the others.
    assert found.determined is not None
    certain = int(found.determined.sum())
    if certain < classifier.num_images:
        raise AttackFailed(
            f"{classifier.excess}; a layer before it determines those of {certain}, and all are "
            "needed; observe smaller batches"
        )
    return found


def _ask(
    source: FeatureSource, observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction:
    name = source if isinstance(source, str) else source["name"]
    attack = source_attack(source) or create(name)
    answer = solve(attack, observation, knowledge, seed).reconstruction
    if answer.features is None or len(answer.features) != observation.num_images:
        images = number_of(observation.num_images, "image")
        raise AttackFailed(f"{name} answers no features of {images}")
    return replace(answer, features_by=name)


def relative_noise_variance(observation: Observation, head: Head) -> float:
    """Estimates the noise's variance in an entry of the body's update u, divided by |u|²."""
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
    """Estimates the share of |update|² that is noise, in the body's tensors `names` or in all."""
    body = {name: t for name, t in observation.update.items() if name.startswith("body.")}
    part = [body[name] for name in names or body]
    energy, whole = (
        float(sum(t.double().square().sum() for t in of)) for of in (part, body.values())
    )
    entries, variance = sum(t.numel() for t in part), relative_noise_variance(observation, head)
    return variance * entries * whole / energy if energy else 0.0


class Signals(NamedTuple):
    """Features of images, and what these tell: labels, error signals and clipping."""

    features: Tensor  # (N, d)
    labels: Tensor  # (N,) int64
    errors: Tensor  # e_i (N, d): the derivative of the mean loss in the features
    scale: Tensor
    """Factor (0-d) that the client's defense has applied to its update; 1 unless it clips."""


def signals(observation: Observation, features: Tensor, labels: Tensor | None = None) -> Signals:
    """Derives labels and error signals from `features` (N, d) in their true lengths.

    `labels` (N,) that are known are kept, behind an ordinary classifier.
    """
    known = None if labels is None else labels.cpu()
    observed, head = move_tensors(observation, "cpu"), head_of(observation)
    if isinstance(head, ClassifierGradient):
        found = derive_signals(head, features.cpu(), known)
    else:
        found = _planted_signals(rebuild(observed).eval(), head, features.cpu())
    return Signals(features, *(each.to(features.device) for each in found))


def _planted_signals(
    model: Classifier, head: HeadGradient, features: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        observed = Objective(head)(features).errors
        labels = labels_of(head, features, observed)
    if head.dropout and head.exact and head.steps == 1:
        # Dropped neurons are in S already, which is read off ∂L/∂W = S X: no head need be run.
        shares = head.grad_hidden.double() @ torch.linalg.pinv(features.double())  # (m, N)
        errors_read = (shares.T @ head.hidden.double()).to(features.dtype)
        return labels, errors_read, observed.new_ones(())
    features = features.detach().requires_grad_()
    logits = model.head(features)
    (errors,) = torch.autograd.grad(F.cross_entropy(logits, labels), features)
    expected = (logits.detach().softmax(1) - F.one_hot(labels, logits.shape[1])).T / len(labels)
    # Least squares of observed ≈ scale · expected: what clipping has multiplied by.
    scale = (observed * expected).sum() / expected.square().sum()
    return labels, errors, scale if head.clipped else torch.ones_like(scale)


_CLASSIFIER_ITERATIONS = 120  # iterations of a descent from features of images
_APART = 0.5
"""Share of the distance to the nearest other features up to which an image's may be off."""


def _are_apart(classifier: ClassifierGradient, features: Tensor) -> bool:
    """Says whether noise leaves each image's features nearer to the truth than to another's."""
    problem = Consistency(classifier)
    errors = _certificates.bound_errors(problem, _at(problem, features), 0) * features.norm(dim=1)
    # An error of less than half the way to another image's features cannot confuse them.
    apart = torch.cdist(features, features).fill_diagonal_(torch.inf).amin(1)
    return bool((errors < _APART * apart).all())


def _fit_classifier(
    classifier: ClassifierGradient, features: Tensor, other: Tensor
) -> Tensor | None:
    """Descends from images' `features` (N, d); returns `other` if that explains more."""
    if are_explained(classifier, features):
        return None
    problem = Consistency(classifier)
    refit = _at(problem, features, _CLASSIFIER_ITERATIONS)
    if float(refit.losses[0]) <= float(_at(problem, other).losses[0]):
        return refit.features[0].to(features.dtype)
    return other


def _at(problem: Consistency, features: Tensor, iterations: int = 0) -> Fits:
    """Evaluates the problem at `features` (N, d), or descends from them."""
    labels = derive_signals(problem.classifier, features)[0]
    return problem.descend(problem.unknowns(features[None]), labels[None], iterations)


_ITERATIONS = 1500  # iterations of the fit behind pruning and rounding; it mostly ends earlier
_ALL = 1e-5  # share of ∂L/∂A that features may leave where there is no noise
_EXCHANGED = 0.1
"""Share of their difference that two features which are hard to tell apart may have exchanged."""
_CHANCE = 4.0
"""Gain over that which as many unknowns have by fitting noise alone, up to which it is chance."""


def are_explained(head: Head, features: Tensor) -> bool:
    """Says whether `features` (N, d) explain the head's gradient up to its noise."""
    features = features.cpu()
    if isinstance(head, ClassifierGradient):
        problem = Consistency(head)
        return _certificates.is_explained(problem, float(_at(problem, features).losses[0]))
    most = 1 + _CHANCE * _explained_by_chance(head, features) if head.noise else _ALL
    return _misfit(head, features) < most


def are_determined(head: Head, features: Tensor, exchanged: float = _EXCHANGED) -> bool:
    """Says whether moving `features` (N, d) by a share `exchanged` explains the gradient worse."""
    features = features.cpu()
    if head.exact:
        return True
    if isinstance(head, ClassifierGradient):
        return bool(head.excess) or _are_apart(head, features)
    misfit = _misfit(head, features)
    # The features of two images that nearly mix are the easiest to confuse.
    gap = min(_misfit(head, other) for other in _alternatives(features, exchanged)) - misfit
    if not head.noise:
        return gap > misfit
    return gap > max(misfit - 1, _CHANCE * _explained_by_chance(head, features))


def doubts(head: Head, features: Tensor) -> Tensor:
    """Estimates the squared sine, (N,) in [0, 1], by which each of the `features` (N, d) is off."""
    on_processor = features.cpu()
    # More images than a classifier can tell apart have features of another layer.
    if head.excess if isinstance(head, ClassifierGradient) else head.dropout:
        found = torch.zeros(len(features))
    elif isinstance(head, ClassifierGradient):
        problem = Consistency(head)
        bounds = _certificates.bound_errors(problem, _at(problem, on_processor), 0)
        found = bounds.square().nan_to_num(1)
    else:
        objective = Objective(head)
        left = float(objective(on_processor).loss) - objective.noise_floor(head.noise)
        found = torch.full((len(features),), left)
    return found.clamp(0, 1).to(features)


def refit_features(head: Head, features: Tensor, other: Tensor) -> Tensor | None:
    """Refits `features` (N, d), or returns `other` if that explains more; None if explained."""
    found = _fit(head, features.cpu(), other.cpu())
    return None if found is None else found.to(features.device)


def _fit(head: Head, features: Tensor, other: Tensor) -> Tensor | None:
    if isinstance(head, ClassifierGradient):
        return _fit_classifier(head, features, other)
    if head.noisy:
        refit = _joint_fit.fit_whole_gradient(head, features)
    else:
        refit = head_fit.fit_output(head, features, _ITERATIONS)
    before, after = _misfit(head, features), _misfit(head, refit)
    # As many unknowns explain some of the noise in any case: such a gain says nothing.
    if head.noise and before - after < _CHANCE * _explained_by_chance(head, features):
        return None
    return refit if after <= _misfit(head, other) else _permute(other, features)


def _alternatives(features: Tensor, exchanged: float) -> Iterator[Tensor]:
    """Yields features (N, d) that are hard to distinguish from `features`."""
    for i, j in itertools.combinations(range(len(features)), 2):
        for by in (-exchanged, exchanged):
            other = features.clone()
            away = by * (features[i] - features[j])
            other[i] += away
            other[j] -= away
            yield other
    if len(features) == 1:
        # A single image has none to be confused with but itself at another length.
        yield from ((1 - exchanged) * features, (1 + exchanged) * features)


def _misfit(head: HeadGradient, features: Tensor) -> float:
    """Computes the mean squared residual over the noise's variance, or over the gradient's."""
    if head.noisy:
        return residual_over_noise(head, features)
    value = Objective(head)(features)
    return float(value.residual.square().mean()) / head.noise if head.noise else float(value.loss)


def _explained_by_chance(head: HeadGradient, features: Tensor) -> float:
    """Computes the part of the noise's mean square that a fit of so many features explains."""
    parts = [head.grad_output]
    if head.noisy:
        parts += [head.grad_hidden, head.grad_bias]
    return features.numel() / sum(part.numel() for part in parts)


def _permute(refit: Tensor, reference: Tensor) -> Tensor:
    """Permutes `refit` (N, d) so that each row is nearest to that of `reference` in its place."""
    from scipy.optimize import linear_sum_assignment  # which takes half a second

    _, nearest = linear_sum_assignment(torch.cdist(reference, refit).numpy())
    return refit[torch.from_numpy(nearest)]
