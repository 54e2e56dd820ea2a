"""L-BFGS as all fits of features run it: 20 iterations at a time."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 20
"""Of one run, after which a fit decides how to go on."""
_MEMORY = 30
"""Steps that are remembered, over several runs."""


def lbfgs(variable: Tensor) -> torch.optim.LBFGS:
    """Makes an optimizer of `variable` each of whose steps runs `ITERATIONS` iterations."""
    return torch.optim.LBFGS(
        [variable],
        max_iter=ITERATIONS,
        max_eval=2 * ITERATIONS,
        history_size=_MEMORY,
        tolerance_grad=1e-12,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
