"""The algorithms of a convolution agree with PyTorch's, and a layer feeds them rightly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim_attacks.fast_autograd import _convolution, _second_order
from fedsim_attacks.fast_autograd._convolution import (
    ConvolutionAlgorithm,
    ConvolutionShape,
    Direct,
    Geometry,
    Patches,
    Winograd,
)
from fedsim_attacks.fast_autograd._layers import batch_norm, group_norm

PLAIN = Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
GEOMETRIES = {
    "plain": (PLAIN, (3, 3)),
    "no padding": (PLAIN._replace(padding=(0, 0)), (3, 3)),
    "uneven padding": (PLAIN._replace(padding=(2, 0)), (3, 3)),
    "stride": (PLAIN._replace(stride=(2, 1)), (3, 3)),
    "dilation": (PLAIN._replace(dilation=(1, 2)), (3, 3)),
    "pointwise": (PLAIN._replace(padding=(0, 0)), (1, 1)),
    "uneven kernel": (PLAIN, (3, 2)),
}
SIZES = [(1, 4, 4), (2, 6, 9), (3, 8, 5), (1, 11, 3)]
"""(N, H, W): whole tiles of Winograd's, parts of them, and both."""


def operands(
    problem: ConvolutionShape, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    shapes = problem.images, problem.weights, problem.weights[:1]
    x, w, b = (torch.randn(shape, generator=stream, dtype=dtype) for shape in shapes)
    gy = torch.randn(
        problem.images[0], problem.weights[0], *problem.outputs, generator=stream, dtype=dtype
    )
    last = torch.channels_last
    return x.to(memory_format=last), w.to(memory_format=last), b, gy


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("kind", [Direct, Patches, Winograd])
def test_the_three_products_are_pytorchs(
    kind: type[ConvolutionAlgorithm],
    geometry: tuple[Geometry, tuple[int, int]],
    size: tuple[int, int, int],
) -> None:
    moves, kernel = geometry
    problem = ConvolutionShape(
        torch.Size((size[0], 5, *size[1:])), torch.Size((7, 5, *kernel)), moves
    )
    if min(problem.outputs) < 1:
        pytest.skip("the kernel does not fit into the image")
    if kind is Winograd and not Winograd.applies(problem):
        assert kernel != (3, 3) or moves.stride != (1, 1) or moves.dilation != (1, 1)
        return
    algorithm = kind(problem)
    x, w, b, gy = operands(problem)
    x.requires_grad_()
    w.requires_grad_()
    expected = F.conv2d(x, w, b, *moves)
    to_x, to_w = torch.autograd.grad(expected, (x, w), gy)
    with torch.no_grad():
        images, weights, gradients = (
            algorithm.images(x),
            algorithm.weights(w),
            algorithm.gradients(gy),
        )
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(algorithm.output(images, weights, b), expected, **close)
        without = algorithm.output(images, weights)
        torch.testing.assert_close(without + b.view(-1, 1, 1), expected, **close)
        found = algorithm.input_gradient(gradients, images, weights)
        torch.testing.assert_close(found, to_x, **close)
        found = algorithm.weight_gradient(gradients, images, weights)
        torch.testing.assert_close(found, to_w, **close)


def test_winograd_rounds_little_in_single_precision() -> None:
    problem = ConvolutionShape(torch.Size((1, 256, 16, 16)), torch.Size((256, 256, 3, 3)), PLAIN)
    x, w, _, _ = operands(problem, torch.float32)
    algorithm = Winograd(problem)
    found = algorithm.output(algorithm.images(x), algorithm.weights(w))
    exact = F.conv2d(x.double(), w.double(), None, *PLAIN)
    assert float((found - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("change", ["in place", "another tensor"])
def test_a_layer_notices_that_its_weights_have_changed(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_second_order, "_WORTHWHILE", 0)
    monkeypatch.setattr(_convolution, "_CHANNELS", 1)
    monkeypatch.setattr(_convolution, "_TILES", 1)
    monkeypatch.setattr("fedsim_attacks.fast_autograd._convolution._WEIGHTS_PER_POSITION", 10**9)
    layer = nn.Conv2d(5, 7, 3, padding=1).double()
    _second_order.accelerate(layer)
    x = torch.randn(2, 5, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias, padding=1))
        with torch.no_grad():
            if change == "in place":
                layer.weight.mul_(1.5)
            else:
                layer.weight = nn.Parameter(layer.weight + 1)


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
