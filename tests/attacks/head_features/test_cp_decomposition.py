"""The decomposition of the projected tensor: known answers, and what it may depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim_attacks.head_features.tensor_features import find_components


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng.generator(seed, "components"), dtype=torch.float64)


def cubes(u: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("c,ci,cj,ck->ijk", weights, u, u, u)


def symmetric_noise(rank: int, seed: int) -> Tensor:
    noise = normal(rank, rank, rank, seed=seed)
    orders = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    noise = torch.stack([noise.permute(order) for order in orders]).sum(0)
    return noise / torch.linalg.vector_norm(noise)


def unlike(found: Tensor, truth: Tensor) -> float:
    """Largest distance of a true direction from the found one that is nearest, up to sign."""
    cosines = (found @ truth.T).abs()
    assert sorted(cosines.argmax(0).tolist()) == list(range(len(truth))), "one is found twice"
    return float((1 - cosines.max(0).values.square().clamp(max=1)).sqrt().max())


def alternating(rank: int) -> Tensor:
    return torch.tensor([(-1.0) ** i * (1 + i / 2) for i in range(rank)]).double()


@pytest.mark.parametrize("rank", [2, 4, 8])
def test_orthogonal_components_of_both_signs_are_exact(rank: int) -> None:
    axes = torch.linalg.qr(normal(rank, rank))[0]
    found, left = find_components(cubes(axes, alternating(rank)), rng.generator(0, "starts"))
    assert unlike(found, axes) < 1e-6
    assert float(left) < 1e-6
    torch.testing.assert_close(found.norm(dim=1), torch.ones(rank).double())


def test_components_shared_by_slices_that_are_no_cube() -> None:
    u, weights = F.normalize(normal(4, 4, seed=2), dim=1), normal(4, 7, seed=3)
    found, _ = find_components(
        torch.einsum("ci,cj,cs->ijs", u, u, weights), rng.generator(0, "starts")
    )
    assert unlike(found, u) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_the_error_is_that_of_the_noise(seed: int) -> None:
    """Of orthogonal components: noise of 1% of the norm moves no direction by much more."""
    axes = torch.linalg.qr(normal(8, 8, seed=seed))[0]
    tensor = cubes(axes, torch.ones(8).double())
    noise = 0.01 * torch.linalg.vector_norm(tensor) * symmetric_noise(8, seed)
    found, left = find_components(tensor + noise, rng.generator(seed, "starts"))
    assert unlike(found, axes) < 0.03
    assert float(left) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_the_fit_is_no_worse_than_the_truth(seed: int) -> None:
    """Alike components behind noise: the least error is at most that of the true ones."""
    u = F.normalize(normal(8, 8, seed=seed) + 0.5, dim=1)
    tensor = cubes(u, torch.ones(8).double())
    noise = 0.01 * torch.linalg.vector_norm(tensor) * symmetric_noise(8, seed)
    _, left = find_components(tensor + noise, rng.generator(seed, "starts"))
    assert float(left) < 0.0105


def test_draws_come_from_the_stream_alone() -> None:
    tensor = symmetric_noise(5, 1)
    results = []
    for seed in (0, 1):
        np.random.seed(seed)  # noqa: NPY002  what TensorLy would draw from by itself
        torch.manual_seed(seed)
        results.append(find_components(tensor, rng.generator(3, "starts")))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
