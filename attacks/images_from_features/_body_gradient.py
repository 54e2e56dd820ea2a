"""The gradient of a network's body for known features and error signals of its images.

Behind a two-layer head, what `best_features` recovers determines each image's error signal e_i =
∂L/∂x_i, x_i being its features. What is left of the update, the body's share, is Σ_i J(image_i)'
e_i, J the derivative of features in parameters: no label and no head enters it.

An update of several steps is taken for the one gradient that its first step makes, which is known
best. But near the truth, the client's own training on candidates adds much the same as the others
did, and costs no more than an iteration: what is simulated is taken off the update, candidates come
nearer, and so on. At the true images nothing is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from fedsim.contracts.grant import Knowledge
from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.models.victim import rebuild
from fedsim.rng import generator
from fedsim.types import Observation
from fedsim_attacks.classifier_features._local_steps import as_one_gradient
from fedsim_attacks.fast_autograd._second_order import accelerate, drop_dead_weights, smooth
from fedsim_attacks.fast_autograd._tape import tape_if_it_pays
from fedsim_attacks.gradient_matching._drawing import Adam, half_cosine
from fedsim_attacks.gradient_matching._image_priors import ForwardPrior, KnownFeatures
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    Distance,
    DistanceValue,
    GivenDraws,
    MatchedUpdate,
    Matching,
    cosine_distance,
    excess,
    layout,
    removal_bounds,
    reweighted_cosine,
)
from fedsim_attacks.images_from_features._heads import Signals


class Part(NamedTuple):
    """Some of a body's layers."""

    function: Callable[[Tensor], Tensor]  # function from inputs (N, ...) to outputs (N, ...)
    parameters: list[tuple[str, Tensor]]  # parameters with their names in the observation


