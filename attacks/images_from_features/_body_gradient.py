"""The gradient of a network's body for known features and error signals of its images.

Behind a two-layer head (`head_gradient`), what `best_features` recovers determines each image's
error signal e_i = ∂L/∂x_i, x_i being its features. What is left of the update, the body's share, is
then Σ_i J(image_i)' e_i, J the derivative of features in parameters: no label, no head and no
probability of a candidate's own enters it, and to each image belongs a known vector of features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.models.victim import rebuild
from fedsim.types import Observation
from fedsim_attacks.fast_autograd._second_order import accelerate, drop_dead_weights
from fedsim_attacks.fast_autograd._smooth_slopes import smooth
from fedsim_attacks.fast_autograd._tape import PAYS, Tape
from fedsim_attacks.gradient_matching._matching import layout
from fedsim_attacks.head_features._feature_norms import labels_of
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.images_from_features._later_steps import LaterSteps

_LEAST_STRETCH = 0.1
"""Of outputs that are known up to a factor; random inputs may make any."""
_LEAST_SHARE = 0.02
"""Of one step's gradient in an update of several."""


class Misfit(NamedTuple):
    """How far candidates are from what was observed."""

    update: Tensor
    """|u - t|² / |t|² of the body's update (0-d)."""
    features: Tensor
    """Mean of |x_i - f_i|² / |f_i|² (0-d)."""
    slope: Tensor
    """Of `update` + weight `features` in the images (N, C, H, W)."""
    renewed: bool = False
    """Whether what is observed is seen in another way than before: earlier misfits are void."""


class Signals(NamedTuple):
    """What features tell of their images."""

    labels: Tensor
    """(N,) int64."""
    errors: Tensor
    """e_i (N, d): the derivative of the mean loss in the features."""
    scale: Tensor
    """What the client's defense has scaled its update by (0-d): 1, unless it clips."""


def signals(observation: Observation, features: Tensor) -> Signals:
    """Labels and error signals that `features` (N, d), with their norms, imply.

    The label is the class in which ∂L/∂A pulls a feature up; the scale, ∂L/∂A's against what
    the head itself computes of them. Under dropout the head computes something else for each image,
    and error signals are read off instead: with ∂L/∂W = S X, e_i = Σ_j s_ji w_j, whatever the
    neurons that were dropped, and scaled as the update is.
    """
    seen = HeadGradient.of(observation)
    model = rebuild(observation).eval()
    with torch.no_grad():
        observed = Objective(seen)(features).errors
        labels = labels_of(seen, features, observed)
    if seen.dropout and seen.exact and seen.steps == 1:
        shares = seen.grad_hidden.double() @ torch.linalg.pinv(features.double())  # (m, N)
        read = (shares.T @ seen.hidden.double()).to(features.dtype)
        return Signals(labels, read, observed.new_ones(()))
    features = features.detach().requires_grad_()
    logits = model.head(features)
    (errors,) = torch.autograd.grad(F.cross_entropy(logits, labels), features)
    implied = (logits.detach().softmax(1) - F.one_hot(labels, logits.shape[1])).T / len(labels)
    scale = (observed * implied).sum() / implied.square().sum()
    return Signals(labels, errors, scale if seen.clipped else torch.ones_like(scale))


class Part(NamedTuple):
    """Some of a body's layers."""

    function: Callable[[Tensor], Tensor]
    """Inputs (N, ...) to outputs (N, ...)."""
    parameters: list[tuple[str, Tensor]]
    """With their names in the observation."""


