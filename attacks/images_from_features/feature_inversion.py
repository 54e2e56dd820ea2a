"""Gradient inversion with recovered features, through an untrained U-Net.

Liu, Wang, Du and Lei, Data Reconstruction Attacks and Defenses: A Systematic Evaluation, section 4
(equations 2 and 3) and Appendix D: reweighted gradient matching + α_TV TV + α_BN BN + α_f R, where
the features that R holds candidates to are also fed to the U-Net. What differs from the paper is
said in docs/image-reconstruction.md, and which parameters bring it back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from fedsim.contracts.attack import remove_truncated
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack, SearchState
from fedsim_attacks.gradient_matching._drawing import Canvas, Decay, Drawing, DrawingSettings
from fedsim_attacks.gradient_matching._image_priors import VARIATIONS, ForwardPrior, KnownFeatures
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    ComparedTensors,
    Distance,
    Matching,
    cosine_distance,
    granted_labels,
    reweighted_cosine,
)
from fedsim_attacks.gradient_matching.inverting_gradients import regularized
from fedsim_attacks.head_features._head_gradient import HeadGradient, Objective
from fedsim_attacks.images_from_features._body_gradient import PartGradient
from fedsim_attacks.images_from_features._heads import (
    FeatureSource,
    doubts,
    head_of,
    recover,
    resolved,
    signals,
    source_attack,
)
from fedsim_attacks.labels.label_inference import infer_labels

_DOUBT = 0.01
"""Doubt at which a feature counts half, about an angle of 0.1. Beyond, it tells no label."""


@dataclass(frozen=True)
class _Told:
    """Features, labels and trust that are known before any image is drawn."""

    recovered: Reconstruction | None
    """Features, and which attack they are by; None if none are wanted."""
    labels: Tensor  # (N,) int64, in the features' order
    trust: Tensor | float  # (N,) in [0, 1]: weight of each image's features
    sure: bool
    """Whether features are in so little doubt that labels and error signals are read off them."""

    @property
    def features(self) -> Tensor | None:
        return None if self.recovered is None else self.recovered.features


@dataclass(kw_only=True)
class _FeatureInversionState(SearchState):
    """The drawing of images, and what they are compared with."""

    matching: Matching
    drawing: Drawing
    unet: Drawing | None
    """Drawing that takes over after the pixels; None if there is no such change to come."""
    told: _Told
    body: PartGradient | None
    """Body's share of the update, compared in place of the whole if error signals are known."""
    prior: ForwardPrior
    distance: Distance


