"""How step sizes fall over a descent."""

from __future__ import annotations

import math

import torch

_DECAY_AT = (3 / 8, 5 / 8, 7 / 8)


def half_cosine(done: float, final: float = 0.0) -> float:
    """Falls from 1 at `done` = 0 to `final` at 1, flat at both ends; all three in [0, 1].

    Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR 2017,
    equation 5, without restarts.
    """
    return final + (1 - final) * (0.5 + 0.5 * math.cos(math.pi * done))


def stepped(done: float) -> float:
    """Falls from 1 to a tenth at 3/8, to a hundredth at 5/8 and to a thousandth at 7/8."""
    return 0.1 ** sum(done >= at for at in _DECAY_AT)


def decayed(optimizer: torch.optim.Adam, iterations: int) -> torch.optim.lr_scheduler.MultiStepLR:
    """Divides the step size by 10 at 3/8, 5/8 and 7/8 of `iterations`."""
    milestones = [int(iterations * fraction) for fraction in _DECAY_AT]
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
