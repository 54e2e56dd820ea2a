"""Defines every model as a body that computes features and a head that classifies them.

The split is what feature attacks work on: `forward(x) = head(features(x))` always holds. An imprint
module, if there is one, comes before the body and is part of `features`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from fedsim import rng
from fedsim.contracts import plugins
from fedsim.contracts.defense import LossTerm, ModelDefense
from fedsim.contracts.plugins import Plugin
from fedsim.models import size
from fedsim.models.imprint import Imprint, ImprintConfig
from fedsim.recording.files import read_tensors
from fedsim.types import FedsimError, InputSpec, ModelSpec

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
    """Returns a new element-wise activation module of that `name`, which never works in place."""
    return _ACTIVATIONS[name]()


def norm(kind: Norm, channels: int) -> nn.Module:
    """Returns a new normalization of (B, channels, H, W); the identity for kind `none`.

    `group` has groups of 16 channels (Wu and He, Group Normalization, ECCV 2018, Table 3), or one
    group where 16 does not divide them.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        groups = 1 if channels % _GROUP_CHANNELS else channels // _GROUP_CHANNELS
        return nn.GroupNorm(groups, channels)
    return nn.Identity()


def require_size(model: str, input_shape: tuple[int, ...], minimum: int) -> None:
    """Raises a FedsimError that names `model` if (C, H, W) has a side below `minimum` pixels."""
    _, height, width = input_shape
    if min(height, width) < minimum:
        raise FedsimError(
            f"{model} needs images of at least {minimum}x{minimum} pixels, got {height}x{width}: "
            "enlarge them (the data source's `size`, where it has one) or use another model (lenet "
            "takes 8x8, mlp takes any size)"
        )


class HeadConfig(BaseModel):
    """Describes a two-layer head f(x) = A σ(W x + b), see `TwoLayerHead`; `planted` <= `width`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: Annotated[int, Field(gt=0, le=1 << 20)] = 16384
    """m, the number of hidden neurons."""
    planted: Annotated[int, Field(ge=0)] = 0
    """Number of hidden neurons (the last ones) that the server plants: Gaussian W, constant rows of
    A."""
    planted_std: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Standard deviation of the planted W. The paper draws N(0, I) for features of norm 1; for
    features of norm s, 1 / s gives the same."""
    planted_rows: Literal["graded", "two_groups", "equal"] = "graded"
    """Entries of row k = 1..K of A on the v planted neurons: `graded` k / v; `two_groups` 1 / v for
    the first half of the classes and -1 / v for the others; `equal` 1 / v."""
    planted_gain: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of the planted rows of A."""
    activation: Activation = "relu"
    """σ, the activation of the hidden neurons."""
    divided: bool = False
    """Whether logits are divided by the width: f(x) = (1/m) A σ(W x + b), as in the paper."""
    unit_features: bool = False
    """Whether features are brought to unit length, as the paper assumes."""

    @model_validator(mode="after")
    def _planted_fit(self) -> HeadConfig:
        if self.planted > self.width:
            raise ValueError(f"planted neurons ({self.planted}) exceed the width ({self.width})")
        return self


class HeadDropout(nn.Module):
    """Drops hidden neurons in train mode, with probability `rate`: 0 until a caller assigns it."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        """Zeroes entries with probability `rate`, divides others by 1 - rate; none in eval mode."""
        return F.dropout(hidden, self.rate, training=self.training) if self.rate else hidden


class Classifier(nn.Module):
    """Joins body and head: normalized images (B, C, H, W) -> features (B, d) -> logits (B, K).

    Rows of a table are (B, D) in place of images. Attribute `imprint` is a module before the body;
    None, as at first, if there is none.
    """

    def __init__(self, body: nn.Module, head: nn.Module, unit_features: bool = False) -> None:
        """Joins modules; with `unit_features`, features get L2 norm 1 before the head."""
        super().__init__()
        self.imprint: Imprint | None = None
        self._unit_features = unit_features
        self.install(body, head)

    def install(self, body: nn.Module, head: nn.Module) -> None:
        """Replaces the body and the head; the imprint module, if there is one, stays."""
        self.body = body
        self.head = head
        # Kept in lists, since each local step asks for them and `modules()` walks the whole model.
        self._dropouts = [part for part in self.modules() if isinstance(part, HeadDropout)]
        self._terms = [part for part in self.modules() if isinstance(part, LossTerm)]

    def loss_term(self) -> Tensor | None:
        """Returns the sum (0-d) of `LossTerm` layers' terms of the last batch; None without any."""
        terms = [layer.loss_term() for layer in self._terms]
        return torch.stack(terms).sum() if terms else None

    def features(self, images: Tensor) -> Tensor:
        """Computes the head's input: normalized images (B, C, H, W), or rows (B, D) -> (B, d)."""
        features: Tensor = self.body(self.imprint(images) if self.imprint else images).flatten(1)
        return F.normalize(features, dim=1) if self._unit_features else features

    def forward(self, images: Tensor) -> Tensor:
        """Computes logits: normalized images (B, C, H, W), or rows (B, D) -> (B, K)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def set_dropout(self, rate: float) -> None:
        """Sets the head's dropout `rate` from now on: the probability in [0, 1) of a drop."""
        for module in self._dropouts:
            module.rate = rate


