"""Provides activations and normalizations by name, for all architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from fedsim.types import FedsimError

Activation = Literal["relu", "leaky_relu", "elu", "gelu", "sigmoid", "softplus", "tanh"]
Norm = Literal["none", "batch", "group"]

_ACTIVATIONS: Mapping[Activation, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}
_GROUP_CHANNELS = 16


def activation(name: Activation) -> nn.Module:
    """Returns a new element-wise activation of that `name`, never in place.

    Names are `relu`, `leaky_relu`, `elu`, `gelu`, `sigmoid`, `softplus` and `tanh`, as in torch.
    """
    return _ACTIVATIONS[name]()


def norm(kind: Norm, channels: int) -> nn.Module:
    """Returns a new normalization of that `kind`, of (B, channels, H, W) features.

    `none` is the identity, and `batch` is batch norm. `group` has groups of 16 channels (Wu and He,
    Group Normalization, ECCV 2018, Table 3), or one group of all channels where 16 does not divide
    them.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        groups = 1 if channels % _GROUP_CHANNELS else channels // _GROUP_CHANNELS
        return nn.GroupNorm(groups, channels)
    return nn.Identity()


def require_size(model: str, input_shape: tuple[int, ...], minimum: int) -> None:
    """Refuses inputs whose height or width is below `minimum` pixels.

    `model` is the name in the message, and `input_shape` is (C, H, W).

    Raises:
        FedsimError: the images are too small for the model.
    """
    _, height, width = input_shape
    if min(height, width) < minimum:
        raise FedsimError(
            f"{model} needs images of at least {minimum}x{minimum} pixels, got {height}x{width}: "
            "enlarge them (the data source's `size`, where it has one) or use another model (lenet "
            "takes 8x8, mlp takes any size)"
        )
