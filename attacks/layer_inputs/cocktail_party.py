"""Inputs of a wide layer as the independent components of its gradient.

Kariyappa, Guo, Maeng, Xiong, Suh, Qureshi and Lee, Cocktail Party Attack: Breaking
Aggregation-Based Privacy in Federated Learning using Independent Component Analysis, ICML 2023.
The rows of a layer's gradient are linear combinations of its inputs. Whitened, these are at unit
vectors of the row space, and those whose entries are least Gaussian are taken for inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field

from fedsim.contracts.attack import AttackFailed, AttackState
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import denormalize
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.gradient_matching._drawing import Drawing, DrawingSettings
from fedsim_attacks.gradient_matching._image_priors import (
    ForwardPrior,
    KnownFeatures,
    total_variation,
)
from fedsim_attacks.layer_inputs._layers import Layer, RowSpace, trace_layers


class _Unmixing(AttackState):
    def __init__(
        self, observation: Observation, layer: Layer, step_size: float, rng: torch.Generator
    ) -> None:
        super().__init__(loss=torch.full((), torch.inf))
        self.observation, self.layer, self.rng = observation, layer, rng
        self.space = RowSpace.decompose(layer, observation.num_images)
        values = self.space.rows[:, : layer.weights.shape[1]]
        centered = values - values.mean(1, keepdim=True)
        lengths, directions = torch.linalg.eigh(centered @ centered.T / centered.shape[1])
        scaled = lengths.clamp_min(torch.finfo(lengths.dtype).tiny).rsqrt()
        # Whitened, independent inputs are at orthogonal unit vectors: only a turn is to be found.
        self.whitening = scaled[:, None] * directions.T
        """(r, r): matrix that makes `white` of the centered rows."""
        self.white = self.whitening @ centered
        """(r, n): the gradient's rows, centered, uncorrelated and of variance 1."""
        rank = self.space.rank
        start = torch.randn(rank, rank, generator=rng, dtype=torch.float64)
        self.matrix = start.to(values).requires_grad_()
        """(r, r): unmixing matrix, whose rows are brought to unit length before use."""
        self.optimizer = torch.optim.Adam([self.matrix], lr=step_size)
        self.inversion: tuple[Drawing, ForwardPrior] | None = None
        """Pixels, and the prior that holds them to features; None before these are unmixed."""


