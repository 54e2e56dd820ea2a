"""A victim's body, fast to differentiate twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

from torch import Tensor, nn

from fedsim.models.victim import rebuild
from fedsim.types import Observation
from fedsim_attacks.fast_autograd._second_order import accelerate, drop_dead_weights
from fedsim_attacks.fast_autograd._smooth_slopes import smooth
from fedsim_attacks.gradient_matching._matching import layout


class Part(NamedTuple):
    """Some of a body's layers."""

    function: Callable[[Tensor], Tensor]
    """Inputs (N, ...) to outputs (N, ...)."""
    parameters: list[tuple[str, Tensor]]
    """With their names in the observation."""


@final
class Body:
    """A victim's body, with the weights of the observed round, fast to differentiate twice."""

    def __init__(self, observation: Observation, width: float | Tensor) -> None:
        """Rebuilds the body; `width` is that of the jumps of slopes (`smooth_slopes`), 0 of none.

        As a tensor (0-d) it may be changed later.
        """
        self.input_shape = observation.model.input_shape
        self.model = rebuild(observation)
        accelerate(self.model)
        if width:
            smooth(self.model, width)
        self._windows = drop_dead_weights(self.model, self.input_shape)
        self.model.train(observation.training.mode == "train")
        for module_name, module in self.model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                of = f"{module_name}.{name}"
                setattr(module, name, nn.Parameter(relaid(self.without_padding(of, parameter))))
        self._names = {
            id(p): name for name, p in self.model.named_parameters() if name in observation.update
        }

    def without_padding(self, name: str, tensor: Tensor) -> Tensor:
        """Selects the entries of a parameter, or of its update, that meet anything but padding."""
        window = self._windows.get(name)
        return tensor if window is None else tensor[window]

    def parameters(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Lists the parameters of one of the body's modules that were trained, with their names."""
        return [(self._names[id(p)], p) for p in module.parameters() if id(p) in self._names]


def relaid(tensor: Tensor) -> Tensor:
    """Copies a tensor to the memory order that the accelerated layers take."""
    return tensor.detach().clone(memory_format=layout(tensor))
