"""Images from a batch's update that is factored into features and error signals first.

Where the head can be solved (`best_features`), labels, features and error signals of every image
are known, and what is left is `body_gradient`: a least-squares problem in the images alone, each of
them with features of its own to reproduce. It is descended with the slopes of ReLU and max pooling
smoothed (`smooth_slopes`), without which every linear piece of the network has a local minimum of
its own, and over images of several resolutions (`pyramid`).

A deep body is peeled first (`peeling`): stage by stage, from its features down to what went into
the second stage; images are then descended through the first stage alone, and in the end together
with all that was peeled (`relaxation`). Behind much noise that is done from the beginning.

Where noise, pruning or rounding blurs the head's gradient, images come first: by the direction of
the whole update, until their features tell where those of the head's gradient are
(`image_features`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.adversary import Attack, AttackState, rebuild, solve
from fedsim.models.local import features_function
from fedsim.rng import generator
from fedsim.types import Knowledge, Observation, Reconstruction
from fedsim_attacks import image_features
from fedsim_attacks.best_features import BestFeatures
from fedsim_attacks.body_gradient import (
    BodyGradient,
    Misfit,
    Signals,
    noise_energy,
    noise_share,
    signals,
)
from fedsim_attacks.contrast import exposed
from fedsim_attacks.head_gradient import HeadGradient
from fedsim_attacks.label_inference import infer_labels
from fedsim_attacks.matching import Matching
from fedsim_attacks.peeling import Peeling
from fedsim_attacks.pyramid import Pyramid
from fedsim_attacks.relaxation import Relaxation
from fedsim_attacks.stages import StagedBody
from fedsim_attacks.unrolled_update import UnrolledUpdate, as_one_gradient
from fedsim_attacks.variation import chromatic_variation
from fedsim_attacks.whole_gradient import WholeGradient

_FINAL = 0.005
"""Step size at the end, over that of the beginning."""
_FINAL_VARIATION = 0.4
"""Weight of the total variation at the end, over that of the beginning: it costs contrast, which
the update restores once the images are nearly right."""
_ROUGH = 0.7
"""Share of the iterations that take several steps for one gradient, at a seventh of the cost;
through a deep body all do, as the descent of a whole one leads away."""
_ROUGH_FEATURES, _ROUGH_VARIATION = 10.0, 0.1
"""Weights there: features are known better than that holds, and it leaves more to be smoothed."""
_FINE_STEP = 0.3
"""Times the step size when the steps are then unrolled: from far they lead anywhere."""
_FIRST = 0.25
"""Share of the iterations before images' features are looked at, where the head is blurred."""
_PEELED, _SINGLE = 0.35, 0.4
"""Shares of the iterations in which stages are peeled, each with as many steps, and in which images
are descended through the first one; the others are all stages' together."""
_BURIED = 0.5
"""Share of the body's update that is noise, from which there is nothing to peel."""
_RELAXED_VARIATION = 2.5
"""Total variation in these, times the usual."""
_DEEP = 4
"""Stages from which a body is peeled: through fewer, images descend as well from afar."""
_MAPS = 4.0
"""Times what features count, the first stage's outputs do: they are hundreds of times as many."""
_DOUBT = 10.0
"""How much less they count for what is left unexplained of the stage behind."""
_LOST = 0.5
"""Share of what a stage shows that is left unexplained, from which maps are worth nothing."""
_COARSE_VARIATION, _FINE_VARIATION = 15.0, 0.05
"""Total variation of images from maps, times the usual at first; and its end over its beginning.
A first stage alone is descended through smooth images well, and held back by none in the end."""
_WHOLE_VARIATION = 0.1
"""Least weight of the total variation against the cosine distance of the whole update."""
_PRIOR = 0.7
"""Of noise, an image of total variation 1 is less likely than a flat one by that many nats a
value: what the weight of the total variation then follows from."""


@dataclass(frozen=True)
class Phase:
    """What images are compared with for some iterations, and how they move."""

    misfit: Callable[[Tensor], Misfit] | Peeling
    """Or the stages that are peeled first, while images stay as they are."""
    iterations: int
    step_size: float
    total_variation: float
    labels: Tensor
    feature_weight: float = 0.0
    features: Tensor | None = None
    """(N, d), that images are to have; None as long as nothing is known of them."""
    final_variation: float = _FINAL_VARIATION
    """Weight of the total variation at the end, over that of the beginning."""
    without_contrast: bool = False
    """Whether the misfit is that of any multiple of the images."""


Plan = Callable[["Descent"], Phase]
"""A phase to come, from what the images of those before make of it."""
Relaxed = Callable[[list[Tensor], int, "Descent"], Phase]
"""That of all stages together, for the maps between them and a number of iterations."""