@final
class Body:
    """A victim's body, with the weights of the observed round, fast to differentiate twice."""

    def __init__(self, observation: Observation, width: float | Tensor) -> None:
        """Rebuilds the body; `width` is that of slopes' jumps; a 0-d tensor may change later."""
        self.observation = observation
        self.model = rebuild(observation)
        accelerate(self.model)
        if width:
            smooth(self.model, width)
        self._windows = drop_dead_weights(self.model, observation.model.input_shape)
        self.model.train(observation.training.mode == "train")
        # Weights are cut and brought to their memory order once, and not in each iteration.
        for module_name, module in self.model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                of = f"{module_name}.{name}"
                setattr(module, name, nn.Parameter(lay_out(self.without_padding(of, parameter))))
        self._names = {
            id(p): name for name, p in self.model.named_parameters() if name in observation.update
        }

    def without_padding(self, name: str, tensor: Tensor) -> Tensor:
        """Selects the entries of a parameter, or its update, that meet anything but padding."""
        window = self._windows.get(name)
        return tensor if window is None else tensor[window]

    def parameters(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Lists names and values of the trained parameters of `module`, a part of the body."""
        return [(self._names[id(p)], p) for p in module.parameters() if id(p) in self._names]


def lay_out(tensor: Tensor) -> Tensor:
    """Copies `tensor`, detached, to the memory format that the accelerated layers take."""
    return tensor.detach().clone(memory_format=layout(tensor))


_AT_CUT = 1 - 1e-6  # share of the cut from which an entry counts as cut, as it may be rounded
_LEAST_SHARE = 0.02  # least share of one step's gradient in an update of several


@final
class PartUpdate:
    """The observed update of a part of the body."""

    def __init__(self, body: Body, part: Part, scale: Tensor, *, approximate: bool = False) -> None:
        """Reads the update of a part.

        Args:
            body: The victim's body.
            part: Layers of that body.
            scale: Factor (0-d) that the defense has applied, which is undone.
            approximate: Whether several steps were taken: a gradient then has a fitted factor.
        """
        update = {name: body.observation.update[name] / scale for name, _ in part.parameters}
        self._target = [
            lay_out(body.without_padding(name, tensor)) for name, tensor in update.items()
        ]
        effect = body.observation.effect
        self._bounds = removal_bounds(body.observation, update)
        # A clip behind the cut has scaled it as all else, and `scale` undoes that.
        cut = math.inf if effect.truncated is None else effect.truncated
        self._cut = cut if effect.scaled_last else cut / float(scale)
        self._names = list(update)
        self._clipped = body.observation.effect.scaled
        self._scaled, self._share = approximate, 1.0
        """Whether a gradient is multiplied by the factor that fits best, and its known share."""
        self._added: list[Tensor] | None = None
        """Mean gradient that later steps have added, by tensor; None if it is not known."""
        self.energy = torch.stack([tensor.square().sum() for tensor in self._target]).sum()
        """|update|² (0-d), of the entries that meet anything but padding."""

    def correct(self, share: float, added: Mapping[str, Tensor]) -> None:
        """Makes later comparisons use `share` times a recomputed gradient plus `added`, by name."""
        # From here on the share is known: only clipping still asks for a fitted factor.
        self._scaled, self._share = self._clipped, share
        self._added = [lay_out(added[name]) for name in self._names]

    def compare(self, update: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | float]:
        """Subtracts the observed from a recomputed update; returns the derivative's factor, too."""
        growth: Tensor | float = self._share
        if self._added is not None:
            update = [growth * u + a for u, a in zip(update, self._added, strict=True)]
        if self._scaled:
            factor = self._factor(update)
            growth, update = growth * factor, [factor * tensor for tensor in update]
        return [self._subtract(i, tensor) for i, tensor in enumerate(update)], growth

    def _factor(self, update: Sequence[Tensor]) -> Tensor:
        """Computes the factor (0-d) at which `update` fits best, without a gradient."""
        with torch.no_grad():
            pairs = list(zip(update, self._target, strict=True))
            # Entries that were removed or cut say only a bound: the factor is fitted to the others.
            pairs = [(u * self._is_whole(t), t * self._is_whole(t)) for u, t in pairs]
            across = torch.stack([(u * t).sum() for u, t in pairs]).sum()
            own = torch.stack([u.square().sum() for u, _ in pairs]).sum()
            return (across / own.clamp_min(torch.finfo(own.dtype).tiny)).clamp_min(_LEAST_SHARE)

    def _is_whole(self, target: Tensor) -> Tensor:
        whole = target.abs() < _AT_CUT * self._cut
        return whole if self._bounds is None else whole & (target != 0)

    def _subtract(self, index: int, update: Tensor) -> Tensor:
        target = self._target[index]
        difference = update.clamp(-self._cut, self._cut) - target
        if self._bounds is None:
            return difference
        # A removed entry was below the bound: only what exceeds it is a misfit (Tobin 1958).
        return torch.where(target == 0, excess(update, self._bounds[index]), difference)


def nonzero_energy(energy: Tensor) -> Tensor:
    """Returns `energy` (0-d) to divide by, or 1 if it is 0."""
    return torch.where(energy > 0, energy, 1.0)


_FROM, _TIMES = 0.4, 30
"""Share of the iterations after which candidates are near enough, and number of simulations."""


@final
class LaterSteps:
    """The mean gradient over a client's steps, less the share of it that the first step makes."""

    def __init__(self, observation: Observation, labels: Tensor, calls: int) -> None:
        """Prepares for images of these `labels` (N,) and so many `calls` of `correct`."""
        training = observation.training
        weights = step_weights(training)
        # Where each step has its own images, the first gradient is that of all of them.
        self.share = weights[0] / sum(weights) if training.batches == "same" else 1.0
        """Share of the first step's gradient in the mean gradient."""
        self._factor, self._labels = mean_gradient_factor(training), labels
        self._calls, self._done = calls, 0
        self._names = list(observation.parameters)
        self._all, self._one = Matching(observation), Matching(as_one_gradient(observation))

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Simulates training on normalized `images`; returns what later steps add, by parameter."""
        images = images.detach()
        with torch.enable_grad():
            # The client's own training on the candidates, and one gradient at the sent weights.
            every = self._all.update(images, self._labels, create_graph=False)
            first = self._one.update(images, self._labels, create_graph=False)
        return {
            name: (self._factor * update - self.share * gradient).detach()
            for name, update, gradient in zip(self._names, every, first, strict=True)
        }

    def correct(self, updates: Iterable[PartUpdate], images: Tensor) -> bool:
        """Corrects `updates` by what later steps add at `images`, at some calls; says whether."""
        done, self._done = self._done, self._done + 1
        # Far candidates tell nothing of later steps, and each simulation costs an iteration.
        if done < _FROM * self._calls or done % max(1, self._calls // _TIMES):
            return False
        added = self(images)
        # The simulated training may diverge.
        if not all(bool(each.isfinite().all()) for each in added.values()):
            return False
        for update in updates:
            update.correct(self.share, added)
        return True


_LEAST_STRETCH = 0.1
"""Least fitted factor of outputs that are known up to a factor: random inputs may imply any."""


class Misfit(NamedTuple):
    """Distances of candidates from the observation."""

    update: Tensor
    """|u - t|² / |t|² of both updates (0-d); 1 - cosine where directions are compared."""
    features: Tensor
    """Mean of |x_i - f_i|² / |f_i|² (0-d), of features x_i of candidates and known ones f_i."""
    weight: float  # weight of `features` in the loss
    slope: Tensor
    """Gradient of what is descended in the candidates, images (N, C, H, W) or inputs."""
    target_changed: bool = False
    """Whether the target has changed, so that earlier misfits cannot be compared with it."""

    @property
    def loss(self) -> Tensor:
        return self.update + self.weight * self.features


class StageTarget(NamedTuple):
    """Outputs of a part of the body and their error signals, as far as they are known."""

    outputs: Tensor  # (N, ...), up to a factor for each image if `unscaled`
    errors: Tensor  # their error signals (N, ...), then up to one over that factor
    scale: Tensor  # factor (0-d) that the client's defense has applied to its update
    unscaled: bool = False  # whether norm layers have left the outputs without a scale


@final
class PartGradient:
    """The observed update of a part of the body, and its recomputation from candidate inputs."""

    def __init__(
        self,
        body: Body,
        part: Part,
        target: StageTarget,
        *,
        weight: float,
        calls: int,
        later: LaterSteps | None = None,
    ) -> None:
        """Prepares the comparison.

        Args:
            body: The victim's body.
            part: Layers of that body.
            target: Outputs of these layers and their error signals.
            weight: Factor of the misfit of outputs in the slope.
            calls: Number of evaluations to come.
            later: What later steps add; None for an update of one step.
        """
        self._later = later
        self._function, self._target, self._weight = part.function, target, weight
        self._parameters = [parameter for _, parameter in part.parameters]
        several = later is not None
        self._update = PartUpdate(body, part, target.scale, approximate=several)
        self._outputs, self._errors = target.outputs.flatten(1), target.errors.flatten(1)
        self._lengths = self._outputs.square().sum(1, keepdim=True)
        # A tape would go on as before a correction.
        taped_calls = 0 if several else calls
        self._slopes = tape_if_it_pays(self._differentiate, taped_calls, target.outputs.device)

    @classmethod
    def of_body(
        cls,
        observation: Observation,
        known: Signals,
        *,
        weight: float,
        width: float,
        calls: int,
        later: LaterSteps | None = None,
    ) -> PartGradient:
        """Prepares the comparison of the whole body's update, from candidate images.

        Args:
            observation: An update of one gradient, or one that was made of several steps.
            known: Features of the images, and their error signals.
            weight: Factor of the misfit of features in the slope.
            width: Width of the smoothed jumps of slopes; 0 leaves them.
            calls: Number of evaluations to come.
            later: What later steps add; None for an update of one step.
        """
        body = Body(observation, width)
        whole = Part(body.model.features, body.parameters(body.model.body))
        target = StageTarget(known.features, known.errors, known.scale)
        return cls(body, whole, target, weight=weight, calls=calls, later=later)

    def __call__(self, inputs: Tensor) -> Misfit:
        corrected = self._later is not None and self._later.correct([self._update], inputs)
        update, outputs, slope = self._slopes(inputs.detach())
        return Misfit(update, outputs, self._weight, slope, target_changed=corrected)

    def pull_back(self, inputs: Tensor) -> StageTarget:
        """Computes the error signals at `inputs`: the target for the part before this one."""
        with torch.enable_grad():
            variable = inputs.detach().clone().requires_grad_()
            outputs = self._function(variable).flatten(1)
            pull = (outputs * (self._errors / self._scales(outputs.detach()))).sum()
            (errors,) = torch.autograd.grad(pull, variable)
        return StageTarget(inputs.detach(), errors, self._target.scale, unscaled=True)

    def _differentiate(self, inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            variable = lay_out(inputs).requires_grad_()
            outputs = self._function(variable).flatten(1)
            scales = self._scales(outputs.detach())
            pull = (outputs * (self._errors / scales)).sum()
            # Backpropagation with error signals held fixed: Σ_i J(image_i)' e_i.
            update = torch.autograd.grad(pull, self._parameters, create_graph=True)
        with torch.no_grad():
            residuals, growth = self._update.compare([u.detach() for u in update])
            energy = nonzero_energy(self._update.energy)
            deviation = outputs.detach() / scales - self._outputs
            loss = torch.stack([each.square().sum() for each in residuals]).sum() / energy
            count = self._lengths * len(deviation)
            # One backward pass for both misfits: their own derivatives are the cotangents.
            cotangents = [each.mul_(2 * growth / energy) for each in residuals]
            cotangents.append(2 * self._weight * deviation / (count * scales))
        # With error signals held fixed, that of the body's last bias depends on no image.
        parts = [*update, outputs]
        moving = [index for index, part in enumerate(parts) if part.requires_grad]
        (slope,) = torch.autograd.grad(
            [parts[index] for index in moving], variable, [cotangents[index] for index in moving]
        )
        return loss, (deviation.square() / count).sum(), slope.contiguous()

    def _scales(self, outputs: Tensor) -> Tensor:
        """Computes the factors (N, 1) between `outputs` and the known ones."""
        if not self._target.unscaled:
            return outputs.new_ones(len(outputs), 1)
        # Least squares of outputs ≈ factor · known outputs, image by image.
        along = (outputs * self._outputs).sum(1, keepdim=True)
        return (along / self._lengths).clamp_min(_LEAST_STRETCH)


def _distance_by_part(names: Sequence[str], *, clipped: bool = False) -> Distance:
    """Makes the distance |u - t|² / |t|² of body plus head, by `names`; rescales u if `clipped`."""
    # In a single distance the head's planted neurons would outweigh all else.
    body = [name.startswith("body.") for name in names]

    def distance(update: Sequence[Tensor], target: MatchedUpdate) -> DistanceValue:
        unit = {part: _energy(target.tensors, body, part) for part in (True, False)}
        units = [unit[part] for part in body]
        factor = update[0].new_ones(())
        if clipped:
            own = [u.square().sum() / unit for u, unit in zip(update, units, strict=True)]
            across = [
                (u * t).sum() / unit
                for u, t, unit in zip(update, target.tensors, units, strict=True)
            ]
            factor = torch.stack(across).sum() / torch.stack(own).sum()
        residuals = [factor * u - t for u, t in zip(update, target.tensors, strict=True)]
        loss = sum(_energy(residuals, body, part) / unit[part] for part in (True, False))
        # At the best factor the loss does not change with it.
        direction = [each / unit for each, unit in zip(residuals, units, strict=True)]
        return torch.as_tensor(loss), direction, 2 * factor

    return distance


def _energy(tensors: Sequence[Tensor], body: Sequence[bool], part: bool) -> Tensor:
    chosen = [each.square().sum() for each, of in zip(tensors, body, strict=True) if of == part]
    whole = torch.stack(chosen).sum() if chosen else tensors[0].new_zeros(())
    return whole.clamp_min(torch.finfo(tensors[0].dtype).tiny)


_DRAW_STEP = 0.1  # first step size of what a model draws, in standard deviations


@final
class WholeGradient:
    """The observed update of all tensors, and its recomputation from candidate images.

    Candidates are put through what the client's defenses did, as far as it is declared. What a
    model draws is fitted beside the images: every call moves it.
    """

    def __init__(
        self,
        observation: Observation,
        labels: Tensor,
        *,
        width: float,
        calls: int,
        features: KnownFeatures | None = None,
        weight: float = 0.0,
        by_part: bool = False,
    ) -> None:
        """Prepares the comparison, of an update of one gradient or of several local steps.

        Args:
            observation: The update, whose local steps candidates are put through.
            labels: Labels (N,) of the images.
            width: Width of the smoothed jumps of slopes; 0 leaves them.
            calls: Number of evaluations to come.
            features: Features of the images; None if unknown.
            weight: Factor of the misfit of features in the slope.
            by_part: Whether body and head are compared in squared distance, each relative to its
                own length, and not by direction.
        """
        self._matching = Matching(observation, calls=calls, width=width, effects="simulated")
        self._labels, self._weight = labels, weight
        start = self._matching.random_candidate(labels, generator(observation.seed, "drawn"))
        self._drawn = tuple(each.detach() for each in start.drawn)
        self._chance, self._calls, self._done = Adam(self._drawn), calls, 0
        changed, spec = self._matching.changed, observation.model
        self._prior = ForwardPrior(
            observation,
            Knowledge(),
            features,
            views=(lambda x: changed.simulate(x, labels, spec)[0]) if changed.copied else None,
        )
        self._distance: Distance = cosine_distance
        if by_part:
            clipped = observation.effect.scaled
            self._distance = _distance_by_part(self._matching.names, clipped=clipped)
        elif features is not None:  # few tensors would outweigh all others in a trained network
            self._distance = reweighted_cosine(self._matching.counts)

    def __call__(self, images: Tensor) -> Misfit:
        """Evaluates the misfit at normalized `images` (N, C, H, W)."""
        candidate = Candidate(images, self._labels, drawn=self._drawn)
        loss, (slope, *others) = self._matching.differentiate(candidate, self._distance)
        with GivenDraws(self._drawn) if self._drawn else nullcontext():
            distance_of_features, pull = self._prior(images)
        if others:
            self._chance.step(others, _DRAW_STEP * half_cosine(self._done / self._calls))
            self._done += 1
        slope = slope + self._weight * pull
        return Misfit(loss, distance_of_features, self._weight, slope)