@final
class Body:
    """A victim's body, with the weights of the observed round, fast to differentiate twice."""

    def __init__(self, observation: Observation, width: float | Tensor) -> None:
        """`width` is that of the jumps of slopes (`smooth_slopes`); 0 leaves them as they are.

        As a tensor (0-d) it may be changed later.
        """
        self.input_shape = observation.model.input_shape
        self.model = rebuild(observation)
        accelerate(self.model)
        if width:
            smooth(self.model, width)
        self._windows = drop_dead_weights(self.model, self.input_shape)
        self.model.train(observation.training.mode == "train")
        for module_name, module in self.model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                of = f"{module_name}.{name}"
                setattr(module, name, nn.Parameter(laid(self.live(of, parameter))))
        self._names = {id(p): name for name, p in self.model.named_parameters()}

    def live(self, name: str, tensor: Tensor) -> Tensor:
        """The entries of a parameter, or of its update, that meet anything but padding."""
        window = self._windows.get(name)
        return tensor if window is None else tensor[window]

    def parameters(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Those of one of the body's modules, live, with their names."""
        return [(self._names[id(p)], p) for p in module.parameters()]


class _Expected(NamedTuple):
    """What an update is compared with, given a gradient."""

    scaled: bool
    """Whether all of it times what fits best."""
    share: float = 1.0
    """Of the gradient."""
    added: list[Tensor] | None = None
    """By later steps."""


@final
class PartUpdate:
    """The observed update of a part of the body."""

    def __init__(
        self,
        observation: Observation,
        body: Body,
        part: Part,
        scale: Tensor,
        *,
        rough: bool = False,
    ) -> None:
        """`scale` is what the client's defense has scaled its update by.

        A `rough` one is that of several steps, and compared with one gradient: with as much of it
        as fits best, until `correct` says how much there is.
        """
        update = {name: observation.update[name] / scale for name, _ in part.parameters}
        self._target = [laid(body.live(name, tensor)) for name, tensor in update.items()]
        self._bounds = _bounds(observation, update)
        self._names = list(update)
        self._clipped = observation.effect.scaled
        self._expected = _Expected(scaled=rough)
        self.energy = torch.stack([tensor.square().sum() for tensor in self._target]).sum()
        """|update|² (0-d), of the entries that meet anything but padding."""

    def correct(self, share: float, added: Mapping[str, Tensor]) -> None:
        """A `share` of the gradient is in the update, and this is `added` to it (`LaterSteps`)."""
        rest = [laid(added[name]) for name in self._names]
        self._expected = _Expected(self._clipped, share, rest)

    def compared(self, update: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | float]:
        """What an `update` exceeds this one by; a removed entry, its bound.

        And how fast that grows with it: 1, but for several steps'.
        """
        expected = self._expected
        pull: Tensor | float = expected.share
        if expected.added is not None:
            update = [pull * u + a for u, a in zip(update, expected.added, strict=True)]
        if expected.scaled:
            factor = self._factor(update)
            pull, update = pull * factor, [factor * tensor for tensor in update]
        return [self._left(i, tensor) for i, tensor in enumerate(update)], pull

    def _factor(self, update: Sequence[Tensor]) -> Tensor:
        """Of the best fit (0-d), as a constant: there the misfit does not change with it."""
        with torch.no_grad():
            pairs = list(zip(update, self._target, strict=True))
            across = torch.stack([(u * t).sum() for u, t in pairs]).sum()
            seen = [u if self._bounds is None else u * (t != 0) for u, t in pairs]
            own = torch.stack([u.square().sum() for u in seen]).sum()
            return (across / own.clamp_min(torch.finfo(own.dtype).tiny)).clamp_min(_LEAST_SHARE)

    def _left(self, index: int, update: Tensor) -> Tensor:
        target = self._target[index]
        left = update - target
        if self._bounds is None:
            return left
        bound = self._bounds[index]
        over = update - update.clamp(-bound, bound)
        return torch.where(target == 0, over, left)


@final
class PartGradient:
    """The observed update of a part of the body, and its recomputation from candidate inputs."""

    def __init__(
        self,
        observation: Observation,
        body: Body,
        part: Part,
        outputs: Tensor,
        errors: Tensor,
        *,
        scale: Tensor,
        weight: float,
        calls: int,
        free: bool = False,
        later: LaterSteps | None = None,
    ) -> None:
        """For inputs of which `part` makes `outputs` (N, ...), with error signals `errors`.

        `scale` is what the client's defense has scaled its update by. The misfit of outputs counts
        `weight` times. `free`: outputs are known up to a factor for each image, error signals up to
        one over it, as norm layers leave them. `later` is of several steps, taken for one.
        """
        self._later, self._taken, self._calls = later, 0, calls
        self._function, self._free, self._weight = part.function, free, weight
        self._parameters = [parameter for _, parameter in part.parameters]
        self._update = PartUpdate(observation, body, part, scale, rough=later is not None)
        self._outputs, self._errors = outputs.flatten(1), errors.flatten(1)
        self._lengths = self._outputs.square().sum(1, keepdim=True)
        # A tape would go on as before a correction.
        replayed = calls >= PAYS and later is None
        self._slopes = Tape(self._differentiate) if replayed else self._differentiate

    def __call__(self, inputs: Tensor) -> Misfit:
        """At `inputs` (N, ...)."""
        corrected = self._later is not None and self._later.correct(
            [self._update], inputs, self._taken, self._calls
        )
        self._taken += 1
        update, outputs, slope = self._slopes(inputs.detach())
        return Misfit(update, outputs, slope, renewed=corrected)

    def pulled_back(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """`inputs` and the error signals there (both (N, ...)): outputs of the part before."""
        with torch.enable_grad():
            variable = inputs.detach().clone().requires_grad_()
            outputs = self._function(variable).flatten(1)
            pull = (outputs * (self._errors / self._stretch(outputs.detach()))).sum()
            (errors,) = torch.autograd.grad(pull, variable)
        return inputs.detach(), errors

    def _differentiate(self, inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            variable = laid(inputs).requires_grad_()
            outputs = self._function(variable).flatten(1)
            stretch = self._stretch(outputs.detach())
            pull = (outputs * (self._errors / stretch)).sum()
            update = torch.autograd.grad(pull, self._parameters, create_graph=True)
        with torch.no_grad():
            left, growth = self._update.compared([u.detach() for u in update])
            energy = in_shares_of(self._update.energy)
            away = outputs.detach() / stretch - self._outputs
            loss = torch.stack([each.square().sum() for each in left]).sum() / energy
            count = self._lengths * len(away)
            toward = [each.mul_(2 * growth / energy) for each in left]
            toward.append(2 * self._weight * away / (count * stretch))
        (slope,) = torch.autograd.grad([*update, outputs], variable, toward)
        return loss, (away.square() / count).sum(), slope.contiguous()

    def _stretch(self, outputs: Tensor) -> Tensor:
        """(N, 1): times what `outputs` are as large as those known."""
        if not self._free:
            return outputs.new_ones(len(outputs), 1)
        along = (outputs * self._outputs).sum(1, keepdim=True)
        return (along / self._lengths).clamp_min(_LEAST_STRETCH)


@final
class BodyGradient:
    """The observed update of the whole body, and its recomputation from candidate images."""

    def __init__(
        self,
        observation: Observation,
        features: Tensor,
        known: Signals,
        *,
        weight: float,
        width: float,
        calls: int,
        later: LaterSteps | None = None,
    ) -> None:
        """For images of `features` (N, d), whose misfit counts `weight` times.

        `width` is that of the jumps of slopes (`smooth_slopes`); 0 leaves them as they are. `later`
        is of an update of several steps that `observation` has as one gradient.
        """
        body = Body(observation, width)
        whole = Part(body.model.features, body.parameters(body.model.body))
        self._gradient = PartGradient(
            observation,
            body,
            whole,
            features,
            known.errors,
            scale=known.scale,
            weight=weight,
            calls=calls,
            later=later,
        )

    def __call__(self, images: Tensor) -> Misfit:
        """At normalized `images` (N, C, H, W)."""
        return self._gradient(images)


def relative_noise_variance(observation: Observation, seen: HeadGradient) -> float:
    """Variance of the noise in an entry of the body's update, over |body's update|².

    Of added noise, which is the same in all entries; that of stochastic rounding at most, which has
    a spacing of its own in each tensor. `seen` is the head's share of the same update.
    """
    body = [tensor for name, tensor in observation.update.items() if name.startswith("body.")]
    energy = float(sum(tensor.double().square().sum() for tensor in body))
    if not energy or not seen.noise:
        return 0.0
    if seen.noisy:
        return seen.noise / seen.divisor**2 / energy
    spacings = [(float(t[t != 0].abs().min()) if t.any() else 0.0, t.numel()) for t in body]
    rounding = sum(count * spacing**2 / 6 for spacing, count in spacings)
    return rounding / sum(count for _, count in spacings) / energy


def noise_share(observation: Observation, seen: HeadGradient, names: Collection[str] = ()) -> float:
    """Share of |update|² that is noise, in the body's tensors of these `names`, or in all of it.

    `seen` as for `relative_noise_variance`; the share is an estimate and may exceed 1.
    """
    body = {name: t for name, t in observation.update.items() if name.startswith("body.")}
    part = [body[name] for name in names or body]
    energy, whole = (
        float(sum(t.double().square().sum() for t in of)) for of in (part, body.values())
    )
    if not energy:
        return 0.0
    return (
        relative_noise_variance(observation, seen) * sum(t.numel() for t in part) * whole / energy
    )


def _bounds(observation: Observation, update: dict[str, Tensor]) -> list[Tensor] | None:
    """For each tensor, what its removed entries are smaller than; None if none was removed."""
    removed = observation.effect.removed
    if removed is None or observation.effect.noisy:
        return None
    if removed == "others":
        return [tensor.new_full((), torch.inf) for tensor in update.values()]
    kept = [tensor[tensor != 0].abs() for tensor in update.values()]
    least = [part.min() if len(part) else part.new_full((), torch.inf) for part in kept]
    if removed == "smallest_of_tensor":
        return least
    return [torch.stack(least).min()] * len(least)


def in_shares_of(energy: Tensor) -> Tensor:
    """`energy` (0-d); 1 if nothing is left of an update, whose misfit then is zero everywhere."""
    return torch.where(energy > 0, energy, 1.0)


def laid(tensor: Tensor) -> Tensor:
    """A copy, laid out in memory as the accelerated layers like it."""
    return tensor.detach().clone(memory_format=layout(tensor))
