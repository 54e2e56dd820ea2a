"""Gradient inversion through a generator: of its latent space first, then of its weights.

Two methods. With a trained generator: Jeon, Kim, Lee, Oh and Ok, Gradient Inversion with Generative
Image Prior, NeurIPS 2021 (GIAS). With an untrained one: Zhang et al., Generative Gradient Inversion
via Over-Parameterized Networks in Federated Learning, ICCV 2023 (GION), whose layout it has: a code
becomes a map of the smallest resolution, and two convolutions follow at each, between enlargements.
Group norm stands for their batch norm and spectral norm: so an image does not depend on others.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedsim import rng as streams
from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize, read_weights
from fedsim.system.paths import GIB, from_home, regular
from fedsim.types import FedsimError, ModelSpec, Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack, SearchState
from fedsim_attacks.gradient_matching._drawing import Adam, decayed_step, resolutions
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    ComparedTensors,
    Matching,
    cosine_distance,
    granted_labels,
)
from fedsim_attacks.gradient_matching.inverting_gradients import regularized

LATENT = 128
"""Entries of a code of an untrained generator."""
_LEAST_WIDTH = 32  # channels of the smallest untrained generator
_GROUPS = 8  # groups of channels of the generator's group norms
_SLOPE = 0.1  # slope of the leaky ReLUs below 0


@final
class Generator(nn.Module):
    """Draws pixels (N, C, H, W) in (0, 1) from codes (N, latent), whose lengths do not count."""

    def __init__(self, shape: tuple[int, ...], latent: int, width: int) -> None:
        """Draws weights from torch's global stream.

        `shape` is (C, H, W), and `width` the channels of each layer, a multiple of 8.
        """
        super().__init__()
        self.shape, self.latent, self.width = shape, latent, width
        channels, height, columns = shape
        levels = resolutions(height, columns)
        self._base = width, height >> (levels - 1), columns >> (levels - 1)
        self.first = nn.Linear(latent, torch.Size(self._base).numel())
        parts: list[nn.Module] = [nn.GroupNorm(_GROUPS, width), nn.LeakyReLU(_SLOPE)]
        for level in range(levels):
            parts += [nn.Upsample(scale_factor=2)] if level else []
            for _ in range(2):
                parts += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(_GROUPS, width)]
                parts += [nn.LeakyReLU(_SLOPE)]
        self.rest = nn.Sequential(*parts, nn.Conv2d(width, channels, 1), nn.Sigmoid())

    def forward(self, codes: Tensor) -> Tensor:
        """Draws pixels (N, C, H, W) in (0, 1) from `codes` (N, latent), none of them all zero."""
        # All codes have the length that N(0, I) has: Adam may not leave it for what is untrained.
        codes = codes * codes.square().mean(1, keepdim=True).rsqrt()
        pixels: Tensor = self.rest(self.first(codes).unflatten(1, self._base))
        return pixels


def _over_parameterized(count: int, shape: tuple[int, ...]) -> Generator:
    """Draws a generator, from torch's global stream, of more than four weights a pixel."""
    width = _LEAST_WIDTH
    while True:
        generator = Generator(shape, LATENT, width)
        weights = sum(weight.numel() for weight in generator.parameters())
        if weights > 4 * count * shape[1] * shape[2]:
            return generator
        width *= 2


_CODE_RATE = 1e-2
_WEIGHT_RATE = 1e-3
_BATCH = 16  # Adam's step sizes and the batch of a generator's training
_TRAINED_WIDTH = 32  # channels of a generator that an attack trains itself


