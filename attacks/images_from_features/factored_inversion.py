"""Images from a batch's update that is factored into features and error signals first.

Where features can be recovered (`_heads` chooses how), labels, features and error signals of every
image are known, and what is left is `_body_gradient`: a least-squares problem in the images alone,
descended with the slopes of ReLU and max pooling smoothed (`smooth`), without which every
linear piece of the network has a local minimum, and over images of several resolutions (`Pyramid`).

What else an update asks for comes before or in place of that, in phases. A deep body is peeled
first (`StagePeeling`), its images are then descended through the first stage alone, and in the end
together with all that was peeled (`Relaxation`); behind much noise that is done from the beginning.
Where features may be wrong, images lead to them first (`refit_features`), in two goes if need be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed, remove_truncated
from fedsim.contracts.grant import Knowledge
from fedsim.models.local import features_of
from fedsim.models.victim import rebuild
from fedsim.rng import generator
from fedsim.types import Effect, Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack, SearchState
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._local_steps import as_one_gradient
from fedsim_attacks.gradient_matching._drawing import Pyramid, half_cosine
from fedsim_attacks.gradient_matching._image_priors import (
    KnownFeatures,
    chromatic_variation,
    exposure_factors,
    trusted_contrast,
)
from fedsim_attacks.gradient_matching._matching import Matching
from fedsim_attacks.images_from_features._body_gradient import (
    LaterSteps,
    Misfit,
    PartGradient,
    StageTarget,
    WholeGradient,
)
from fedsim_attacks.images_from_features._heads import (
    Signals,
    are_determined,
    are_explained,
    head_of,
    noise_share,
    refit_features,
    relative_noise_variance,
    signals,
    try_recovery,
)
from fedsim_attacks.images_from_features._stages import (
    LEAST_CLEAR,
    Relaxation,
    StagedBody,
    StagePeeling,
)
from fedsim_attacks.images_from_features.feature_regression import ImageDistribution, ImagePrior
from fedsim_attacks.labels.label_inference import infer_labels

_FINAL_VARIATION = 0.4
"""Final weight of the total variation, which costs contrast, over that of the beginning."""
_ONE_STEP_SHARE = 0.7
"""Share of the iterations that take several steps for one gradient, at a seventh of the cost;
through a deep body all do, as the descent of a whole one leads away."""
_FINE_STEP = 0.3  # factor of the step size when steps are unrolled: large steps lead anywhere
_FIRST = 0.25
"""Share of the iterations before images' features are looked at, where the head is blurred."""
_PEELED, _SINGLE = 0.35, 0.4
"""Shares of the iterations in which stages are peeled, each with as many steps, and in which images
are descended through the first one; the others are all stages' together."""
_TOO_NOISY_TO_PEEL = 0.5  # share of noise in the body's update, from which stages are not peeled
_MOSTLY_NOISE = 0.9
"""Share of noise from which no features are fitted: they would be those of noise."""
_RELAXED_VARIATION = 2.5
"""Weight of the total variation in the descent of all stages, times the usual."""
_UNSEEN, _FAINT = 1e-3, 0.15
"""`StagedBody.contrast_seen` up to which that is nothing, and up to which noise hides it."""
_DEEP = 4  # stages from which a body is peeled: through fewer, images descend as well from afar
_MAPS = 4.0
"""Weight of the first stage's outputs over that of features: they are hundreds of times as many."""
_DOUBT = 10.0
"""Factor of what is left unexplained of the stage behind, by which that weight is less."""
_LOST = 0.5  # unexplained share of a stage from which its maps are worth nothing
_COARSE_VARIATION, _FINE_VARIATION = 15.0, 0.05
"""Factor of the variation's weight for images from maps, and its last value over its first."""
_WHOLE_VARIATION = 0.03
"""Least weight of the total variation against the cosine distance of the whole update."""
_DIRECTION_STEP, _DIRECTION_FEATURES = 2.0, 0.1
"""Factors of step size and weight of features where directions of tensors are compared."""
_DIRECTION_VARIATION, _DIRECTION_FINAL = 10.0, 0.1
"""Factor of the variation's weight there at first, and its last value over its first."""
_LEAST_DISTRIBUTION_WEIGHT = 1e-3
"""Least weight of how unlikely images are by the distribution of public ones."""
_PRIOR = 0.7
"""Nats a value by which noise makes an image of total variation 1 less likely than a flat one."""


