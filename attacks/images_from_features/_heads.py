"""Which features a model's head gives away, whatever its kind: planted, two layers, or one.

A two-layer head is solved by `best_features`, an ordinary linear classifier by `classifier_fit`.
"""

from __future__ import annotations

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.head import TwoLayerHead
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features.classifier_fit import ClassifierFit
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.best_features import BestFeatures

Head = HeadGradient | ClassifierGradient


def head_of(observation: Observation) -> Head:
    """Reads the gradient of the head off an observation.

    Raises:
        AttackFailed: the head is of neither kind, or nothing is left of a two-layer head's update.
    """
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return HeadGradient.of(observation)
    return ClassifierGradient.of(observation)


def recover(observation: Observation, knowledge: Knowledge, seed: int) -> Reconstruction:
    """Recovers features (and the labels of an ordinary classifier) by the attack that suits.

    Raises:
        AttackFailed: the head is of neither kind, or its gradient does not hold the features.
    """
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return solve(BestFeatures(), observation, knowledge, seed).reconstruction
    found = solve(ClassifierFit(), observation, knowledge, seed).reconstruction
    assert found.features is not None
    if not bool(found.features.isfinite().all()):
        raise AttackFailed("no features reproduce the gradient of the classifier")
    return found


def recovered_if_told(
    observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction | None:
    """Recovers features; None where an ordinary classifier's gradient does not hold them.

    Raises:
        AttackFailed: the head is of neither kind, or nothing is left of a two-layer head's update.
    """
    if not isinstance(head_of(observation), ClassifierGradient):
        return recover(observation, knowledge, seed)
    try:
        return recover(observation, knowledge, seed)
    except AttackFailed:
        return None
