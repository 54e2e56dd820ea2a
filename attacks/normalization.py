"""Batch and group normalization with a closed-form second derivative.

Notation: x̂ = (x - μ) r with r = 1/σ over a set of elements that share statistics (a *group*: the
channel for batch norm; the channels of one image that belong together for group norm), y = γ x̂ + β
with γ, β per channel. m is the mean over a group, Σ the sum over a channel. For gy = ∂L/∂y:

    gx = r (g - m(g) - x̂ m(g x̂)),  g = γ gy        gγ = Σ gy x̂        gβ = Σ gy

and with fixed statistics (batch norm in eval mode) gx = r g. The second derivative is that of
s = <vx, gx> + <vγ, gγ> + <vβ, gβ> in gy, x and γ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim_attacks.pruning import wanted