@final
@dataclass(frozen=True)
class _Phase:
    """A comparison of images with the update for some iterations, and how they move."""

    misfit: Callable[[Tensor], Misfit] | StagePeeling
    """The comparison, or the stages that are peeled first, while images stay as they are."""
    iterations: int  # number of steps of Adam
    step_size: float  # first step size, in normalized pixels
    total_variation: float  # weight of the total variation at the beginning
    labels: Tensor  # (N,) int64: labels of the images
    features: Tensor | None = None
    """(N, d): features that images are to have; None as long as none are known."""
    final_variation: float = _FINAL_VARIATION
    """Weight of the total variation at the end, over that of the beginning."""
    contrast: float | None = None
    """Share of the contrast that fills valid pixels, which images get in the end, if any."""


@final
class _Phases:
    """The phases of one observation's descent, each made when the one before is over."""

    def __init__(
        self,
        observation: Observation,
        seen: Observation,
        recovered: Tensor | None,
        seed: int,
        settings: FactoredInversion,
        prior: ImagePrior | None = None,
        inferred: Tensor | None = None,
    ) -> None:
        """Plans the first phase, of `recovered` features (N, d), right or wrong, or of none.

        Candidates are compared with `seen`, the update as it is. `observation` is what the head is
        read from, and `inferred` are labels (N,), if its entries no longer tell them.
        """
        self._observation, self._recovered, self._settings = observation, recovered, settings
        self._inferred = inferred
        self._several = observation.training.steps > 1 or observation.num_clients > 1
        # Error signals recompute a gradient, of which a single local step sends a multiple.
        one = self._several or observation.training.sums_gradients
        self._as_one = as_one_gradient(observation) if one else observation
        self._seen, self._compared = seen, as_one_gradient(seen) if one else seen
        self._head, self._stream = head_of(self._as_one), generator(seed, "peeling")
        self._staged = StagedBody(self._compared, self._stream, width=settings.jump_width)
        self._is_deep = len(self._staged.stages) >= _DEEP
        self._contrast_seen = self._staged.contrast_seen
        unrolls = self._several and not self._is_deep
        self._one_step_iterations = (
            int(_ONE_STEP_SHARE * settings.iterations) if unrolls else settings.iterations
        )
        """Iterations that take several steps for one gradient."""
        self._begun = 0
        """Iterations before the present phase."""
        self._plans: list[Callable[[Tensor], _Phase]] = [self._plan_unrolling] if unrolls else []
        """Makers of the phases to come, each of the normalized images of the phase before it."""
        self._prior = prior
        self.present = self._plan_first()
        self.distribution = self._distribution()
        """Distribution of the present phase's images; None without public ones."""
        values = observation.num_images * math.prod(observation.model.input_shape)
        # The noise's variance, as for a likelihood, and more where little of the update is clear.
        clear = max(1 - noise_share(self._as_one, self._head), LEAST_CLEAR)
        demanded = values * relative_noise_variance(self._as_one, self._head) / math.sqrt(clear)
        self.distribution_weight = max(_LEAST_DISTRIBUTION_WEIGHT, demanded)
        """Weight of its energy: that of a likelihood, and more if most of the update is noise."""

    @property
    def stages(self) -> int:
        return len(self._staged.stages)

    def over(self, iteration: int) -> bool:
        """Says whether the present phase ends at `iteration`, counted over all phases."""
        return bool(self._plans) and iteration - self._begun >= self.present.iterations

    def follow(self, images: Tensor) -> None:
        """Begins the next phase, from normalized `images` (N, C, H, W)."""
        self._begun += self.present.iterations
        before, self.present = self.present.features, self._plans.pop(0)(images)
        if self.present.features is not before:
            self.distribution = self._distribution()

    def done(self, iteration: int) -> float:
        """Computes the share, in [0, 1], of the present phase that is over at `iteration`."""
        return (iteration - self._begun) / self.present.iterations

    def _distribution(self) -> ImageDistribution | None:
        if self._prior is None:
            return None
        features = self.present.features
        if features is None:
            return self._prior.unconditional(self._observation.num_images)
        return self._prior.given_features(features)

    def _plan_first(self) -> _Phase:
        iterations = self._one_step_iterations
        if self._recovered is None:
            return self._compare_whole(self._infer_labels(), iterations)
        if are_determined(self._head, self._recovered):
            return self._plan_factored(self._recovered, iterations)
        # Behind noise, labels are as doubtful as the features that imply them.
        if self._head.noisy:
            labels = self._infer_labels()
        else:
            labels = signals(self._observation, self._recovered).labels
        if self._is_deep or noise_share(self._as_one, self._head) <= _MOSTLY_NOISE:
            iterations = int(_FIRST * iterations)
            self._plans.insert(0, partial(self._refit_from_images, 1))
        return self._compare_whole(labels, iterations)

    def _infer_labels(self) -> Tensor:
        return infer_labels(self._observation) if self._inferred is None else self._inferred

    def _signals(self, features: Tensor) -> Signals:
        """Derives signals from `features` (N, d); a single image's label may speak for itself."""
        known, head = signals(self._observation, features), self._head
        alone = self._observation.num_images == 1 and isinstance(head, ClassifierGradient)
        if not alone or head.noisy:
            return known
        assert isinstance(head, ClassifierGradient)
        if bool(head.gradient.any()) and are_explained(head, features):
            return known
        # Features that explain little imply any label, where the sign of one entry says it.
        return signals(self._observation, features, self._infer_labels())

    def _compare_whole(self, labels: Tensor, iterations: int) -> _Phase:
        """Makes a phase that knows of no feature: candidates' whole update is compared."""
        settings = self._settings
        misfit = WholeGradient(self._compared, labels, width=settings.jump_width, calls=iterations)
        variation = max(_WHOLE_VARIATION, settings.total_variation)
        contrast = 1.0 if self._contrast_seen < _FAINT else None
        return _Phase(misfit, iterations, settings.step_size, variation, labels, contrast=contrast)

    def _refit_from_images(self, attempts: int, images: Tensor) -> _Phase:
        """Refits features from those of the images, once after each of so many `attempts`."""
        remaining = self._one_step_iterations - self._begun
        assert self._recovered is not None
        features = refit_features(self._head, _features(self._observation, images), self._recovered)
        if features is None:
            return replace(self.present, iterations=remaining)
        # Not explained: images go on for as many iterations, and are asked once more.
        if attempts == 1 and not are_explained(self._head, features):
            self._plans.insert(0, partial(self._refit_from_images, 2))
            return self.present
        return self._plan_factored(features, remaining)

    def _plan_factored(self, features: Tensor, iterations: int) -> _Phase:
        """Makes the first phase with `features` (N, d) known; it plans those that follow."""
        known = self._signals(features)
        if not self._is_deep:
            ordinary = isinstance(self._head, ClassifierGradient) and self._head.exact
            trained = any(stage.part.parameters for stage in self._staged.stages)
            if not trained or (ordinary and not self._several):
                return self._plan_direction(known, iterations)
            return self._plan_whole(known, iterations)
        noisy = noise_share(self._as_one, self._head) > _TOO_NOISY_TO_PEEL
        # Peeling passes on what noise and later steps leave open: there all stages go together.
        steps = 0 if self._several or noisy else int(_PEELED * iterations)
        target = StageTarget(features, known.errors, known.scale)
        peeling = StagePeeling(self._staged, target, self._stream, steps=steps)
        self._plans.insert(0, partial(self._plan_first_stage, known, iterations))
        return _Phase(peeling, steps, 0.0, 0.0, known.labels, features=features)

    def _plan_direction(self, known: Signals, iterations: int) -> _Phase:
        """Makes the phase that compares the direction of each tensor, classifier and all."""
        # Nothing is asked of the update's length, which far candidates meet by making it small.
        settings = self._settings
        misfit = WholeGradient(
            self._compared,
            known.labels,
            width=settings.jump_width,
            calls=iterations,
            features=KnownFeatures(
                known.features, "relative", known=self._told_columns(known.features)
            ),
            weight=_DIRECTION_FEATURES * settings.feature_weight,
        )
        return _Phase(
            misfit,
            iterations,
            _DIRECTION_STEP * settings.step_size,
            _DIRECTION_VARIATION * settings.total_variation,
            known.labels,
            known.features,
            final_variation=_DIRECTION_FINAL,
        )

    def _told_columns(self, features: Tensor) -> Tensor | float:
        """Returns (d,): 1 for `features` that the head's gradient tells, else 0; or 1 for all."""
        left = remove_truncated(self._compared)
        # What is removed by its size is small, which says as much of the feature.
        if left.effect.removed != "others" or left.effect.noisy:
            return 1.0
        head = head_of(left)
        assert isinstance(head, ClassifierGradient)
        return head.gradient[:, : features.shape[1]].any(0).to(features)

    def _plan_whole(self, known: Signals, iterations: int) -> _Phase:
        """Makes the phase that compares the whole body's share of the update."""
        settings, variation = self._settings, self._settings.total_variation
        values = self._observation.num_images * math.prod(self._observation.model.input_shape)
        # As of a likelihood: twice the noise's variance times the prior's energy of all values.
        demanded = 2 * _PRIOR * values * relative_noise_variance(self._as_one, self._head)
        misfit = PartGradient.of_body(
            self._compared,
            known,
            weight=settings.feature_weight,
            width=settings.jump_width,
            calls=iterations,
            later=self._later_steps(known, iterations),
        )
        return _Phase(
            misfit,
            iterations,
            settings.step_size,
            max(variation, demanded),
            known.labels,
            known.features,
            contrast=1.0 if demanded > variation and self._contrast_seen < _FAINT else None,
        )

    def _plan_first_stage(self, known: Signals, iterations: int, images: Tensor) -> _Phase:
        """Makes the phase from the second stage's inputs, if they are known, to images."""
        peeled, settings = self.present, self._settings
        assert isinstance(peeled.misfit, StagePeeling)
        remaining = iterations - peeled.iterations
        single = int(_SINGLE * iterations)
        # What is left unexplained of a stage, its maps have passed on to the one before.
        doubt = peeled.misfit.unexplained
        if doubt > _LOST or not single:
            return self._plan_relaxation(known, [], remaining, images)
        self._plans.insert(
            0, partial(self._plan_relaxation, known, peeled.misfit.maps, remaining - single)
        )
        weight = _MAPS / (1 + _DOUBT * doubt) * settings.feature_weight
        return replace(
            peeled,
            misfit=peeled.misfit.images(weight=weight, calls=single),
            iterations=single,
            step_size=settings.step_size,
            total_variation=_COARSE_VARIATION * settings.total_variation,
            final_variation=max(_FINE_VARIATION, doubt),
        )

    def _plan_relaxation(
        self, known: Signals, maps: list[Tensor], iterations: int, images: Tensor
    ) -> _Phase:
        """Makes the phase of all stages together, from their inputs (but the images), if known."""
        variation = self._settings.total_variation
        misfit = Relaxation(
            self._staged,
            StageTarget(known.features, known.errors, known.scale),
            images,
            maps,
            noise=noise_share(self._as_one, self._head),
            later=self._later_steps(known, iterations),
            steps=iterations,
        )
        return _Phase(
            misfit,
            iterations,
            misfit.step_size,
            _RELAXED_VARIATION * variation if maps else variation,
            known.labels,
            known.features,
            final_variation=1.0,
            contrast=self._contrast(),
        )

    def _later_steps(self, known: Signals, calls: int) -> LaterSteps | None:
        return LaterSteps(self._observation, known.labels, calls) if self._several else None

    def _contrast(self) -> float | None:
        if self._contrast_seen > _UNSEEN:
            return None
        names = [name for name, _ in self._staged.stages[0].part.parameters]
        return trusted_contrast(noise_share(self._as_one, self._head, names))

    def _plan_unrolling(self, images: Tensor) -> _Phase:
        """Makes the phase that simulates all local steps."""
        settings, iterations = self._settings, self._settings.iterations - self._one_step_iterations
        features = self.present.features
        if features is None:
            features = _features(self._observation, images)
        known = self._signals(features)
        misfit = WholeGradient(
            self._seen,
            known.labels,
            width=settings.jump_width,
            calls=iterations,
            features=KnownFeatures(features, "relative"),
            weight=settings.feature_weight,
            by_part=True,
        )
        step_size = _FINE_STEP * settings.step_size
        return _Phase(
            misfit, iterations, step_size, settings.total_variation, known.labels, features
        )


