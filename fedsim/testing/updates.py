"""Makes updates and trainings that a defense has to cope with, and compares updates bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedsim.types import LocalTraining, Tensors

BOUND = 2.0
"""The suites take this L2 bound as proven by the defenses before."""


def example_training(**changes: object) -> LocalTraining:
    """Returns a declared training of one step on three images, with `changes`."""
    fields: dict[str, object] = {"algorithm": "fedsgd", "steps": 1, "batch_size": 3, "lr": 0.1}
    return LocalTraining(**{**fields, **changes})  # type: ignore[arg-type]


def stream(seed: int = 1) -> torch.Generator:
    """Returns a fresh generator; the same seed is the same stream."""
    return torch.Generator().manual_seed(seed)


def mixed(scale: float = 1.0) -> dict[str, Tensor]:
    """Returns an update with every floating-point type, a 0-d, an empty and a repeated entry."""
    draw = stream(0)
    return {
        "single": scale * torch.randn(4, 3, generator=draw),
        "double": scale * torch.randn(5, generator=draw, dtype=torch.float64),
        "half": (scale * torch.randn(2, 3, generator=draw)).half(),
        "bfloat": (scale * torch.randn(3, generator=draw)).bfloat16(),
        "scalar": scale * torch.randn((), generator=draw),
        "empty": torch.zeros(0, 3),
        "ties": torch.full((6,), scale),
    }


def near(vectors: Tensor, by: float) -> Tensor:
    """Moves each of the (N, d) `vectors` in a random direction, `by` times its length."""
    directions = torch.randn(vectors.shape, generator=stream())
    lengths = vectors.norm(dim=1, keepdim=True) / directions.norm(dim=1, keepdim=True)
    perturbed: Tensor = vectors + by * lengths * directions
    return perturbed


def zeros() -> dict[str, Tensor]:
    """Returns the update of a client that has learned nothing."""
    return {name: torch.zeros_like(tensor) for name, tensor in mixed().items()}


def non_finite(value: float) -> dict[str, Tensor]:
    """Returns an update with one entry of `value`."""
    update = mixed()
    update["single"][1, 1] = value
    return update


UPDATES: Mapping[str, Callable[[], dict[str, Tensor]]] = {
    "ordinary": mixed,
    "tiny": lambda: mixed(1e-6),
    "large": lambda: mixed(1e4),
    "zero": zeros,
    "no tensors": dict,
    "NaN": lambda: non_finite(math.nan),
    "infinite": lambda: non_finite(math.inf),
}


def same(a: Tensors, b: Tensors) -> bool:
    """Whether names, shapes, types and bits are equal (NaN equals NaN)."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and bool(((a[name] == b[name]) | (a[name].isnan() & b[name].isnan())).all())
        and bool((torch.signbit(a[name]) == torch.signbit(b[name])).all())
        for name in a
    )


def copy(tensors: Tensors) -> dict[str, Tensor]:
    """Clones all tensors."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
