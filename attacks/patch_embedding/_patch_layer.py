"""Finds a model's patch embedding, and the parameter that is added to each patch's token.

Nothing is known of the model but its code, which is run. A layer that embeds patches is one whose
inputs are pixels of the image, each at one place: an image whose pixels are their own numbers shows
which. The position embedding is the parameter whose gradient, of any image, is that of the layer's
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import rng
from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import Classifier
from fedsim.types import Observation

_ALIKE = 1e-4
"""Relative distance of two gradients up to which they are the same, computed in two ways."""


@dataclass(frozen=True, kw_only=True)
class PatchLayer:
    """Where the parts are that an image's equations are made of."""

    weight: str
    """Name of the embedding's weight, (d, m) once flattened, of m pixels a patch."""
    position: str
    """Name of the position embedding, (n, d) once flattened."""
    rows: Tensor
    """(P,) int64: the row of the position embedding of each patch."""
    pixels: Tensor
    """(P, m) int64: which pixels of a flattened image (C, H, W) each patch has, in the order of the
    weight's columns."""


def find(model: Classifier, observation: Observation) -> PatchLayer:
    """Finds the patch embedding of the observed `model` and its position embedding.

    Raises:
        AttackFailed: it has none, or its position embedding is not trained.
    """
    model.eval()
    shape = observation.model.input_shape
    numbered = torch.arange(math.prod(shape)).view(1, *shape)
    named = dict(model.named_modules())
    device = next(model.parameters()).device
    for name, inputs in _called(model, numbered.float().to(device)):
        pixels = _pixels_of(named[name], inputs, math.prod(shape))
        if pixels is None or f"{name}.weight" not in observation.update:
            continue
        found = _position(model, name, len(pixels), observation)
        if found is None:
            raise AttackFailed(
                f"the update has no gradient of a position embedding beside that of {name}, which "
                "embeds patches: no parameter that is trained is added to each patch's token, and "
                "what each patch adds to the gradient is not told apart"
            )
        position, rows = found
        return PatchLayer(weight=f"{name}.weight", position=position, rows=rows, pixels=pixels)
    raise AttackFailed(
        "the model has no layer that embeds patches of the image: this attack is for vision "
        "transformers, such as model vit"
    )