class ModelPlugin(Plugin):
    """Describes an architecture, which a subclass builds; further fields are hyper-parameters."""

    takes_rows: ClassVar[bool] = False
    """Whether it also takes rows (D,) of a table, and not only images (C, H, W)."""
    head: HeadConfig | None = None
    """A two-layer head in place of the single linear layer; None keeps that layer."""
    imprint: ImprintConfig | None = None
    """A malicious server's module before the model, which attack `imprint` reads; None: none."""

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Builds the model in train mode, without an imprint; torch's global stream is drawn from.

        `input_shape` is (C, H, W) or (D,) of a row; a FedsimError says that it does not fit.
        """


def build(spec: ModelSpec, seed: int, defenses: Sequence[ModelDefense] = ()) -> Classifier:
    """Builds the model of `spec`, as `defenses` alter it in order, in train mode on the CPU.

    The weights are a function of `seed`; those of the model itself are as without defenses.

    Raises:
        PluginError: the model is not installed, or is no model.
        FedsimError: the architecture does not fit the inputs, or the model does not fit the memory.
        ValidationError: a parameter is unknown or out of its range (pydantic's).
    """
    plugin = _load_plugin(spec)
    if spec.columns and (plugin.imprint or not plugin.takes_rows):
        what = f"model {spec.name}{'.imprint' * bool(plugin.imprint)}"
        raise FedsimError(
            f"{what} takes images, and the data are rows of {spec.input_shape[0]} entries; use "
            "model mlp, without an imprint"
        )
    # Counted before it is built: a model that is too large is refused, not killed by the system.
    size.check(_count_size(plugin, spec, defenses))
    # PyTorch's initializers draw from the global stream and take no generator.
    with rng.global_stream(seed):
        return _construct(plugin, spec, defenses)


def size_of(spec: ModelSpec, defenses: Sequence[ModelDefense] = ()) -> size.Size | None:
    """Counts the memory of the model that `build` would make; None if it cannot be counted.

    Errors are those of `build`, but not for want of memory or for rows that no such model takes.
    """
    return _count_size(_load_plugin(spec), spec, defenses)


def _load_plugin(spec: ModelSpec) -> ModelPlugin:
    cls = plugins.load_as("fedsim.models", spec.name, (ModelPlugin,))
    return cls.model_validate(dict(spec.parameters))


def feature_size(body: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Returns the number of features of one input; `body`, on the CPU, is left in train mode."""
    body.eval()
    with torch.no_grad():
        size = body(torch.zeros(1, *input_shape)).flatten(1).shape[1]
    body.train()
    return int(size)


def _construct(
    plugin: ModelPlugin, spec: ModelSpec, defenses: Sequence[ModelDefense]
) -> Classifier:
    model = plugin.build(spec.input_shape, spec.num_classes)
    if plugin.imprint:
        model.imprint = Imprint(plugin.imprint, spec.input_shape)
    # Defenses draw last, so that the model's own weights are the same with and without them.
    for defense in defenses:
        features = feature_size(model.body, spec.input_shape)
        model.install(*defense.wrap(model.body, model.head, features))
    return model


def _count_size(
    plugin: ModelPlugin, spec: ModelSpec, defenses: Sequence[ModelDefense]
) -> size.Size | None:
    # An attack builds its victim's model many times, and counting takes longer than building.
    key = type(plugin), repr((spec, defenses))
    if key not in _sizes:
        # Counting must not advance the caller's stream, and initializers of a plugin may draw.
        with rng.global_stream(0):
            _sizes[key] = size.count_size(
                lambda: _construct(plugin, spec, defenses), spec.input_shape
            )
    return _sizes[key]


_sizes: dict[tuple[type[ModelPlugin], str], size.Size | None] = {}


def normalize(pixels: Tensor, spec: InputSpec) -> Tensor:
    """Maps pixels (B, C, H, W) or rows (B, D) on [0, 1] to a model's input, (x - mean) / std."""
    mean, std = _statistics(pixels, spec)
    return (pixels - mean) / std


def denormalize(images: Tensor, spec: InputSpec) -> Tensor:
    """Maps a model's input back to entries on [0, 1], unclamped: the inverse of `normalize`."""
    mean, std = _statistics(images, spec)
    return images * std + mean


def _statistics(like: Tensor, spec: InputSpec) -> tuple[Tensor, Tensor]:
    # Statistics get shape (1, C, 1, 1) for images and (1, D) for rows.
    inner = [1] * (like.ndim - 2)
    mean, std = (
        torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, *inner)
        for values in (spec.mean, spec.std)
    )
    return mean, std


def read_weights(path: Path, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reads (parameters, buffers) of `model` from the file at `path`, by the model's names.

    `path` is a checkpoint of fedsim (OUT/checkpoints/STACK.safetensors), or a state dict. Integer
    tensors that the file lacks, such as batch norm's counter, are those of `model`.

    Raises:
        FedsimError: the file is no safetensors file, or does not fit the model: a tensor is
            missing, has another shape or type, or is not finite.
    """
    tensors = read_tensors(path)
    of_checkpoint = any(name.startswith("parameter.") for name in tensors)
    prefixes = ("parameter.", "buffer.") if of_checkpoint else ("", "")
    return (
        _select(path, tensors, prefixes[0], dict(model.named_parameters())),
        _select(path, tensors, prefixes[1], dict(model.named_buffers())),
    )


def _select(
    path: Path, tensors: dict[str, Tensor], prefix: str, expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    chosen = {}
    for name, tensor in expected.items():
        value = tensors.get(prefix + name)
        if value is None and not tensor.is_floating_point():
            value = tensor.clone()  # a counter of batch norm, which no client releases
        if value is None:
            raise FedsimError(
                f"{path}: no tensor {prefix + name!r}; the weights have to be of the model that "
                "the scenario describes"
            )
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise FedsimError(
                f"{path}: {prefix + name} is {value.dtype} {list(value.shape)}, the scenario's "
                f"model has {tensor.dtype} {list(tensor.shape)}; describe the model of "
                "these weights"
            )
        if not value.isfinite().all():
            raise FedsimError(f"{path}: {prefix + name} has entries that are not finite")
        chosen[name] = value
    return chosen
