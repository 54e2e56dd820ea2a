"""Flower's strategies by class name: built, checked before any training, and their memory kept.

A user sets `eta`, `beta_1` and the like; who takes part and how replies are weighted is fedsim's.
"""

from __future__ import annotations

import bisect
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from fedsim.types import FedsimError, Tensors
from fedsim.words import nearest, number_of

_SET_BY_FEDSIM: dict[str, Any] = {
    "fraction_train": 1.0,  # of the clients that this round's seed has sampled
    "fraction_evaluate": 0.0,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 0,
    "min_available_nodes": 1,
}
# Parameters that have to match fedsim's own messages, or that fedsim decides itself.
_LEFT_ALONE = (
    "weighted_by_key",
    "arrayrecord_key",
    "configrecord_key",
    "train_loss_key",
    "train_metrics_aggr_fn",
    "evaluate_metrics_aggr_fn",
    "selection_rule",
)

_TREES = "it aggregates gradient-boosted trees, not tensors"
REFUSED = {
    "FedProx": "its clients must add a proximal term to their loss, or it is FedAvg; use FedAvg",
    "FedXgbBagging": _TREES,
    "FedXgbCyclic": _TREES,
}
"""Strategies that would run without doing what their names say, with the reason."""

_WRAPPERS = "DifferentialPrivacy"
"""Prefix of the names of strategies that wrap another one."""
_OF_CLIPPED = ("DifferentialPrivacyClientSideFixedClipping",)
"""Strategies whose noise is made for clients that clip to `clipping_norm` themselves."""
# Strategies that use nothing but the mean of the updates, and those that weigh by losses.
_FROM_MEAN = ("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedYogi")
_FROM_LOSS = ("QFedAvg",)


def names() -> list[str]:
    """Returns the names of the strategies that fedsim runs, sorted."""
    base = ("Result", "Strategy")
    return sorted(name for name in flower.__all__ if name not in base and name not in REFUSED)


def build(name: str, parameters: Mapping[str, Any]) -> Strategy:
    """Builds a fresh strategy of Flower's class `name`; what does not work is a `FedsimError`.

    `parameters` are its constructor's. The `strategy` of a wrapper is written `{name: FedAvg,
    <parameter>: ...}` or as a name, and `accountant` as `{max_epsilon: ε, delta: δ}`.
    """
    if name in REFUSED:
        raise FedsimError(f"federation.strategy: {name} is not supported: {REFUSED[name]}")
    if name not in names():
        raise FedsimError(
            f"federation.strategy: no strategy {name!r} in flwr.serverapp.strategy"
            f"{nearest(name, names())} (there are: {', '.join(names())})"
        )
    cls = getattr(flower, name)
    # The annotations are strings, and values are validated against the types that they name.
    accepted = inspect.signature(cls, eval_str=True).parameters
    free = {
        key: parameter
        for key, parameter in accepted.items()
        if key not in _SET_BY_FEDSIM and key not in _LEFT_ALONE
    }
    sampled = parameters.get("num_sampled_clients")
    # The accountant is made of two settings here, where Flower wants an object.
    values = {
        key: _accountant(value, sampled)
        if key == "accountant" and key in free
        else _value(name, key, value, free)
        for key, value in parameters.items()
    }
    for key, parameter in free.items():
        if parameter.default is parameter.empty and key not in values:
            raise FedsimError(f"federation.strategy_parameters: {name} needs {key!r}; set it")
    ours = {key: value for key, value in _SET_BY_FEDSIM.items() if key in accepted}
    try:
        built: Strategy = cls(**ours, **values)
    except ValueError as error:
        raise FedsimError(f"federation.strategy_parameters: {name}: {error}") from error
    return built


def rounds_within_budget(strategy: Strategy, most: int) -> int:
    """Returns how many rounds, from 0 to `most`, the strategy's accountant allows.

    A strategy without an accountant allows `most`.
    """
    accountant = getattr(strategy, "accountant", None)
    if accountant is None:
        return most
    sampled, population = strategy.num_sampled_clients, accountant.config.population_size  # type: ignore[attr-defined]
    event = GaussianPrivacyEvent(strategy.noise_multiplier, sampled, population)  # type: ignore[attr-defined]
    # More rounds never spend less, so that the first round too many is found by halving.
    return bisect.bisect_left(
        range(1, most + 1), True, key=lambda rounds: accountant.would_exceed(event, count=rounds)
    )


