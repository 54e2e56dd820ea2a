"""Collects an attack's certificates of its own answer, and counts those that are false.

An attack may say of each image whether it is determined, and whether it certifies it: whether the
attacker knows, without any truth, that features and labels are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.metric import MISSING, ScoringError
from fedsim.types import Reconstruction, Truth
from fedsim.words import number_of

COSINE = 0.999
"""Least cosine with the true features at which features are right."""
LENGTH = 0.05
"""Largest relative difference of length at which features are right."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How many images of an answer an attack certifies, and how many of these are wrong."""

    images: int
    """Number of images of the answer."""
    determined: int | None
    """Number of images to which the update leaves a single answer, by the attack's word, if any."""
    certified: int | None
    """Number of images that the attack certifies to be right; None without certificates."""
    false: int | None
    """Number of certified images that are wrong; None if there are none to compare."""
    per_image: dict[str, list[bool]]
    """Key `determined` or `certified`, if the attack says so -> a truth value by true image; False
    where one has no answer. In the order of the answer where that is labels alone."""


def certificate(
    found: Reconstruction,
    truth: Truth | None,
    assignments: Mapping[str, list[int]] = MappingProxyType({}),
) -> Certificate | None:
    """Returns the certificate of an attack's answer; None if the attack states nothing.

    `truth` is None if nobody has it, and `assignments` are those of the `Scores`.

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
    # Features come first: certificates are about them, and pictures may be matched otherwise.
    order = matched[0] if matched else range(len(parts[0]))
    told = {name: int(mask.sum()) for name, mask in stated.items()}
    return Certificate(
        images=len(parts[0]),
        determined=told.get("determined"),
        certified=told.get("certified"),
        false=None if truth is None else false_certificates(found, truth),
        per_image={
            # A truth without an answer has no certificate.
            name: [k != MISSING and bool(mask[k]) for k in order]
            for name, mask in stated.items()
        },
    )


def false_certificates(found: Reconstruction, truth: Truth) -> int | None:
    """Returns the number of certified images that match no true image; None if nothing is compared.

    Each true image matches one answer at most. Matching features have a cosine of at least 0.999
    and lengths that differ by at most 5 % of the true one; matching labels are equal. Parts that
    the answer lacks do not count.
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
    """Returns whether features (M, d) are alike to true ones (N, d), for each pair, (M, N) bool."""
    count = len(truth)
    # Of features of zero the cosine is 0.
    pairs = [F.cosine_similarity(each[None], truth, dim=1, eps=1e-30) for each in features]
    cosines = torch.stack(pairs) if pairs else truth.new_zeros(0, count)
    lengths = features.norm(dim=1)[:, None] / truth.norm(dim=1).clamp_min(1e-300)
    alike: Tensor = (cosines >= COSINE) & ((lengths - 1).abs() <= LENGTH)
    return alike


def _most_pairs(right: Tensor) -> int:
    """Returns how many rows of `right` (M, N) bool can be paired with a column of their own."""
    from scipy.optimize import linear_sum_assignment

    # At a cost of -1 for each right pair, the cheapest assignment has as many of them as possible.
    rows, columns = linear_sum_assignment(-right.double().numpy())
    return int(right[rows, columns].sum())
