"""Which attack recovers the features behind a model's head.

A two-layer head, planted or not, is solved by `best_features`. Behind an ordinary linear classifier
`classifier_fit` is asked where the classifier's gradient can determine the features of so many
images, and `extreme_rays`, which reads layers before it, where it cannot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedsim.contracts.attack import Attack, AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.head import TwoLayerHead
from fedsim.models.victim import rebuild
from fedsim.system.device import moved
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features.classifier_fit import ClassifierFit
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.best_features import BestFeatures
from fedsim_attacks.layer_inputs.extreme_rays import ExtremeRays

Head = HeadGradient | ClassifierGradient


def head_of(observation: Observation) -> Head:
    """Reads the gradient of the head off an observation, into the memory of the processor.

    What is solved there are many small problems, which an accelerator makes slower.

    Raises:
        AttackFailed: the head is of neither kind, or nothing is left of a two-layer head's update.
    """
    observation = moved(observation, "cpu")
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return HeadGradient.of(observation)
    return ClassifierGradient.of(observation)


def recover(observation: Observation, knowledge: Knowledge, seed: int) -> Reconstruction:
    """Recovers features (and the labels of an ordinary classifier) by the attack that suits.

    The answer names that attack (`features_by`).

    Raises:
        AttackFailed: the head is of neither kind, or no gradient holds the features of all images.
    """
    if isinstance(rebuild(observation).head, TwoLayerHead):
        return _asked("best_features", BestFeatures(), observation, knowledge, seed)
    classifier = ClassifierGradient.of(observation)
    if classifier.excess:
        return _read_before(classifier, observation, knowledge, seed)
    found = _asked("classifier_fit", ClassifierFit(), observation, knowledge, seed)
    assert found.features is not None
    if not bool(found.features.isfinite().all()):
        raise AttackFailed("no features reproduce the gradient of the classifier")
    return found


def recovered_if_told(
    observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction | None:
    """Recovers features; None where nothing tells them behind an ordinary classifier.

    Raises:
        AttackFailed: the head is of neither kind, or nothing is left of a two-layer head's update.
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
        found = _asked("extreme_rays", ExtremeRays(), observation, knowledge, seed)
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


def _asked(
    name: str, attack: Attack[Any], observation: Observation, knowledge: Knowledge, seed: int
) -> Reconstruction:
    return replace(solve(attack, observation, knowledge, seed).reconstruction, features_by=name)