@dataclass(kw_only=True)
class Descent(AttackState):
    """The candidate images and what they are compared with."""

    phase: Phase
    plans: list[Plan]
    begun: int = 0
    """Iterations before the present one."""
    matching: Matching
    images: Tensor
    """(N, C, H, W), normalized."""
    pyramid: Pyramid
    best: Tensor
    """Images of least own loss."""
    best_loss: Tensor


@final
class FactoredInversion(Attack[Descent]):
    """Recovers features, labels and error signals; then inverts the body with them held fixed.

    It needs a two-layer head and no knowledge of labels. Of several local steps it takes the mean
    gradient for one step's at first, and then simulates them, from the labels and the features that
    it recovers.
    """

    paper: ClassVar[str] = (
        "fedsim: features and error signals by best_features, squared distance of the body's "
        "update with smoothed slopes"
    )

    iterations: Annotated[int, Field(ge=1)] = 1500
    """Of Adam."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """In units of normalized pixels, falling as a cosine."""
    total_variation: Annotated[float, Field(ge=0)] = 0.02
    """Weight of the mean absolute difference of neighbouring pixels, three times that in color;
    it falls to 0.4 of it. Behind noise there is more, as the noise's variance demands."""
    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the relative squared distance of features."""
    jump_width: Annotated[float, Field(ge=0)] = 1.0
    """How wide a jump of a slope is to its derivative, in units of its input; 0: as it is."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Descent:
        """Recover features, and start at random images.

        Raises:
            AttackFailed: the model has no two-layer head, or nothing is left of its gradient.
        """
        seed = int(torch.randint(2**31, (), generator=rng))
        found = solve(BestFeatures(), observation, knowledge, seed).reconstruction.features
        assert found is not None
        phase, plans = self._plan(observation, found, seed)
        matching = Matching(observation)
        images = matching.random_candidate(phase.labels, rng, std=0.3).images.detach()
        infinite = torch.full((), torch.inf, device=images.device)
        return Descent(
            loss=infinite,
            phase=phase,
            plans=plans,
            matching=matching,
            images=images,
            pyramid=_pyramid(images),
            best=images.clone(),
            best_loss=infinite,
        )

    def step(self, state: Descent) -> Descent:
        """One step of Adam, projected onto valid pixels."""
        while state.plans and state.iteration - state.begun >= state.phase.iterations:
            state.phase, state.begun = state.plans.pop(0)(state), state.iteration
            state.images, state.best_loss = state.best, torch.full_like(state.best_loss, torch.inf)
            state.pyramid = _pyramid(state.images)
        phase, images = state.phase, state.images
        if isinstance(phase.misfit, Peeling):
            state.loss = phase.misfit.step()
            state.iteration += 1
            return state
        done = (state.iteration - state.begun) / phase.iterations
        misfit = phase.misfit(images)
        variation, slope = chromatic_variation(images)
        final = phase.final_variation * phase.total_variation
        state.loss = misfit.update + phase.feature_weight * misfit.features + final * variation
        better = state.loss < state.best_loss
        state.best_loss = torch.where(better, state.loss, state.best_loss)
        state.best = torch.where(better, images, state.best)
        weight = phase.total_variation * phase.final_variation**done
        left = 0.5 + 0.5 * math.cos(math.pi * done)
        step_size = phase.step_size * (_FINAL + (1 - _FINAL) * left)
        state.pyramid.step(slope.mul_(weight).add_(misfit.slope), step_size)
        images.clamp_(*state.matching.box)
        state.iteration += 1
        return state

    def terminate(self, state: Descent) -> bool:
        """After `iterations`."""
        return state.iteration >= self.iterations

    def postprocess(self, state: Descent) -> Reconstruction:
        """The iterate of least own loss, and the labels and features that it was built on."""
        images = state.best
        if state.phase.without_contrast:
            images = exposed(images, state.matching.box)
        return Reconstruction(
            images=state.matching.pixels(images),
            labels=state.phase.labels,
            features=state.phase.features,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )

    def total(self) -> int:
        """`iterations`."""
        return self.iterations

    def _plan(self, observation: Observation, found: Tensor, seed: int) -> tuple[Phase, list[Plan]]:
        """The first phase, and those to come, for features that were `found` (N, d).

        One phase, for exact features of one gradient; three, if the body is deep: peeled, its first
        stage alone, and all together. Where features may be wrong, images lead to them first, in
        two goes if need be. Several local steps are taken for one gradient, and in the end, if
        the body is not deep, unrolled.
        """
        several = observation.training.steps > 1 or observation.num_clients > 1
        one = as_one_gradient(observation) if several else observation
        seen, stream = HeadGradient.of(one), generator(seed, "peeling")
        staged = StagedBody(one, len(found), stream, width=self.jump_width)
        deep = len(staged.stages) >= _DEEP
        unrolls = several and not deep
        rough = int(_ROUGH * self.iterations) if unrolls else self.iterations
        values = observation.num_images * math.prod(observation.model.input_shape)

        def whole(features: Tensor, known: Signals, iterations: int) -> Phase:
            weight, variation = self.feature_weight, self.total_variation
            if several:
                weight, variation = _ROUGH_FEATURES * weight, max(_ROUGH_VARIATION, variation)
            variation = max(variation, 2 * _PRIOR * values * noise_share(one, seen))
            misfit = BodyGradient(
                one, features, known, weight=weight, width=self.jump_width, calls=iterations
            )
            return Phase(
                misfit, iterations, self.step_size, variation, known.labels, weight, features
            )

        def factored(features: Tensor, iterations: int) -> tuple[Phase, list[Plan]]:
            known = signals(observation, features)
            if not deep:
                return whole(features, known, iterations), []
            noise = noise_energy(one, seen)
            steps = 0 if several or noise > _BURIED else int(_PEELED * iterations)
            peeling = Peeling(one, staged, features, known, stream, steps=steps)
            relaxed = partial(self._relaxed, one, staged, features, known, noise, several)
            peeled = Phase(peeling, steps, 0.0, 0.0, known.labels, features=features)
            return peeled, [partial(self._from_maps, relaxed, iterations)]

        def from_images(state: Descent) -> Phase:
            iterations = rough - state.iteration
            features = image_features.fitted(seen, _features(observation, state.best), found)
            if features is None:
                return replace(state.phase, iterations=iterations)
            if state.iteration == count and not image_features.explained(seen, features):
                state.plans.insert(0, from_images)
                return state.phase
            phase, following = factored(features, iterations)
            state.plans[:0] = following
            return phase

        def unrolled(state: Descent) -> Phase:
            iterations = self.iterations - rough
            features = state.phase.features
            if features is None:
                features = _features(observation, state.best)
            known, weight = signals(observation, features), self.feature_weight
            misfit = UnrolledUpdate(
                observation, features, known, weight=weight, width=self.jump_width, calls=iterations
            )
            return Phase(
                misfit,
                iterations,
                _FINE_STEP * self.step_size,
                self.total_variation,
                known.labels,
                weight,
                features,
                without_contrast=state.phase.without_contrast,
            )

        last = [unrolled] if unrolls else []
        if image_features.settled(seen, found):
            phase, following = factored(found, rough)
            return phase, [*following, *last]
        count = int(_FIRST * rough)
        # Behind noise, labels are as doubtful as the features that imply them.
        labels = infer_labels(observation) if seen.noisy else signals(observation, found).labels
        misfit = WholeGradient(one, labels, width=self.jump_width, calls=count)
        variation = max(_WHOLE_VARIATION, self.total_variation)
        return Phase(misfit, count, self.step_size, variation, labels), [from_images, *last]

    def _from_maps(self, relaxed: Relaxed, iterations: int, state: Descent) -> Phase:
        """Images from what went into the second stage, and then all that was peeled with them.

        Or, where that is lost, from the `relaxed` stages alone, in all the `iterations` left.
        """
        peeled = state.phase
        assert isinstance(peeled.misfit, Peeling)
        left = iterations - peeled.iterations
        single = int(_SINGLE * iterations)
        # What is left unexplained of a stage, its maps have passed on to the one before.
        doubt = peeled.misfit.unexplained
        if doubt > _LOST or not single:
            return relaxed([], left, state)
        state.plans.insert(0, partial(relaxed, peeled.misfit.maps, left - single))
        weight = _MAPS / (1 + _DOUBT * doubt) * self.feature_weight
        return replace(
            peeled,
            misfit=peeled.misfit.images(weight=weight, calls=single),
            iterations=single,
            step_size=self.step_size,
            total_variation=_COARSE_VARIATION * self.total_variation,
            final_variation=max(_FINE_VARIATION, doubt),
            feature_weight=weight,
        )

    def _relaxed(
        self,
        observation: Observation,
        staged: StagedBody,
        features: Tensor,
        known: Signals,
        noise: float,
        rough: bool,
        maps: list[Tensor],
        iterations: int,
        state: Descent,
    ) -> Phase:
        """All stages together, from what went into those but the first, if that is known."""
        misfit = Relaxation(
            observation,
            staged,
            features,
            known,
            state.best,
            maps,
            noise=noise,
            rough=rough,
            steps=iterations,
        )
        return Phase(
            misfit,
            iterations,
            misfit.step_size,
            _RELAXED_VARIATION * self.total_variation if maps else self.total_variation,
            known.labels,
            misfit.tight,
            features,
            final_variation=1.0,
            without_contrast=staged.without_contrast,
        )


def _pyramid(images: Tensor) -> Pyramid:
    return Pyramid(images, betas=(0.9, 0.99))


def _features(observation: Observation, images: Tensor) -> Tensor:
    """(N, d) of normalized `images`, as the client's model computes them."""
    model = rebuild(observation)
    buffers = {name: value.clone() for name, value in observation.buffers.items()}
    function = features_function(model, buffers, observation.training)
    with torch.no_grad():
        return function(dict(observation.parameters), images)