def check_fit(
    name: str,
    parameters: Mapping[str, Any],
    *,
    sees_each: bool,
    losses: bool,
    bound: float,
    rate: float = 1.0,
) -> None:
    """Raises a FedsimError if a strategy needs more than the server sees, or shorter updates.

    Args:
        name: The strategy's class name.
        parameters: The strategy's parameters.
        sees_each: Whether the server sees each client's update, or only their combination.
        losses: Whether clients report their loss.
        bound: L2 norm that no client's update exceeds; inf if none is proven.
        rate: Largest length by which weights move for an update of length 1.
    """
    if not sees_each and name not in _FROM_MEAN:
        raise FedsimError(
            f"federation.strategy: {name} needs each client's update, but the stack shows the "
            f"server only their combination; use one of {', '.join(_FROM_MEAN)}"
        )
    if not losses and name in _FROM_LOSS:
        raise FedsimError(
            f"federation.strategy: {name} needs each client's loss, which clients do not report "
            "under differential privacy; use FedAvg"
        )
    if name in _OF_CLIPPED and rate * bound > (norm := parameters["clipping_norm"]):
        raise FedsimError(
            f"federation.strategy: {name} expects clients that clip their updates to {norm:g}, and "
            f"the stack leaves them up to {rate * bound:g}; end it with the defense clip, norm: "
            f"{norm / rate:g}"
        )
    if "strategy" in parameters:
        # A wrapper hands on what it gets, so that the strategy inside has to fit, too.
        inner, inner_parameters = _inner(parameters["strategy"])
        check_fit(
            inner, inner_parameters, sees_each=sees_each, losses=losses, bound=bound, rate=rate
        )


def check_sampled(parameters: Mapping[str, Any], sampled: int) -> None:
    """Raises a FedsimError if a strategy's `num_sampled_clients` is given and not `sampled`."""
    told = parameters.get("num_sampled_clients")
    if told not in (None, sampled):
        raise FedsimError(
            f"federation.strategy_parameters: num_sampled_clients is {told}, but a round samples "
            f"{number_of(sampled, 'client')}, and the noise depends on it"
        )


def _value(name: str, key: str, value: Any, accepted: Mapping[str, inspect.Parameter]) -> Any:
    if key in _SET_BY_FEDSIM or key in _LEFT_ALONE:
        raise FedsimError(
            f"federation.strategy_parameters: {key!r} is set by fedsim; remove it (the share of "
            "clients is federation.participation)"
        )
    if key not in accepted:
        raise FedsimError(
            f"federation.strategy_parameters: {name} has no parameter {key!r}"
            f"{nearest(key, accepted)} (it has: {', '.join(accepted) or 'none'})"
        )
    if key == "strategy":
        inner, settings = _inner(value)
        if inner.startswith(_WRAPPERS):
            # Nobody would ask the inner one's accountant, or send its norm to clients.
            raise FedsimError(
                f"federation.strategy_parameters: {name} wraps {inner}, itself a wrapper; use one "
                "of them, around a strategy that aggregates"
            )
        return build(inner, settings)
    # Strict, so that neither a text nor a boolean passes for a number.
    adapter: TypeAdapter[Any] = TypeAdapter(
        accepted[key].annotation, config=ConfigDict(strict=True, allow_inf_nan=False)
    )
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise FedsimError(
            f"federation.strategy_parameters: {key} of {name} is {value!r}: {problem}"
        ) from error


class _AccountantSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_epsilon: Annotated[float, Field(gt=0, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)]


def _accountant(value: Any, sampled: Any) -> RdpAccountant:
    try:
        budget = _AccountantSettings.model_validate(value)
        # Nothing is amplified by sampling, and then the accountant uses no number of clients.
        config = PrivacyConfig(
            target_delta=budget.delta,
            population_size=sampled,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=budget.max_epsilon,
        )
        return RdpAccountant(config)
    except ValidationError as error:
        (key, *_) = error.errors()[0]["loc"] or ("accountant",)
        raise FedsimError(
            f"federation.strategy_parameters: accountant: {key}: {error.errors()[0]['msg']}; "
            "write {max_epsilon: 8.0, delta: 1.0e-5}"
        ) from error
    except (ValueError, ImportError) as error:
        raise FedsimError(f"federation.strategy_parameters: accountant: {error}") from error


