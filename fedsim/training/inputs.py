"""A digest of tensors: of what decides a release, so that its noise serves for nothing else."""

from __future__ import annotations

import hashlib

import torch

from fedsim.types import Tensors


def digest(*parts: Tensors) -> str:
    """Return the same text for the same tensors alone: names, shapes, types and values of each."""
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{len(part)}\n".encode())
        for name in sorted(part):
            value = part[name].detach().cpu().contiguous()
            found.update(f"{name!r} {value.dtype} {tuple(value.shape)}\n".encode())
            found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
