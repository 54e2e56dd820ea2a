"""Digests the tensors that decide a release, so that no other release shares its noise."""

from __future__ import annotations

import hashlib

import torch

from fedsim.types import Tensors


def digest(*parts: Tensors) -> str:
    """Returns a digest that only equal `parts` share: same names, shapes, types and values.

    It is a SHA-256 in hex. The order of `parts` counts, and that of names within a part does not.
    """
    found = hashlib.sha256()
    for part in parts:
        # Lengths, names, types and shapes are hashed too, so that different inputs never hash as
        # the same bytes.
        found.update(f"{len(part)}\n".encode())
        for name in sorted(part):
            value = part[name].detach().cpu().contiguous()
            found.update(f"{name!r} {value.dtype} {tuple(value.shape)}\n".encode())
            # Bytes tell 0.0 from -0.0 and one NaN from another, which comparisons do not.
            found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