@final
class FeatureInversion(IterativeAttack[_FeatureInversionState]):
    """Matches the update's direction by images that a U-Net draws from the recovered features.

    Another attack recovers these (`features_from`). Labels are read off the features if they
    explain the head's gradient. Otherwise labels are those that the threat model grants. The
    batch-norm term is used if the threat model grants statistics.
    """

    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Liu et al., Data Reconstruction Attacks and Defenses: A Systematic Evaluation, section 4"
    )

    iterations: Annotated[int, Field(ge=1)] = 10_000
    """Steps of Adam."""
    features_from: FeatureSource = "suited"
    """The attack that recovers features: `tensor_features`, as in the paper, `best_features`,
    `classifier_fit`, or any other that answers some, by its name or as `{name: ..., parameters}`;
    `suited` chooses by the head, `none` matches the update alone. `{name: tensor_features, oracle:
    true}` has the paper's order by the true features, which `knowledge.features` has to grant."""
    prior: Canvas = "unet"
    """Variables that are optimized: the weights of an untrained U-Net, or pixels, alone or with
    coarser images that are added to them (`pyramid`)."""
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Channels of the U-Net at full resolution."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Step size of Adam; default 0.001 for the U-Net and 0.1 for pixels. The paper states 0.00001,
    which draws next to nothing in 10,000 iterations."""
    decay: Decay = "steps"
    """Fall of the step size: divided by 10 at 3/8, 5/8 and 7/8 of the iterations, or a cosine."""
    pixels_first: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the iterations in which a pyramid of pixels is descended. The U-Net then learns to
    draw them, and goes on. The paper's starts from random weights."""
    cosines: Literal["weighted_sum", "sum", "weighted_mean", "whole"] = "weighted_sum"
    """Comparison of directions. `weighted_sum`: 1 - cosine summed over the update's tensors, each
    weighted by its number of non-zero parameters, as the paper does. `sum`: not weighted.
    `weighted_mean`: their mean by those weights, beside which other terms count more. `whole`: one
    cosine over all tensors together."""
    features: Literal["squared_cosine", "relative"] = "squared_cosine"
    """Distance of candidates from the recovered features: 1 - cos² (equation 2, sign-free), or the
    relative squared distance (where they have sign and norm)."""
    doubted: bool = True
    """Whether a feature counts less, the more of the head's gradient it leaves unexplained. The
    paper trusts all alike."""
    total_variation: Annotated[float, Field(ge=0)] = 0.01
    """α_TV: weight of the total variation."""
    variation: Literal["absolute", "chromatic"] = "absolute"
    """`absolute`: mean absolute difference of neighbouring pixels. `chromatic`: three times as much
    of it in color."""
    batch_norm: Annotated[float, Field(ge=0)] = 0.001
    """α_BN: weight of the distance of batch norm's inputs from the granted statistics."""
    feature_weight: Annotated[float, Field(ge=0)] = 0.1
    """α_f: weight of the misfit of features."""
    tensors: ComparedTensors = "all"
    """Tensors of the update that are matched: all, or those of the body, that is, all but the
    classifier's head. The paper reweights all; the head has most of the parameters."""
    errors: Literal["candidates", "features"] = "candidates"
    """Error signals that the update is recomputed with: those that the head computes of the
    candidates, or those that features tell. With these the head is out of the loop, and the body's
    share of the update is compared in squared distance, as `factored_inversion` does; not where
    features are in doubt, and not over several local steps or clients."""
    jump_width: Annotated[float, Field(ge=0)] = 0.0
    """Width over which jumps of activations' slopes are smoothed in second derivatives, in units of
    a layer's inputs; 0 keeps jumps."""

    @field_validator("features_from")
    @classmethod
    def _resolve(cls, source: FeatureSource) -> FeatureSource:
        return resolved(source)

    def required(self) -> Grant:
        """Returns what the attack of `features_from` requires; without one, `needs`."""
        source = source_attack(self.features_from)
        return self.needs if source is None else source.required()

    def brings(self) -> tuple[str, ...]:
        """Returns what this attack and that of `features_from` bring. See `Attack.brings`."""
        source = source_attack(self.features_from)
        own = super(FeatureInversion, self.model_copy(update={"features_from": "none"})).brings()
        return own if source is None else own + source.brings()

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _FeatureInversionState:
        """Recovers features, or fails as `features_from` does; draws pixels or weights."""
        # Recovery gets a seed, so that what it draws does not change where drawing starts.
        seed = int(torch.randint(2**31, (), generator=rng))
        seen, observation = observation, remove_truncated(observation)
        told = self._recover(observation, seen, knowledge, seed)
        matching = Matching(
            observation, calls=self.iterations, width=self.jump_width, tensors=self.tensors
        )

        features = told.features
        if features is not None:  # entries of about 1, as inputs of a network should have
            features = F.normalize(features, dim=1) * math.sqrt(features.shape[1])

        def draw_by(canvas: Canvas, iterations: int, rate: float | None) -> Drawing:
            settings = DrawingSettings(
                canvas=canvas, iterations=iterations, width=self.width, rate=rate, decay=self.decay
            )
            return Drawing(settings, observation, rng, features=features, seed=seed)

        pixels, unet = self._pixel_iterations, None
        if pixels:
            # Free pixels find a picture first, which the U-Net then starts from.
            unet = draw_by("unet", self.iterations - pixels, self.learning_rate)
            drawing = draw_by("pyramid", pixels, None)
        else:
            drawing = draw_by(self.prior, self.iterations, self.learning_rate)
        wanted, body = None, self._body(observation, told)
        if told.features is not None and body is None:
            wanted = KnownFeatures(told.features, self.features, told.trust)
        return _FeatureInversionState(
            matching=matching,
            drawing=drawing,
            unet=unet,
            told=told,
            body=body,
            prior=ForwardPrior(
                observation,
                knowledge,
                wanted,
                feature_weight=self.feature_weight,
                batch_norm=self.batch_norm,
            ),
            distance=self._distance(matching.counts),
            best=drawing.draw().detach().clone(),
        )

    def step(self, state: _FeatureInversionState) -> _FeatureInversionState:
        """Takes a step of Adam down the loss, on valid pixels. See `Attack.step`."""
        if state.unet is not None and state.iteration == self._pixel_iterations:
            # The U-Net goes on from the pixels' images, whose losses it cannot be compared with.
            state.unet.copy(state.best)
            state.drawing, state.unet = state.unet, None
            state.best_loss = torch.full_like(state.best_loss, torch.inf)
        drawn = state.drawing.draw()
        images = drawn.detach()
        loss, slope = self._compared(state, images)
        known, known_slope = state.prior(images)
        state.loss, slope = loss + known, slope + known_slope
        state.keep_best(images)
        state.drawing.step(drawn, slope)
        state.iteration += 1
        return state

    def postprocess(self, state: _FeatureInversionState) -> Reconstruction:
        """Returns the images of least loss, their labels, and features if any were recovered."""
        recovered = state.told.recovered
        return Reconstruction(
            images=state.matching.pixels(state.best),
            labels=state.told.labels,
            features=state.told.features,
            features_by=recovered.features_by if recovered else None,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )

    def _compared(self, state: _FeatureInversionState, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the objective without its prior (0-d), and its slope in the images."""
        variation = VARIATIONS[self.variation]
        if state.body is None:
            candidate = Candidate(images, state.told.labels)
            loss, (slope,) = regularized(
                state.matching, candidate, state.distance, self.total_variation, variation
            )
            return loss, slope
        misfit, (varies, slope) = state.body(images), variation(images)
        slope = misfit.slope.add(slope, alpha=self.total_variation)
        return misfit.loss + self.total_variation * varies, slope

    def _body(self, observation: Observation, told: _Told) -> PartGradient | None:
        """Prepares the body's share of the update, if error signals are wanted and known."""
        # Error signals are those of the weights that were sent: one gradient has no others.
        single = observation.training.steps == observation.num_clients == 1
        if self.errors == "candidates" or not (told.features is not None and told.sure and single):
            return None
        return PartGradient.of_body(
            observation,
            signals(observation, told.features),
            weight=self.feature_weight,
            width=self.jump_width,
            calls=self.iterations,
        )

    @property
    def _pixel_iterations(self) -> int:
        return int(self.pixels_first * self.iterations) if self.prior == "unet" else 0

    def _distance(self, counts: list[float]) -> Distance:
        if self.cosines == "whole":
            return cosine_distance
        weights = [1.0] * len(counts) if self.cosines == "sum" else counts
        return reweighted_cosine(weights, summed=self.cosines != "weighted_mean")

    def _recover(
        self, observation: Observation, seen: Observation, knowledge: Knowledge, seed: int
    ) -> _Told:
        """Recovers features as far as wanted, and orders labels as they are.

        The update as it was `seen` has the signs of truncated entries, which may say labels.
        """
        if self.features_from == "none":
            return _Told(None, _granted(seen, knowledge), 1.0, False)
        recovered = recover(observation, knowledge, seed, self.features_from)
        features = recovered.features
        assert features is not None
        head = head_of(observation)
        doubt = doubts(head, features)
        # Half the trust at a doubt of `_DOUBT`, and the less the more doubt there is.
        trust = _DOUBT / (_DOUBT + doubt) if self.doubted else torch.ones_like(doubt)
        sure = bool((doubt <= _DOUBT).all())
        if self.required().features == knowledge.grant.labels == "known":
            labels = _granted(seen, knowledge)  # features are in the order of the truth
        elif seen.effect.truncated is not None and seen.num_images == 1:
            labels = _granted(seen, knowledge)
        elif sure or not isinstance(head, HeadGradient):
            labels = signals(observation, features).labels
        else:
            labels = _ordered(_granted(seen, knowledge), head, features)
        return _Told(recovered, labels, trust, sure)


def _granted(observation: Observation, knowledge: Knowledge) -> Tensor:
    """Returns labels (N,), true if they are known and else inferred."""
    found = granted_labels(observation, knowledge)
    return infer_labels(observation) if found is None else found


def _ordered(labels: Tensor, head: HeadGradient, features: Tensor) -> Tensor:
    """Orders a batch's `labels` (N,) as the features (N, d) whose error signals they suit best."""
    from scipy.optimize import linear_sum_assignment  # which takes half a second

    # In its label's class an image's error signal is negative; of doubtful features not always.
    errors = F.normalize(Objective(head)(features.cpu()).errors, dim=0)
    # The assignment of least total error signal: p - y is negative at the label alone.
    _, place = linear_sum_assignment(errors[labels.cpu()].T.numpy())
    return labels[torch.from_numpy(place).to(labels.device)]