def _inner(value: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return value["name"], {key: item for key, item in value.items() if key != "name"}
    raise FedsimError(
        f"federation.strategy_parameters: strategy is {value!r}; expected a strategy's name, or "
        "{name: FedAvg, ...}"
    )


@contextmanager
def quiet_flower() -> Iterator[None]:
    """Keeps Flower's log at the level in the environment's FLWR_LOG_LEVEL in a `with` block."""
    # Flower may have been imported before fedsim, and then has another level.
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(os.environ["FLWR_LOG_LEVEL"].upper())
    try:
        yield
    finally:
        logger.setLevel(before)


def save_memory(strategy: Strategy) -> tuple[Any, dict[str, Tensor]]:
    """Returns the strategy's memory as (JSON, tensors that the JSON refers to by name).

    Its attributes are saved if they are None, numbers, text, NumPy arrays, Flower's array records,
    collections of those, strategies or Flower's accountant. Functions are left out, and anything
    else is a FedsimError.
    """
    tensors: dict[str, Tensor] = {}
    return _save_attributes(strategy, type(strategy).__name__, tensors), tensors


def restore_memory(strategy: Strategy, plain: Any, tensors: Tensors) -> None:
    """Gives a fresh strategy of the same parameters the (`plain`, `tensors`) of `save_memory`."""
    for name, value in plain.items():
        if isinstance(value, dict) and value["kind"] == "strategy":
            restore_memory(getattr(strategy, name), value["items"], tensors)
        elif isinstance(value, dict) and value["kind"] == "accountant":
            getattr(strategy, name).load_state_dict(value["state"])
        else:
            setattr(strategy, name, _load_value(value, tensors))


def _save_attributes(strategy: Strategy, path: str, tensors: dict[str, Tensor]) -> Any:
    return {
        name: _save_value(value, f"{path}.{name}", tensors)
        for name, value in vars(strategy).items()
        if not isinstance(value, FunctionType)
    }


def _save_value(value: object, path: str, tensors: dict[str, Tensor]) -> Any:
    # Exact types: an enumeration's member, say, would come back as a bare integer or text.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:  # as hexadecimal, to the last bit; JSON also has no NaN
        return {"kind": "float", "hex": value.hex()}
    if isinstance(value, np.ndarray | np.generic):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        try:
            tensors[path] = torch.from_numpy(np.array(value))
        except TypeError as error:
            raise FedsimError(_explain_unsaved(path, f"an array of {value.dtype}")) from error
        return {"kind": kind, "tensor": path}
    if isinstance(value, ArrayRecord):
        arrays = {name: array.numpy() for name, array in value.items()}
        return {"kind": "record", "items": _save_value(arrays, path, tensors)}
    if isinstance(value, list | tuple):
        items = [_save_value(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {"kind": "list" if isinstance(value, list) else "tuple", "items": items}
    if isinstance(value, dict):
        return {
            # Pairs, since JSON's keys can only be texts.
            "kind": "dict",
            "items": [
                [_save_value(key, path, tensors), _save_value(item, f"{path}.{key}", tensors)]
                for key, item in value.items()
            ],
        }
    if isinstance(value, RdpAccountant):  # its state is made for JSON
        return {"kind": "accountant", "state": value.state_dict()}
    if isinstance(value, Strategy):
        return {"kind": "strategy", "items": _save_attributes(value, path, tensors)}
    raise FedsimError(_explain_unsaved(path, f"a {type(value).__name__}"))


def _load_value(plain: Any, tensors: Tensors) -> Any:
    if not isinstance(plain, dict):
        return plain
    kind = plain["kind"]
    if kind == "float":
        return float.fromhex(plain["hex"])
    if kind == "array":
        return tensors[plain["tensor"]].numpy().copy()
    if kind == "scalar":
        return tensors[plain["tensor"]].numpy()[()]
    if kind == "record":
        arrays = _load_value(plain["items"], tensors)
        return ArrayRecord({name: Array(array) for name, array in arrays.items()})
    if kind == "dict":
        return {
            _load_value(key, tensors): _load_value(item, tensors) for key, item in plain["items"]
        }
    items = [_load_value(item, tensors) for item in plain["items"]]
    return items if kind == "list" else tuple(items)


def _explain_unsaved(path: str, what: str) -> str:
    return (
        f"federation.strategy: {path} is {what}, which cannot be written to a checkpoint; use "
        "another strategy"
    )
