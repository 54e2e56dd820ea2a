"""The image of a vision transformer's update, from its first two parameters.

Lu et al., APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers, CVPR 2022, saw that
the gradient of a learned position embedding is the signal of each token, and solved for the tokens
by the first attention's weights, where that attention gets them as they are: without a norm before
it or a sum around it. The patch embedding's own gradient has the same signals and the pixels
themselves, and needs no attention: so any blocks may follow. That a layer's gradient is linear in
its inputs once its signals are known is how Zhu and Blaschko (R-GAP, ICLR 2021) solve convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, remove_truncated
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import Classifier, denormalize, normalize
from fedsim.models.victim import rebuild
from fedsim.types import ModelSpec, Observation, Reconstruction
from fedsim.words import number_of
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.labels.label_inference import infer_labels

_ALIKE = 1e-4  # relative distance of two gradients up to which they are the same


@dataclass(frozen=True, kw_only=True)
class _PatchLayer:
    """Names of the patch and position embeddings, and which pixels and rows each patch has."""

    weight: str  # name of the embedding's weight, (d, m) once flattened, of m pixels a patch
    position: str  # name of the position embedding, (n, d) once flattened
    rows: Tensor  # (P,) int64: the row of the position embedding of each patch
    pixels: Tensor  # (P, m) int64: pixels of a flattened image in each patch, in the weight's order


def _find_patch_layer(model: Classifier, observation: Observation) -> _PatchLayer:
    """Finds patch and position embedding of `model`, or raises AttackFailed; sets eval mode."""
    model.eval()
    shape = observation.model.input_shape
    # An image whose pixels are their own numbers shows which of them a layer takes.
    numbered = torch.arange(math.prod(shape)).view(1, *shape)
    named = dict(model.named_modules())
    device = next(model.parameters()).device
    for name, inputs in _list_calls(model, numbered.float().to(device)):
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
        return _PatchLayer(weight=f"{name}.weight", position=position, rows=rows, pixels=pixels)
    raise AttackFailed(
        "the model has no layer that embeds patches of the image: this attack is for vision "
        "transformers, such as model vit"
    )


def _list_calls(model: Classifier, images: Tensor) -> list[tuple[str, Tensor]]:
    """Lists the layers that may embed patches with their inputs, in the order of their calls."""
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
    """Reads the numbers (P, m) of the pixels that a layer takes, each once; None if it does not."""
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
    """Finds the position embedding's name and its row (P,) for each patch, by their gradients."""
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
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or gradient.shape[-1] != signal.shape[1]:
            continue
        rows = gradient.reshape(-1, signal.shape[1]).double()
        if len(rows) < patches:
            continue
        # What is added to a token has its gradient; a matrix product would round differences away.
        distances = torch.cdist(signal, rows, compute_mode="donot_use_mm_for_euclid_dist")
        nearest, index = distances.min(1)
        same = bool((nearest <= _ALIKE * signal.norm(dim=1)).all())
        if same and len(set(index.tolist())) == patches:
            return name, index
    return None


# Powers of ten of the disturbance's variance, over the gradient's mean square.
_LEAST, _MOST, _STEPS = -17.0, 3.0, 201
_REACH = 0.5  # distance over which the correlation of pixels falls to 1/e, in sides of an image


class _SolvedPatches(NamedTuple):
    values: Tensor  # (P, m): posterior means of the patches' entries
    variances: Tensor  # (P,): posterior variance of a patch's entry, in units of its prior variance
    unexplained: float  # share of the gradient's energy that the patches do not explain


def _correlation(centers: Tensor) -> Tensor:
    """Computes the assumed correlation (P, P) of patches at `centers` (P, 2), in image sides."""
    return torch.exp(-torch.cdist(centers, centers) / _REACH)