@final
class CocktailParty(IterativeAttack[_Unmixing]):
    """Unmixes the inputs of a fully connected layer by independent component analysis.

    The layer is the first one that takes the image, or else from whose inputs all features follow.
    Images are returned of the former or, by `image_iterations`, of the latter.
    """

    on_processor: ClassVar[bool] = True
    paper: ClassVar[str] = "Kariyappa et al., Cocktail Party Attack, ICML 2023"

    iterations: Annotated[int, Field(ge=1)] = 5000
    """Steps of Adam that unmix the inputs."""
    step_size: Annotated[float, Field(gt=0)] = 0.01
    """Step size of Adam."""
    slope: Annotated[float, Field(gt=0)] = 1.0
    """Factor a in log cosh(a x), which stands for the negentropy."""
    independence: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the penalty that keeps two components from being the same."""
    temperature: Annotated[float, Field(gt=0)] = 5.0
    """T in exp(T |cosine of two rows|), the penalty of `independence`."""
    image_iterations: Annotated[int, Field(ge=0)] = 0
    """Steps of Adam by which pixels then descend to the unmixed features, in 1 - cos² and
    variation. Each costs a pass through the body. With 0, features are the answer."""
    total_variation: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the mean absolute difference of neighbouring pixels, of images."""
    sign: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the mean negative entry of inputs behind ReLU."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _Unmixing:
        """Draws an unmixing matrix; AttackFailed without a suitable layer. See `Attack.init`."""
        layers = [layer for layer in trace_layers(observation) if layer.features is not None]
        layers = [layer for layer in layers if layer.bias is not None or layer.scale_free]
        if not layers:
            raise AttackFailed(
                "the model has no linear layer from whose inputs all features follow"
            )
        return _Unmixing(observation, layers[0], self.step_size, rng)

    def total(self) -> int:
        """Returns the number of steps that unmix inputs and then find images, for progress."""
        return self.iterations + self.image_iterations

    def terminate(self, state: _Unmixing) -> bool:
        """Returns whether unmixing and, if images are sought, their descent are done."""
        return state.iteration >= (self.iterations if state.layer.pixels else self.total())

    def step(self, state: _Unmixing) -> _Unmixing:
        """Takes a step of Adam, of the matrix first, then of pixels. See `Attack.step`."""
        if state.iteration >= self.iterations:
            return self._invert(state)
        rows = F.normalize(state.matrix, dim=1)
        components = rows @ state.white
        scaled = (self.slope * components).abs()
        # log cosh without overflow
        log_cosh = scaled + torch.log1p((-2 * scaled).exp()) - torch.log(scaled.new_tensor(2.0))
        # Hyvärinen's log cosh contrast stands for the negentropy.
        contrast = (log_cosh / self.slope).square().mean()
        cosines = (rows @ rows.T).abs() - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        pairs = max(1, len(rows) * (len(rows) - 1))
        together = ((self.temperature * cosines).exp().sum() - len(rows)) / pairs
        loss = -contrast + self.independence * together
        if state.layer.pixels:
            images = components.view(-1, *state.observation.model.input_shape)
            loss = loss + self.total_variation * (
                images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()
            )
        elif state.layer.nonnegative:
            values = rows @ state.whitening @ state.space.rows[:, : state.white.shape[1]]
            # A component's sign is open: inputs behind ReLU have a positive sum.
            values = values * values.sum(1, keepdim=True).sign()
            loss = loss + self.sign * (-values).clamp_min(0).mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.loss = loss.detach()
        state.iteration += 1
        return state

    def _invert(self, state: _Unmixing) -> _Unmixing:
        """Takes a step of the pixels towards the features; the loss stays that of the unmixing."""
        if state.inversion is None:
            features = self._unmix(state).features
            assert features is not None
            settings = DrawingSettings(canvas="pixel", iterations=self.image_iterations)
            drawing = Drawing(settings, state.observation, state.rng)
            # Directions alone, as independence leaves the scale of an input open.
            target = KnownFeatures(features, "squared_cosine")
            prior = ForwardPrior(state.observation, Knowledge(grant=Grant()), target)
            state.inversion = drawing, prior
        drawing, prior = state.inversion
        images = drawing.draw()
        slope = prior(images)[1] + self.total_variation * total_variation(images.detach())[1]
        drawing.step(images, slope)
        state.iteration += 1
        return state

    def postprocess(self, state: _Unmixing) -> Reconstruction:
        """Returns features (N, d), and images if the layer takes them or pixels were descended."""
        found = self._unmix(state)
        if state.inversion is None:
            return found
        pixels = denormalize(state.inversion[0].draw().detach(), state.observation.model)
        return replace(found, images=pixels.clamp(0, 1))

    def _unmix(self, state: _Unmixing) -> Reconstruction:
        layer, count = state.layer, state.observation.num_images
        with torch.no_grad():
            rows = F.normalize(state.matrix, dim=1)
            whole = rows @ state.whitening @ state.space.rows
            if layer.bias is not None:
                # The bias is the weight of an input that is 1: its entry tells the scale.
                scale = whole[:, -1:]
                tiny = torch.finfo(scale.dtype).tiny
                values = whole[:, :-1] / torch.where(scale.abs() > tiny, scale, tiny)
            else:
                # Without a bias the sign is open: inputs are taken to be positive on the whole.
                whole = whole * whole.sum(1, keepdim=True).sign()
                values = whole * (layer.length / whole.norm(dim=1, keepdim=True))
            # Where fewer components than images were found, their mean stands for the others.
            values = torch.cat(
                [values, values.mean(0, keepdim=True).expand(count - len(values), -1)]
            )
            images, spec = None, state.observation.model
            if layer.pixels:
                pixels = values.float().view(-1, *spec.input_shape)
                images = denormalize(pixels, spec).clamp(0, 1)
            assert layer.features is not None
            return Reconstruction(
                images=images,
                features=layer.features(values).float(),
                loss=float(state.loss),
                iterations=state.iteration,
            )
