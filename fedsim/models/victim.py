"""Builds the victim's model as an attacker does, from an observation."""

from __future__ import annotations

from pydantic import ValidationError

from fedsim.contracts import plugins
from fedsim.contracts.defense import ModelDefense
from fedsim.models import live
from fedsim.models.base import Classifier, build
from fedsim.types import FedsimError, Observation


def rebuild(observation: Observation) -> Classifier:
    """Returns the victim's model with the global weights of the observed round, on their device.

    It is altered by the defenses in `effect.model`. Each call makes a new model, in train mode or,
    if handed to `fedsim.observe`, in the `mode` given there.

    Raises:
        PluginError: the model, or a defense that alters it, is not installed here.
        FedsimError: the observation is of no model, its weights are another model's, or the model
            was handed to `fedsim.observe` in another process.
    """
    try:
        name = observation.model.name
        defenses = [
            plugins.load_as("fedsim.defenses", each.name, (ModelDefense,)).model_validate(
                dict(each.parameters)
            )
            for each in observation.effect.model
        ]
        # Seed 0 is arbitrary: all weights are overwritten by the observed ones.
        model = live.again(name) if live.is_live(name) else build(observation.model, 0, defenses)
        state = {**observation.parameters, **observation.buffers}
        lost, extra = model.load_state_dict(state, strict=False)
    except (RuntimeError, ValidationError) as error:
        raise FedsimError(f"{observation.id}: its weights are not its model's: {error}") from error
    for name in (*lost, *extra):
        raise FedsimError(f"{observation.id}: its weights are not its model's: {name} is in one")
    return model.to(observation.device)