def _called(model: Classifier, images: Tensor) -> list[tuple[str, Tensor]]:
    """Layers that may embed patches, in the order in which they are called, and their inputs."""
    called: list[tuple[str, Tensor]] = []
    hooks = [
        part.register_forward_pre_hook(
            lambda _, inputs, name=name: called.append((name, inputs[0].detach()))
        )
        for name, part in model.named_modules()
        if isinstance(part, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return called


def _pixels_of(part: nn.Module, inputs: Tensor, count: int) -> Tensor | None:
    """The numbers of the pixels (P, m) that a layer takes, each once; None if it takes others."""
    if isinstance(part, nn.Conv2d):
        if part.groups != 1 or part.padding not in ((0, 0), "valid") or inputs.ndim != 4:
            return None
        taken = F.unfold(
            inputs,
            _pair(part.kernel_size),
            dilation=_pair(part.dilation),
            stride=_pair(part.stride),
        )[0].T
    else:
        taken = inputs.reshape(-1, inputs.shape[-1])
    numbers = taken.round().long()
    whole = bool((taken == numbers).all()) and bool(((numbers >= 0) & (numbers < count)).all())
    once = whole and len(set(numbers.flatten().tolist())) == numbers.numel()
    return numbers if once and len(numbers) > 1 else None


def _pair(sides: Sequence[int]) -> tuple[int, int]:
    height, width = sides
    return height, width


def _position(
    model: Classifier, layer: str, patches: int, observation: Observation
) -> tuple[str, Tensor] | None:
    """The name of the position embedding and its row of each patch, by their gradients."""
    part = model.get_submodule(layer)
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        outputs.append(output)

    hook = part.register_forward_hook(keep)
    parameters = {n: p for n, p in model.named_parameters() if n in observation.update}
    for parameter in parameters.values():
        parameter.requires_grad_()
    stream = rng.generator(observation.seed, "patch_layer")
    device = next(iter(parameters.values())).device
    image = torch.randn(1, *observation.model.input_shape, generator=stream).to(device)
    # Of the features, for a new classifier's weights may be zero.
    features = model.features(image)
    weights = torch.randn(features.shape, generator=stream).to(device)
    answer = (features * weights).sum()
    hook.remove()
    signal, *gradients = torch.autograd.grad(
        answer, [outputs[0], *parameters.values()], allow_unused=True
    )
    if isinstance(part, nn.Conv2d):
        signal = signal.flatten(2).transpose(1, 2)
    signal = signal.reshape(patches, -1).double()
    for name, rows in _candidates(parameters, gradients, signal.shape[1]):
        if len(rows) < patches:
            continue
        distances = torch.cdist(signal, rows, compute_mode="donot_use_mm_for_euclid_dist")
        nearest, index = distances.min(1)
        same = bool((nearest <= _ALIKE * signal.norm(dim=1)).all())
        if same and len(set(index.tolist())) == patches:
            return name, index
    return None


def _candidates(
    parameters: dict[str, nn.Parameter], gradients: Sequence[Tensor | None], width: int
) -> Iterator[tuple[str, Tensor]]:
    """Gradients that have rows of a token's width, (n, d) float64."""
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is not None and parameter.shape[-1] == width:
            yield name, gradient.reshape(-1, width).double()


_LEAST = -17.0
_MOST = 3.0
_STEPS = 201
"""Powers of ten of the disturbance's variance that are compared, over the gradient's mean
square."""
_REACH = 0.5
"""Distance over which the correlation of pixels falls to 1/e, in sides of an image."""


class Patches(NamedTuple):
    """Patches that were solved for, and how certain they are."""

    values: Tensor
    """(P, m)."""
    variances: Tensor
    """(P,): of an entry, as far as disturbance leaves it open, in units of `spread`²."""
    unexplained: float
    """Share of the gradient that the patches do not explain."""


def correlation(centers: Tensor) -> Tensor:
    """Correlation of pixels (P, P) of patches whose `centers` (P, 2) are in sides of an image."""
    return torch.exp(-torch.cdist(centers, centers) / _REACH)


def solve(
    signals: Tensor, gradient: Tensor, mean: Tensor, spread: Tensor, alike: Tensor
) -> Patches:
    """Solves ∂L/∂E = Σ_p δ_p x_p' for the patches, in float64.

    Args:
        signals: (P, d) gradient of the position embedding, δ.
        gradient: (d, m), of the patch embedding.
        mean: (m,) of a patch's entries, before anything is seen.
        spread: (m,) their standard deviation.
        alike: (P, P), see `correlation`.
    """
    root = torch.linalg.cholesky(alike)
    # In y with x = mean + root y spread, all entries are known to be of mean 0 and variance 1.
    left = signals.T @ root
    right = (gradient - signals.sum(0)[:, None] * mean) / spread
    rotation, lengths, directions = torch.linalg.svd(left, full_matrices=False)
    seen = rotation.T @ right
    energies = seen.square().mean(1)
    outside = (right.square().sum() - seen.square().sum()).clamp_min(0) / right.shape[1]
    hidden = len(left) - len(lengths)
    scale = float(right.square().mean())
    tried = scale * 10 ** torch.linspace(_LEAST, _MOST, _STEPS, dtype=left.dtype)
    tried = tried.to(left.device)[:, None]
    expected = lengths.square() + tried
    surprise = (energies / expected + expected.log()).sum(1)
    surprise += outside / tried[:, 0] + hidden * tried[:, 0].log()
    noise = tried[int(surprise.argmin()), 0]
    kept = lengths.square() + noise
    turned = root @ directions.T
    values = mean + spread * (turned @ (seen * (lengths / kept)[:, None]))
    # What the prior leaves open is 1 in directions that the equations do not have.
    variances = alike.diagonal() - (turned.square() * (lengths.square() / kept)).sum(1)
    left_over = (gradient - signals.T @ values).square().sum()
    return Patches(values, variances.clamp_min(0), float(left_over / gradient.square().sum()))
