"""Fast norm layers on tensors of every memory order, against PyTorch's own in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim_attacks.fast_autograd._layers import batch_norm, group_norm

_LAYOUTS = ("rows", "channels last", "every other column")


def _laid(layout: str, stream: torch.Generator) -> Tensor:
    """Draws (3, 16, 4, 4)."""
    shape = (3, 16, 4, 4)
    if layout == "one value of each map":
        return torch.randn(3, 16, 1, 1, generator=stream).expand(shape)
    if layout == "every other column":
        return torch.randn(3, 16, 4, 8, generator=stream)[..., ::2]
    drawn = torch.randn(shape, generator=stream)
    return drawn.to(memory_format=torch.channels_last) if layout == "channels last" else drawn


@pytest.mark.parametrize("of_input", _LAYOUTS)
@pytest.mark.parametrize("of_gradient", (*_LAYOUTS, "one value of each map"))
@pytest.mark.parametrize("kind", ["group", "batch"])
def test_slopes_do_not_depend_on_memory_order(kind: str, of_input: str, of_gradient: str) -> None:
    """PyTorch's kernels of some versions read gradients as if they lay as inputs do."""
    stream = torch.Generator().manual_seed(3)
    x, gy, v = _laid(of_input, stream), _laid(of_gradient, stream), _laid("rows", stream)
    module = nn.GroupNorm(4, 16) if kind == "group" else nn.BatchNorm2d(16)
    fast = group_norm if kind == "group" else batch_norm
    with torch.no_grad():
        module.weight.uniform_(0.5, 2, generator=stream)

    def slopes(inputs: Tensor, weight: Tensor, cotangent: Tensor, own: bool) -> list[Tensor]:
        inputs = inputs.detach().requires_grad_()
        # No leaf, as behind a layer: of a leaf the fast layers compute no slope.
        behind = inputs * 1.0
        if of_input == "every other column":
            behind = F.pad(inputs, (0, 4))[..., :4]
        if own:
            y = fast(module, behind)  # type: ignore[arg-type]
        elif kind == "group":
            y = F.group_norm(behind, 4, weight, module.bias.to(weight), module.eps)
        else:
            y = F.batch_norm(behind, None, None, weight, module.bias.to(weight), True, eps=1e-5)
        (first,) = torch.autograd.grad(y, behind, cotangent, create_graph=True)
        (second,) = torch.autograd.grad(first, inputs, v.to(first))
        return [y.detach(), first.detach(), second]

    found = slopes(x, module.weight, gy, own=True)
    wanted = slopes(x.double(), module.weight.detach().double(), gy.double(), own=False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)