def fit_generator(
    images: Tensor,
    *,
    width: int,
    iterations: int,
    seed: int,
    report: Callable[[int, Tensor], None] = lambda iteration, loss: None,
) -> Generator:
    """Returns a generator that draws `images`, trained with a code of 128 entries for each.

    Args:
        images: Pixels (M, C, H, W) in [0, 1].
        width: Channels of the generator's layers, a multiple of 8.
        iterations: Number of steps of Adam, each on a batch that is drawn.
        seed: Seed of all draws.
        report: Function that is called after each iteration, with its number, from 1, and its
            batch's mean squared error (0-d).
    """
    # Bojanowski et al., Optimizing the Latent Space of Generative Networks, ICML 2018, with the
    # squared error: no adversary, hence stable on few images too.
    stream = streams.generator(seed, "codes")
    codes = torch.randn(len(images), LATENT, generator=stream).to(images.device).requires_grad_()
    with streams.global_stream(streams.derive(seed, "generator")):
        _, channels, height, columns = images.shape
        generator = Generator((channels, height, columns), LATENT, width).to(images.device)
    optimizer = torch.optim.Adam(
        [
            {"params": generator.parameters(), "lr": _WEIGHT_RATE},
            {"params": [codes], "lr": _CODE_RATE},
        ]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for iteration in range(1, iterations + 1):
        chosen = torch.randperm(len(images), generator=stream)[:_BATCH].to(images.device)
        with torch.enable_grad():
            loss = F.mse_loss(generator(codes[chosen]), images[chosen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        report(iteration, loss.detach())
    return generator


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")

    shape: tuple[int, ...]
    latent: Annotated[int, Field(ge=1, le=4096)]
    width: Annotated[int, Field(ge=16, le=1024, multiple_of=_GROUPS)]
    public: str


def pack_generator(generator: Generator, public: str) -> bytes:
    """Returns `generator` as a safetensors file's bytes, which name `public`, its training data.

    pydantic's ValidationError refuses widths below 16 or above 1,024, and codes of over 4,096.
    """
    header = _Header(
        shape=generator.shape, latent=generator.latent, width=generator.width, public=public
    )
    weights = {name: weight.detach().cpu() for name, weight in generator.named_parameters()}
    return save(weights, {"generator": header.model_dump_json()})


def _read_generator(path: Path, shape: tuple[int, ...], public: str) -> Generator:
    """Reads a generator of images of `shape` (C, H, W) that was trained on `public`."""
    try:
        with safe_open(regular(path, GIB), framework="pt") as file:
            header = _Header.model_validate_json((file.metadata() or {}).get("generator", "null"))
    except (OSError, SafetensorError) as error:
        raise FedsimError(f"{path}: cannot be read as safetensors: {error}") from error
    except ValidationError as error:
        raise FedsimError(
            f"{path}: not a generator; write one with benchmarks/train_generator.py"
        ) from error
    if header.shape != shape:
        raise FedsimError(
            f"{path}: draws images of {_times(header.shape)}, the victim's are of {_times(shape)}; "
            "train a generator on public images of that shape"
        )
    if header.public != public:
        raise FedsimError(
            f"{path}: was trained on {header.public!r}, the attack declares {public!r}; correct "
            "`public`, or name the file that was trained on it"
        )
    with torch.device("meta"):  # draws no random weights
        generator = Generator(header.shape, header.latent, header.width)
    weights, _ = read_weights(path, generator)
    generator.load_state_dict(weights, assign=True)
    return generator


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


_LATENT_SHARE = 11
"""One iteration in so many searches the latent space: 500 of 5,500 in the code of Jeon et al."""


@dataclass(kw_only=True)
class _GeneratorSearch(SearchState):
    """The generators and codes that draw the candidate, and the best so far by own loss."""

    matching: Matching
    spec: ModelSpec
    labels: Tensor
    generators: list[Generator]  # one for all images, or one for each
    codes: Tensor  # (N, latent)
    optimizer: Adam
    best_codes: Tensor
    """(N, latent): codes that drew the best images, which are zeros before the first step."""

    def draw(self) -> Tensor:
        """Draws normalized images (N, C, H, W), differentiable in the codes and weights."""
        shares = self.codes.chunk(len(self.generators))
        drawn = [draw(codes) for draw, codes in zip(self.generators, shares, strict=True)]
        return normalize(torch.cat(drawn), self.spec)


@final
class GenerativePrior(IterativeAttack[_GeneratorSearch]):
    """Matches the update's direction by images that a generator draws, trained or untrained.

    If it is trained, by `weights` or `training_iterations` (GIAS), codes are searched first, from
    N(0, 1). Then a copy of the generator for each image is trained further, at the codes of least
    own loss. If it is untrained (GION), its random weights are trained at random codes, by the
    signs of their gradients.
    """

    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "untrained: Zhang et al., Generative Gradient Inversion, ICCV 2023 (GION); trained: "
        "Jeon et al., Gradient Inversion with Generative Image Prior, NeurIPS 2021 (GIAS)"
    )
    needs: ClassVar[Grant] = Grant.least(labels="inferred")

    weights: str | None = None
    """Safetensors file of a generator that `benchmarks/train_generator.py` has trained on public
    data; default: untrained. `~` is the home directory."""
    public: str | None = None
    """Name of the public data that `weights` was trained on, as its file states it; None without
    it."""
    training_iterations: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Steps that train a generator, before each attack, on the public images that the threat model
    grants (`knowledge.public`), in place of `weights`. Default: none."""
    iterations: Annotated[int, Field(ge=1)] = 5500
    """Steps of Adam in both stages; each divides its step size by 10 at 3/8, 5/8 and 7/8."""
    latent_iterations: Annotated[int, Field(ge=0)] | None = None
    """Number of `iterations` that search codes, before the others train weights; default: one in
    eleven of a trained generator, none of an untrained one."""
    latent_rate: Annotated[float, Field(gt=0)] = 0.03
    """Step size of codes."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.001
    """Step size of the generator's weights."""
    total_variation: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the total variation, the mean absolute difference of neighbouring pixels. Jeon et
    al. have 0.000001 and Zhang et al. 0 in their code, which drew worse photos here."""
    tensors: ComparedTensors = "all"
    """Tensors of the update that are matched: all, or all but the classifier's head (body)."""

    @model_validator(mode="after")
    def _parameters_fit(self) -> GenerativePrior:
        if (self.weights is None) != (self.public is None):
            raise ValueError("give both weights and public, or neither")
        if self.weights is not None and self.training_iterations is not None:
            raise ValueError("weights are trained already: drop them, or training_iterations")
        if self._searching_codes() > self.iterations:
            codes, both = self.latent_iterations, self.iterations
            raise ValueError(f"latent_iterations ({codes}) exceed the iterations ({both})")
        return self

    @property
    def _trained(self) -> bool:
        return self.weights is not None or self.training_iterations is not None

    def required(self) -> Grant:
        """Returns inferred labels, and public images if a generator is trained on them."""
        public = "none" if self.training_iterations is None else "test"
        return Grant.least(labels="inferred", public=public)

    def brings(self) -> tuple[str, ...]:
        """Returns `public=NAME` of a generator's file, else nothing. See `Attack.brings`."""
        return () if self.public is None else (f"public={self.public}",)

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _GeneratorSearch:
        """Draws random codes; reads the generator from its file, or draws its weights.

        Raises:
            FedsimError: `weights` cannot be read, draws images of another shape, or was trained on
                other data than `public` says.
            AttackFailed: labels are not told, or public images have not the victim's shape.
        """
        matching = Matching(observation, calls=self.iterations, tensors=self.tensors)
        labels = granted_labels(observation, knowledge)
        assert labels is not None
        count, spec = observation.num_images, observation.model
        if self.weights is not None and self.public is not None:
            path = from_home(self.weights)
            generator = _read_generator(path, spec.input_shape, self.public)
        else:
            seed = int(torch.randint(2**31, (), generator=rng))
            generator = self._make_generator(count, spec.input_shape, knowledge, seed)
        # At first only codes are searched, and no gradient of weights is wanted.
        generator = generator.to(matching.device).requires_grad_(False)
        codes = torch.randn(count, generator.latent, generator=rng).to(matching.device)
        codes.requires_grad_()
        return _GeneratorSearch(
            matching=matching,
            spec=spec,
            labels=labels,
            generators=[generator],
            codes=codes,
            optimizer=Adam([codes]),
            best=torch.zeros(count, *spec.input_shape, device=matching.device),
            best_codes=codes.detach().clone(),
        )

    def step(self, state: _GeneratorSearch) -> _GeneratorSearch:
        """Takes a step of Adam: of the codes at first, of the weights later. See `Attack.step`."""
        if state.iteration == self._searching_codes():
            self._start_weights(state)
        with torch.enable_grad():
            drawn = state.draw()
        images = drawn.detach()
        candidate = Candidate(images, state.labels)
        state.loss, (slope,) = regularized(
            state.matching, candidate, cosine_distance, self.total_variation
        )
        better = state.keep_best(images)
        state.best_codes = torch.where(better, state.codes.detach(), state.best_codes)
        slopes = torch.autograd.grad(drawn, state.optimizer.variables, slope)
        searching, rate = self._searching_codes(), self.latent_rate
        done, iterations = state.iteration, searching
        if not state.codes.requires_grad:
            done, iterations = done - searching, self.iterations - searching
            rate = self.learning_rate
            if not self._trained:  # signs, as in the code of Zhang et al. (GION)
                slopes = tuple(each.sign() for each in slopes)
        state.optimizer.step(slopes, decayed_step(rate, done, iterations))
        state.iteration += 1
        return state

    def postprocess(self, state: _GeneratorSearch) -> Reconstruction:
        """Returns the images of the iteration with the least loss, and their labels (N,)."""
        return Reconstruction(
            images=state.matching.pixels(state.best),
            labels=state.labels,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )

    def _searching_codes(self) -> int:
        if self.latent_iterations is not None:
            return self.latent_iterations
        return self.iterations // _LATENT_SHARE if self._trained else 0

    def _make_generator(
        self, count: int, shape: tuple[int, ...], knowledge: Knowledge, seed: int
    ) -> Generator:
        """Trains a generator on public images, or draws the weights of an untrained one."""
        if self.training_iterations is None:
            with streams.global_stream(seed):
                return _over_parameterized(count, shape)
        assert knowledge.public_images is not None
        images = knowledge.public_images
        if images.shape[1:] != shape:
            raise AttackFailed(
                f"public images are of {_times(tuple(images.shape[1:]))}, the victim's of "
                f"{_times(shape)}: grant public images of the victim's shape"
            )
        return fit_generator(
            images.float() / 255,
            width=_TRAINED_WIDTH,
            iterations=self.training_iterations,
            seed=seed,
        )

    def _start_weights(self, state: _GeneratorSearch) -> None:
        (generator,) = state.generators
        # Jeon et al. train a generator for each image, Zhang et al. one for the whole batch.
        copies = len(state.codes) if self._trained else 1
        state.codes = state.best_codes
        state.generators = [deepcopy(generator).requires_grad_() for _ in range(copies)]
        weights = [weight for each in state.generators for weight in each.parameters()]
        state.optimizer = Adam(weights)
