"""`fedsim.preflight`: is anybody's model attackable in the way that it is to be trained?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.attacking.observe import checked_examples, observe
from fedsim.contracts.grant import Grant
from fedsim.contracts.stack import Stack
from fedsim.forecasting.forecast import Forecast, forecast
from fedsim.forecasting.plan import StandIns, UpdatePlan, plans_of_run, plans_of_scenario, synthetic
from fedsim.scenario.build import announce_defenses, build_stack, plugin_class
from fedsim.scenario.model import PluginRef
from fedsim.types import Algorithm, FedsimError, Mode, ModelSpec
from fedsim.words import number_of


def preflight(
    model: nn.Module,
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    batch_size: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    algorithm: Algorithm = "fedsgd",
    local: Mapping[str, Any] | None = None,
    mode: Mode = "train",
    head: str | None = None,
    defenses: Sequence[Mapping[str, Any] | str] = (),
    clients: int = 1,
    grant: Grant = Grant(),
    images: Tensor | None = None,
    labels: Tensor | None = None,
    seed: int = 0,
) -> Forecast:
    """Tells from a few gradients what attacks on an update of `model` will gain; runs none.

    What does not fit raises a FedsimError.

    Args:
        model: At the weights that clients will start from; takes normalized images (B, C, H, W)
            and returns logits (B, K). It is copied and stays as it is.
        input_shape: (C, H, W) of an image.
        classes: Number K of classes.
        batch_size: Number of images in each local step.
        mean: Mean of each channel, subtracted from pixels in [0, 1]; None for 0.
        std: Standard deviation of each channel, which then divides; None for 1.
        algorithm: `fedsgd` for one gradient, `fedavg` for a change of weights.
        local: Local training, of `fedavg` alone, which needs `steps` and `lr`; `momentum` is 0 and
            `batches` are `different` in each step (or the `same`) by default.
        mode: Mode of the client's layers: `train` or `eval`.
        head: Name of the linear layer that classifies; None for the last one.
        defenses: A stack as a scenario has it: names, or mappings of `name` and parameters.
        clients: Number of clients whose mean update alone is seen.
        grant: Knowledge that the attacker is granted, as `knowledge` in a scenario.
        images: (P, C, H, W) pixels in [0, 1] like the clients', P >= 2; None for synthetic ones.
        labels: (P,) integer classes of `images`; None without images.
        seed: Seed of the batches and of synthetic images.
    """
    if clients < 1:
        raise FedsimError(f"clients: expected at least 1, got {clients}")
    # `observe` wants an update beside the model; it is emptied below, as none is forecast by.
    blank = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    seen = observe(
        model,
        blank,
        input_shape=input_shape,
        classes=classes,
        batch_size=batch_size,
        mean=mean,
        std=std,
        algorithm=algorithm,
        local=local,
        mode=mode,
        head=head,
        seed=seed,
    )
    refs, stack = _stack(defenses)
    declared = seen.training
    observation = replace(
        seen,
        update={},
        training=stack.training(declared),
        defense=announce_defenses(stack, refs, declared, None),
        effect=stack.effect(declared),
        num_clients=clients,
    )
    plan = UpdatePlan(
        stack_name=" + ".join(ref.name for ref in refs) or "no defense",
        observations=(observation,),
        stack=stack,
        declared=declared,
        grant=grant,
        stand_ins=_stand_ins(images, labels, seen.model, seed),
    )
    return forecast(plan)


def preflight_file(
    origin: str | Path,
    overrides: Sequence[str] = (),
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[Forecast]:
    """Forecasts every stack, and batch size within, of a scenario file or of a run's folder.

    `overrides` are settings `key=value` of the scenario; a run takes none. `tell` is called before
    each forecast with the numbers done and of all. What does not fit is a FedsimError.
    """
    path = Path(origin)
    if path.is_dir():
        if overrides:
            raise FedsimError(
                "--set: a run has its settings; name the scenario file to change them"
            )
        plans = plans_of_run(path)
    else:
        plans = plans_of_scenario(path, overrides)
    forecasts = []
    for number, plan in enumerate(plans):
        tell(number, len(plans))
        forecasts.append(forecast(plan))
    return forecasts


def _stack(defenses: Sequence[Mapping[str, Any] | str]) -> tuple[list[PluginRef], Stack]:
    refs = []
    for number, entry in enumerate(defenses):
        given = {"name": entry} if isinstance(entry, str) else dict(entry)
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise FedsimError(f"defenses[{number}]: expected a name, got {entry!r}")
        try:
            plugin = plugin_class("fedsim.defenses", name).model_validate(given)
        except ValueError as error:
            raise FedsimError(f"defenses[{number}] ({name}): {error}") from error
        refs.append(PluginRef(name=name, parameters=plugin.model_dump()))
    return refs, build_stack(refs)


def _stand_ins(
    images: Tensor | None, labels: Tensor | None, spec: ModelSpec, seed: int
) -> StandIns:
    if images is None:
        if labels is not None:
            raise FedsimError("labels: there are no images that they are of; give images, too")
        return synthetic(spec, seed)
    if labels is None:
        raise FedsimError("images: their labels are missing; give labels, too")
    # One image alone would be its own guess.
    count = max([2, *images.shape[:1]])
    pixels, classes = checked_examples(images, labels, spec, count)
    return StandIns(
        pixels=pixels,
        labels=classes,
        guess=pixels.mean(0),
        source=f"{number_of(len(images), 'image')} that were handed over",
    )
