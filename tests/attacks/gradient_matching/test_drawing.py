"""Steps over images are those of torch's own optimizers."""

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

from fedsim_attacks.gradient_matching._drawing import _DECAY_AT, Adam, decayed_step


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99)])
def test_steps_are_those_of_torchs_adam_to_the_last_bit(betas):
    rng = torch.Generator().manual_seed(0)
    starts = [torch.randn(2, 3, 5, 4, generator=rng), torch.randn(7, generator=rng)]
    theirs = [each.clone().requires_grad_() for each in starts]
    ours = [each.clone().requires_grad_() for each in starts]
    optimizer, adam = torch.optim.Adam(theirs, betas=betas, fused=True), Adam(ours, betas)
    for rate in (0.1, 0.03, 0.3):
        slopes = [torch.randn(each.shape, generator=rng) for each in starts]
        for each, slope in zip(theirs, slopes, strict=True):
            each.grad = slope.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        # Slopes may lie in memory in another order than the variables.
        adam.step([slopes[0].to(memory_format=torch.channels_last), slopes[1]], rate)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("iterations", [7, 100, 120])
def test_rates_are_those_of_torchs_schedule(iterations):
    variable = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([variable], lr=0.1)
    schedule = MultiStepLR(optimizer, [int(iterations * share) for share in _DECAY_AT], gamma=0.1)
    for done in range(iterations):
        assert decayed_step(0.1, done, iterations) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
