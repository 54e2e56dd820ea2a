"""A strategy's memory (FedAdam's moments, FedAvgM's momentum, ...) as tensors and JSON, and back.

It works on any strategy whose attributes are numbers, text, NumPy arrays, Flower's array records,
lists, tuples and dictionaries of those, strategies, or Flower's accountant. Functions are the
strategy's code, not its memory. Anything else is refused, never pickled.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from torch import Tensor

from fedsim.types import FedsimError, Tensors

Plain = Any
"""Any value that JSON can hold."""


def save(strategy: Strategy) -> tuple[Plain, dict[str, Tensor]]:
    """Returns the strategy's memory as (JSON, tensors that the JSON refers to by name).

    Raises:
        FedsimError: An attribute is of a type that is not saved.
    """
    tensors: dict[str, Tensor] = {}
    return _save_attributes(strategy, type(strategy).__name__, tensors), tensors


def restore(strategy: Strategy, plain: Plain, tensors: Tensors) -> None:
    """Gives a fresh strategy the memory that `save` returned as (`plain`, `tensors`).

    The strategy must be built with the parameters of the saved one.
    """
    for name, value in plain.items():
        if isinstance(value, dict) and value["kind"] == "strategy":
            restore(getattr(strategy, name), value["items"], tensors)
        elif isinstance(value, dict) and value["kind"] == "accountant":
            getattr(strategy, name).load_state_dict(value["state"])
        else:
            setattr(strategy, name, _load(value, tensors))


def _save_attributes(strategy: Strategy, path: str, tensors: dict[str, Tensor]) -> Plain:
    return {
        name: _save(value, f"{path}.{name}", tensors)
        for name, value in vars(strategy).items()
        if not isinstance(value, FunctionType)
    }


def _save(value: object, path: str, tensors: dict[str, Tensor]) -> Plain:
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
        return {"kind": "record", "items": _save(arrays, path, tensors)}
    if isinstance(value, list | tuple):
        items = [_save(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {"kind": "list" if isinstance(value, list) else "tuple", "items": items}
    if isinstance(value, dict):
        return {
            # Pairs, since JSON's keys can only be texts.
            "kind": "dict",
            "items": [
                [_save(key, path, tensors), _save(item, f"{path}.{key}", tensors)]
                for key, item in value.items()
            ],
        }
    if isinstance(value, RdpAccountant):  # its state is made for JSON
        return {"kind": "accountant", "state": value.state_dict()}
    if isinstance(value, Strategy):
        return {"kind": "strategy", "items": _save_attributes(value, path, tensors)}
    raise FedsimError(_explain_unsaved(path, f"a {type(value).__name__}"))


def _load(plain: Plain, tensors: Tensors) -> Any:
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
        arrays = _load(plain["items"], tensors)
        return ArrayRecord({name: Array(array) for name, array in arrays.items()})
    if kind == "dict":
        return {_load(key, tensors): _load(item, tensors) for key, item in plain["items"]}
    items = [_load(item, tensors) for item in plain["items"]]
    return items if kind == "list" else tuple(items)


def _explain_unsaved(path: str, what: str) -> str:
    return (
        f"federation.strategy: {path} is {what}, which cannot be written to a checkpoint; use "
        "another strategy"
    )