def _features(observation: Observation, images: Tensor) -> Tensor:
    """Computes features (N, d) of normalized `images` as the client's model does."""
    model, weights = rebuild(observation), observation.parameters
    return features_of(model, weights, observation.buffers, images, observation.training)


_FINAL = 0.005  # step size at the end, over that of the beginning


@dataclass(kw_only=True)
class _FactoredInversionState(SearchState):
    recovered: Reconstruction | None  # features as the head told them; None if it did not
    phases: _Phases  # the phases of the descent
    matching: Matching  # the observed update, for the range and the pixels of images
    images: Tensor  # (N, C, H, W), normalized
    pyramid: Pyramid  # the optimizer of the images

    @property
    def phase(self) -> _Phase:
        return self.phases.present

    @property
    def shown(self) -> Tensor:
        """The images of least loss, with the contrast of the present phase."""
        return self.contrast_factors(self.best) * self.best

    def contrast_factors(self, images: Tensor) -> Tensor:
        """Computes factors (N, 1, 1, 1) that give `images` the present phase's contrast, or 1."""
        contrast = self.phase.contrast
        if contrast is None:
            return images.new_ones(len(images), 1, 1, 1)
        return exposure_factors(images, self.matching.box, contrast)


@final
class FactoredInversion(IterativeAttack[_FactoredInversionState]):
    """Recovers features, labels and error signals; then inverts the body with them held fixed.

    It needs no knowledge of labels, and no planted head: an ordinary classifier of more classes
    than images tells as much (of a shallow body, directions of tensors are compared). Of more
    images, a layer whose inputs `extreme_rays` finds tells it. Several local steps are taken for
    one of the mean gradient, and then, if the body is not deep, simulated.
    """

    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "fedsim: features first (Liu et al., section 4; Kariyappa et al., ICML 2023), stages by "
        "their own gradient (Zhu and Blaschko, R-GAP, ICLR 2021), with error signals held fixed, "
        "in squared distance with smoothed slopes, or by each tensor's direction"
    )

    iterations: Annotated[int, Field(ge=1)] = 1500
    """Steps of Adam."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """Step size in normalized pixels, falling as a cosine; twice it where directions are
    compared."""
    total_variation: Annotated[float, Field(ge=0)] = 0.02
    """Weight of the mean absolute difference of neighbouring pixels, three times that in color; it
    falls to 0.4 of it. Noise raises it; where directions are compared it falls from ten times
    it."""
    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the relative squared distance of features; a tenth of it with directions."""
    jump_width: Annotated[float, Field(ge=0)] = 1.0
    """Width over which jumps of activations' slopes are smoothed in second derivatives, in units of
    a layer's inputs; 0 keeps jumps."""

    public: bool = True
    """Whether public images, if the threat model grants any, are a prior."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _FactoredInversionState:
        """Recovers features, or none where that fails; draws random images. See `Attack.init`."""
        seed = int(torch.randint(2**31, (), generator=rng))
        public = knowledge.public_images if self.public else None
        # What images look like has to count for more the more noise there is.
        seen, inferred = observation, None
        if altered := public is None and _is_altered_direction(observation):
            observation = replace(observation, effect=Effect(model=observation.effect.model))
        elif observation.effect.truncated is not None and not observation.effect.noisy:
            # A truncated entry still has its sign, which is all that a label may need.
            with suppress(AttackFailed):
                inferred = infer_labels(observation)
            observation = remove_truncated(observation)
        recovered = try_recovery(observation, knowledge, seed)
        if altered and recovered is not None:
            # Nothing is certain of an update that is taken for an undefended one.
            recovered = replace(recovered, certified=None, determined=None)
        features = None if recovered is None else recovered.features
        prior = None if public is None else ImagePrior(observation, public)
        phases = _Phases(observation, seen, features, seed, self, prior, inferred)
        matching = Matching(observation)
        images = matching.random_candidate(phases.present.labels, rng, std=0.3).images.detach()
        # The expected images, given public ones, are nearer than random pixels.
        if phases.distribution is not None:
            images = phases.distribution.means
        return _FactoredInversionState(
            recovered=recovered,
            phases=phases,
            matching=matching,
            images=images,
            pyramid=Pyramid(images),
            best=images.clone(),
        )

    def step(self, state: _FactoredInversionState) -> _FactoredInversionState:
        """Takes a step of Adam on valid pixels, or inverts body stages. See `Attack.step`."""
        while state.phases.over(state.iteration):
            state.best = state.shown
            state.phases.follow(state.best)
            # Another objective: losses of the phase before say nothing here.
            state.images, state.best_loss = state.best, torch.full_like(state.best_loss, torch.inf)
            state.pyramid = Pyramid(state.images)
        phase, images = state.phase, state.images
        if isinstance(phase.misfit, StagePeeling):
            state.loss = phase.misfit.step()
            state.iteration += 1
            return state
        done = state.phases.done(state.iteration)
        misfit = phase.misfit(images)
        variation, slope = chromatic_variation(images)
        # The loss has the final weight throughout, so that iterates of one phase can be compared.
        final = phase.final_variation * phase.total_variation
        state.loss = misfit.loss + final * variation
        # The variation's weight falls geometrically, to `final_variation` of itself.
        slope.mul_(phase.total_variation * phase.final_variation**done).add_(misfit.slope)
        if (distribution := state.phases.distribution) is not None:
            # Where the update does not see contrast, images have less than they are shown with.
            contrast_factors = state.contrast_factors(images)
            energy, energy_slope = distribution(contrast_factors * images)
            state.loss = state.loss + state.phases.distribution_weight * energy
            slope.addcmul_(energy_slope, contrast_factors, value=state.phases.distribution_weight)
        if misfit.target_changed:  # losses of before cannot be compared with those of it
            state.best_loss = torch.full_like(state.best_loss, torch.inf)
        state.keep_best(images)
        state.pyramid.step(slope, phase.step_size * half_cosine(done, _FINAL))
        images.clamp_(*state.matching.box)
        state.iteration += 1
        return state

    def postprocess(self, state: _FactoredInversionState) -> Reconstruction:
        """Returns images of least loss, labels, and features; certified only if not refitted."""
        told, phase = state.recovered, state.phase
        if told is None or phase.features is None or told.features is not phase.features:
            told = Reconstruction(loss=0.0, iterations=0)
        certified = told.certified
        if certified is not None and told.labels is not None:
            # A certificate is for the label that came with it.
            certified = certified & (told.labels == phase.labels)
        return Reconstruction(
            images=state.matching.pixels(state.shown),
            labels=state.phase.labels,
            features=state.phase.features,
            features_by=told.features_by,
            determined=told.determined,
            certified=certified,
            stages=state.phases.stages,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )


def _is_altered_direction(observation: Observation) -> bool:
    """Whether a defense altered entries, and the direction still tells all that is used."""
    # Zeros, cuts, rounding and weak noise hardly turn the directions of tensors, and features that
    # allow for them say less. Nor does chance that the model draws, or another view of an image,
    # behave like noise of each entry, for which features would allow.
    effect = observation.effect
    one = observation.training.steps == 1 and observation.num_clients == 1
    if effect.exact or not effect.known or not one:
        return False
    if effect.orthogonal:
        return False
    if not isinstance(head_of(observation), ClassifierGradient):
        return False
    return len(StagedBody(observation, generator(0, "stages"), width=0).stages) < _DEEP
