"""The app's model: where it is, and what it takes and returns."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedsim.types import FedsimError

_CALL = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)(?P<call>\(.*\))?", re.S)


def built_model(named: str) -> nn.Module:
    """Imports and builds the model that `named` says; a model is returned as it is.

    `named` is `module:Class` or `module:function(key=value)`, whose values are literals. The
    current folder is put first in `sys.path` and stays there.

    Raises:
        FedsimError: `named` cannot be imported or built, or builds no model.
    """
    match = _CALL.fullmatch(named.strip())
    if not match:
        raise FedsimError(
            f"--model: expected module:Class or module:function(key=value), got {named!r}"
        )
    # A program's path begins with its own folder; the app's model lies where the user is.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(match["module"])
        for part in match["name"].split("."):
            found = getattr(found, part)
        if not isinstance(found, nn.Module):
            positional, keywords = _arguments(match["call"] or "()")
            found = found(*positional, **keywords)
    except FedsimError:
        raise
    except Exception as error:  # somebody else's code, of any kind
        raise FedsimError(
            f"--model {named}: {type(error).__name__}: {error}; run it in the app's folder, and "
            "name what builds the model"
        ) from error
    if not isinstance(found, nn.Module):
        raise FedsimError(f"--model {named}: expected an nn.Module, got {type(found).__name__}")
    return found


def _arguments(call: str) -> tuple[list[Any], dict[str, Any]]:
    tree = ast.parse(f"f{call}", mode="eval").body
    if not isinstance(tree, ast.Call) or any(each.arg is None for each in tree.keywords):
        raise FedsimError(f"--model: expected a call of literals, got {call!r}")
    keywords = {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
    return [ast.literal_eval(each) for each in tree.args], keywords


def classes_of(model: nn.Module, shape: tuple[int, int, int]) -> int:
    """Returns the number of outputs of the model, by a trial on black images of `shape` (C, H, W).

    Raises:
        FedsimError: the model does not take such images.
    """
    # Of each module: an app may keep some, such as a frozen batch norm, in another mode.
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.no_grad():
            answer: Any = model.eval()(torch.zeros(2, *shape))
        # Models of Hugging Face return an object that holds the logits.
        answer = getattr(answer, "logits", answer)
        return int((answer[0] if isinstance(answer, tuple) else answer).shape[-1])
    except Exception as error:  # somebody else's code, of any kind
        raise FedsimError(
            f"model: it does not take images of shape {shape}: {type(error).__name__}: {error}; "
            "say --input-shape and --classes"
        ) from error
    finally:
        for part, was_training in modes:
            part.training = was_training


def package_of(model: nn.Module | str) -> str:
    """Returns the top-level package of the model's class, or of the name that says where it is."""
    module = model.partition(":")[0] if isinstance(model, str) else type(model).__module__
    return module.partition(".")[0]