def _solve_patches(
    signals: Tensor, gradient: Tensor, mean: Tensor, spread: Tensor, alike: Tensor
) -> _SolvedPatches:
    """Solves ∂L/∂E = Σ_p δ_p x_p' for the P patches x_p, with the likeliest variance of noise.

    δ are `signals` (P, d), ∂L/∂E the `gradient` (d, m). Of a patch's entries `mean` and `spread`
    (m,) are the prior, with the correlation `alike` (P, P) between patches.
    """
    root = torch.linalg.cholesky(alike)
    # In y with x = mean + root y spread, all entries are known to be of mean 0 and variance 1.
    left = signals.T @ root
    right = (gradient - signals.sum(0)[:, None] * mean) / spread
    rotation, lengths, directions = torch.linalg.svd(left, full_matrices=False)
    seen = rotation.T @ right
    energies = seen.square().mean(1)
    # What no combination of the signals can explain is noise alone.
    outside = (right.square().sum() - seen.square().sum()).clamp_min(0) / right.shape[1]
    hidden = len(left) - len(lengths)
    scale = float(right.square().mean())
    tried = scale * 10 ** torch.linspace(_LEAST, _MOST, _STEPS, dtype=left.dtype)
    tried = tried.to(left.device)[:, None]
    expected = lengths.square() + tried
    # Negative log-evidence of each noise variance: directions are independent normals.
    surprise = (energies / expected + expected.log()).sum(1)
    surprise += outside / tried[:, 0] + hidden * tried[:, 0].log()
    # Empirical Bayes: the likeliest variance of the noise is the ridge.
    noise = tried[int(surprise.argmin()), 0]
    kept = lengths.square() + noise
    turned = root @ directions.T
    values = mean + spread * (turned @ (seen * (lengths / kept)[:, None]))
    # What the prior leaves open is 1 in directions that the equations do not have.
    variances = alike.diagonal() - (turned.square() * (lengths.square() / kept)).sum(1)
    left_over = (gradient - signals.T @ values).square().sum()
    return _SolvedPatches(
        values, variances.clamp_min(0), float(left_over / gradient.square().sum())
    )


_PIXEL_MEAN, _PIXEL_SPREAD = 0.5, 0.25  # prior mean and standard deviation of pixels in [0, 1]
_DETERMINED = 0.01  # root mean squared error of pixels (40 dB) up to which an image is determined
_SAFETY = 3.0  # standard deviations of its pixels by which an image may be off


@final
class PatchInversion(DirectAttack):
    """Solves the gradients of patch embedding and position for a transformer's only image.

    The image is exact if a token has more entries than there are patches. Clipping and several
    local steps on the image change nothing. Noise, removed entries and further patches make pixels
    uncertain.
    """

    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "fedsim: ∂L/∂E = Σ_p (∂L/∂u_p) x_p', after Lu et al., APRIL, CVPR 2022 (signals by the "
        "position embedding u), and Zhu and Blaschko, R-GAP, ICLR 2021 (inputs by a gradient)"
    )

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the image (1, C, H, W), and its label if the head has a linear layer.

        An AttackFailed says that there are more images, no gradient of patch and position
        embedding, mixed entries, or no label to read where the head has such a layer.
        """
        if observation.num_images > 1:
            raise AttackFailed(
                f"the update is of {number_of(observation.num_images, 'image')}, whose signals at "
                "a position come as their sum: patches are solved for of one image"
            )
        if observation.effect.mixed:
            raise AttackFailed(
                "a defense mixes entries, and the patch embedding's gradient is no longer the sum "
                "of its patches"
            )
        # Signs of truncated entries say the label, and nothing else of them is used.
        seen, observation = observation, remove_truncated(observation)
        victim = rebuild(observation)
        layer = _find_patch_layer(victim, observation)
        gradient = observation.update[layer.weight].double().flatten(1)
        rows = observation.update[layer.position].double()
        signals = rows.reshape(-1, rows.shape[-1])[layer.rows]
        if not gradient.any() or not signals.any():
            raise AttackFailed("nothing is left of the update of the patch embedding")
        model = observation.model
        grey = torch.full((1, *model.input_shape), _PIXEL_MEAN, device=gradient.device).double()
        mean = normalize(grey, model)
        spread = normalize(grey + _PIXEL_SPREAD, model) - mean
        # All patches have the same channels in the same columns.
        columns, spreads = (each.flatten()[layer.pixels[0]] for each in (mean, spread))
        patches = _solve_patches(
            signals, gradient, columns, spreads, _correlation(_centers(layer, model))
        )
        image = mean.flatten().clone()
        image[layer.pixels.flatten()] = patches.values.flatten()
        ends = any(isinstance(part, nn.Linear) for part in victim.head.modules())
        error = _SAFETY * _PIXEL_SPREAD * float(patches.variances.mean().sqrt())
        # Pixels in no patch stay unknown, and the image with them.
        whole = layer.pixels.numel() == math.prod(model.input_shape)
        certain = whole and error <= _DETERMINED and observation.training.sums_gradients
        return Reconstruction(
            images=denormalize(image.view(mean.shape), model).clamp(0, 1).float(),
            labels=infer_labels(seen) if ends else None,
            determined=torch.tensor([certain], device=gradient.device),
            loss=patches.unexplained,
            iterations=0,
        )


def _centers(layer: _PatchLayer, model: ModelSpec) -> Tensor:
    _, height, width = model.input_shape
    place = layer.pixels % (height * width)
    where = torch.stack([(place // width).double() / height, (place % width).double() / width], -1)
    return where.mean(1)
