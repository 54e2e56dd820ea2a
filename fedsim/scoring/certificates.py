"""What an attacker says that it knows of its own answer, and whether that is so.

An attack may say of each image whether it is determined, and whether it certifies it: whether the
attacker knows, without any truth, that features and labels are right. The truth is looked at here
alone, to count certificates that are false.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.matching import MISSING
from fedsim.contracts.metric import ScoringError
from fedsim.types import Reconstruction, Truth
from fedsim.words import number_of

COSINE = 0.999
"""Least cosine of features that are right."""
LENGTH = 0.05
"""Largest relative difference of their lengths."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What an attack says of its answer, image by image, as a line of results holds it."""

    images: int
    """Number of images that it answers with."""
    determined: int | None
    """Number of images that it calls determined; None if it says nothing of that."""
    certified: int | None
    """Number of images that it certifies to be right; None if it certifies nothing."""
    false: int | None
    """How many of those are not; None if it certifies nothing, or features cannot be compared."""
    per_image: dict[str, list[bool]]
    """`determined` and `certified` of the answer to each true image, in the order of the truth; of
    labels alone in the order of the answer."""


def certificate(
    found: Reconstruction,
    truth: Truth | None,
    assignments: Mapping[str, list[int]] = MappingProxyType({}),
) -> Certificate | None:
    """Returns what `found` says of itself; None if it says nothing.

    Args:
        found: an attack's answer.
        truth: of the same batch; None if nobody has it.
        assignments: by part, which image of the answer was scored against each truth.

    Raises:
        ScoringError: a mask is not one truth value for each image of the answer.
    """
    parts = [part for part in (found.features, found.images, found.labels) if part is not None]
    masks = {"determined": found.determined, "certified": found.certified}
    stated = {name: mask for name, mask in masks.items() if mask is not None}
    if not stated or not parts:
        return None
    for name, mask in stated.items():
        if mask.dtype != torch.bool or mask.shape != parts[0].shape[:1]:
            raise ScoringError(
                f"{name}: expected {number_of(len(parts[0]), 'truth value')}, one an image, got "
                f"{mask.dtype} of shape {tuple(mask.shape)}"
            )
    matched = [assignments[part] for part in ("features", "images") if part in assignments]
    order = matched[0] if matched else range(len(parts[0]))
    told = {name: int(mask.sum()) for name, mask in stated.items()}
    return Certificate(
        images=len(parts[0]),
        determined=told.get("determined"),
        certified=told.get("certified"),
        false=None if truth is None else false_certificates(found, truth),
        per_image={
            name: [k != MISSING and bool(mask[k]) for k in order] for name, mask in stated.items()
        },
    )


def false_certificates(found: Reconstruction, truth: Truth) -> int | None:
    """Counts certified images that no true image is, each of which serves once.

    Right are features of a cosine of `COSINE` and nearly the length, and the label, of what the
    answer has. None if nothing is certified, or there is nothing to compare.
    """
    if found.certified is None or (found.features is None and found.labels is None):
        return None
    known = truth.tensors()
    if found.features is not None and "features" not in known:
        return None
    chosen = found.certified.detach().cpu().nonzero()[:, 0]
    right = torch.ones(len(chosen), len(known["labels"]), dtype=torch.bool)
    if found.features is not None:
        features, true = found.features.detach().cpu()[chosen], known["features"].detach().cpu()
        right &= _alike(features.double(), true.double())
    if found.labels is not None:
        right &= found.labels.detach().cpu()[chosen][:, None] == known["labels"].cpu()
    return len(chosen) - _most_pairs(right)


def _alike(features: Tensor, truth: Tensor) -> Tensor:
    """Returns which features (M, d) are which true ones (N, d), (M, N) bool."""
    count = len(truth)
    # Of features of zero the cosine is 0.
    pairs = [F.cosine_similarity(each[None], truth, dim=1, eps=1e-30) for each in features]
    cosines = torch.stack(pairs) if pairs else truth.new_zeros(0, count)
    lengths = features.norm(dim=1)[:, None] / truth.norm(dim=1).clamp_min(1e-300)
    alike: Tensor = (cosines >= COSINE) & ((lengths - 1).abs() <= LENGTH)
    return alike


def _most_pairs(right: Tensor) -> int:
    """Returns how many rows can be paired with a column of their own, (M, N) bool."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(-right.double().numpy())
    return int(right[rows, columns].sum())
