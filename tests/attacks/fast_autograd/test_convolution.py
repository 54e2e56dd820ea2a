"""Fast layers agree with PyTorch's, and replayed operations compute the same bits, or none."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pretended_device import DEVICE, pretended
from torch import nn

from fedsim_attacks.fast_autograd import _convolution, _second_order
from fedsim_attacks.fast_autograd._convolution import ConvolutionShape, Geometry, Winograd
from fedsim_attacks.fast_autograd._layers import batch_norm, group_norm
from fedsim_attacks.fast_autograd._tape import Tape, _NoReading


def test_winograd_rounds_little_in_single_precision():
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(1, 256, 16, 16, generator=stream)
    w = torch.randn(256, 256, 3, 3, generator=stream)
    geometry = Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    algorithm = Winograd(ConvolutionShape(x.shape, w.shape, geometry))
    found = algorithm.output(algorithm.images(x), algorithm.weights(w))
    exact = F.conv2d(x.double(), w.double(), None, *geometry)
    assert float((found - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("change", ["in place", "another tensor"])
def test_a_layer_notices_that_its_weights_have_changed(change, monkeypatch):
    monkeypatch.setattr(_second_order, "_WORTHWHILE", 0)
    monkeypatch.setattr(_convolution, "_CHANNELS", 1)
    monkeypatch.setattr(_convolution, "_TILES", 1)
    monkeypatch.setattr(_convolution, "_WEIGHTS_PER_POSITION", 10**9)
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


def _laid(layout, stream):
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
def test_slopes_do_not_depend_on_memory_order(kind, of_input, of_gradient):
    """PyTorch's kernels of some versions read gradients as if they lay as inputs do."""
    stream = torch.Generator().manual_seed(3)
    x, gy, v = _laid(of_input, stream), _laid(of_gradient, stream), _laid("rows", stream)
    module = nn.GroupNorm(4, 16) if kind == "group" else nn.BatchNorm2d(16)
    fast = group_norm if kind == "group" else batch_norm
    with torch.no_grad():
        module.weight.uniform_(0.5, 2, generator=stream)

    def slopes(layer, inputs, cotangent):
        inputs = inputs.detach().requires_grad_()
        # No leaf, as behind a layer: of a leaf the fast layers compute no slope.
        behind = inputs * 1.0
        if of_input == "every other column":
            behind = F.pad(inputs, (0, 4))[..., :4]
        y = layer(behind)
        (first,) = torch.autograd.grad(y, behind, cotangent, create_graph=True)
        (second,) = torch.autograd.grad(first, inputs, v.to(first))
        return [y.detach(), first.detach(), second]

    found = slopes(partial(fast, module), x, gy)
    wanted = slopes(deepcopy(module).double(), x.double(), gy.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


over_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@over_devices
def test_a_replay_computes_without_the_function(device):
    """It runs for the first result, the recording and the check; tensors it holds are read anew."""

    class Scaled:
        factor = torch.ones((), device=device)
        calls = 0

        def times(self, x, y):
            self.calls += 1
            return self.factor * x, x @ y

    scaled = Scaled()
    tape = Tape(scaled.times)
    for step in range(1, 6):
        scaled.factor.fill_(step)  # as the width of jumps is, that narrows over a descent
        x, y = torch.randn(3, 4, device=device), torch.randn(4, 2, device=device)
        for found, wanted in zip(tape(x, y), (step * x, x @ y), strict=True):
            torch.testing.assert_close(found, wanted)
    # A graph is looked at, and warmed up twice, before it is captured.
    assert scaled.calls == (3 if device == "cpu" else 6)


@over_devices
def test_a_function_that_branches_on_values_is_called(device):
    """Recorded, it would take the branch of the first inputs."""
    tape = Tape(lambda x: (x if x.sum() > 0 else -x,))
    for value in (1.0, -1.0, 1.0, -1.0):
        assert float(tape(torch.tensor([value], device=device))[0]) == 1.0


@over_devices
def test_a_function_that_does_not_repeat_itself_is_called(device):
    """What is random or has a memory is no list of operations."""
    memory = iter(range(100))
    tape = Tape(lambda x: (x + next(memory),))
    values = [float(tape(torch.zeros((), device=device))[0]) for _ in range(6)]
    assert values == sorted(set(values))


@over_devices
def test_a_caller_may_write_into_results(device):
    """Each call has memory of its own."""
    tape = Tape(lambda x: (x * 2,))
    for _ in range(5):
        (result,) = tape(torch.ones(3, device=device))
        assert torch.equal(result, torch.full((3,), 2.0, device=device))
        result.zero_()


def test_what_reads_a_value_or_another_device_is_no_graph(monkeypatch):
    """A graph would keep what it read; and a capture that fails leaves its stream behind."""
    with pretended(monkeypatch):
        there, number = torch.ones(3).to(DEVICE), torch.ones(())
        with _NoReading():
            assert (2.0 * there).sum().ndim == 0
            for reading in (lambda: float(there.sum()), lambda: there * number, there.nonzero):
                with pytest.raises(RuntimeError, match="reads"):
                    reading()
