"""Plants a malicious server's weights in a model: neurons of its head, or an imprint module.

With `observe.plant` the server trains an honest model (`build_honest`), and plants only in the
weights that it sends with a probe (`plant_neurons`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import ModelDefense
from fedsim.models.base import Classifier, build
from fedsim.models.head import TwoLayerHead
from fedsim.models.imprint import Imprint
from fedsim.types import ModelSpec, Tensors


def plants(model: Classifier) -> bool:
    """Whether `model` has neurons that the server plants: in its head or an imprint module."""
    head = model.head
    return model.imprint is not None or (isinstance(head, TwoLayerHead) and head.config.planted > 0)


def build_honest(spec: ModelSpec, seed: int, defenses: Sequence[ModelDefense] = ()) -> Classifier:
    """Builds the model of `spec`, as `defenses` alter it, with nothing planted.

    Arguments and errors are those of `fedsim.models.base.build`.
    """
    if spec.parameters.get("head"):
        # The width stays, so that its weights fit the model that is probed.
        head = {**spec.parameters["head"], "planted": 0}
        spec = replace(spec, parameters={**spec.parameters, "head": head})
    model = build(spec, seed, defenses)
    if model.imprint is not None:
        model.imprint.unplant()
    return model


def plant_neurons(model: Classifier, parameters: Tensors, seed: int) -> dict[str, Tensor]:
    """Returns a copy of `parameters` with the server's neurons planted, a function of `seed`.

    `parameters` are those of `model`, by name, and stay as they are.
    """
    values = dict(parameters)
    with rng.global_stream(seed):
        for name, part in model.named_children():
            if isinstance(part, TwoLayerHead | Imprint):
                # The model itself stays as it is; weights that `plant` leaves alone have to be
                # those given.
                part = deepcopy(part)
                state = {n: t for n, t in parameters.items() if n.startswith(f"{name}.")}
                part.load_state_dict({n.removeprefix(f"{name}."): t for n, t in state.items()})
                part.plant()
                fresh = dict(part.named_parameters(prefix=name))
                values |= {n: fresh[n].detach().cpu() for n in state}
    return values
