"""The control that never sees the gradient: it is to have the prior of what it controls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field

from fedsim.contracts.grant import Knowledge
from fedsim.models.base import denormalize
from fedsim.types import ModelSpec, Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack, SearchState
from fedsim_attacks.gradient_matching._drawing import Canvas, Drawing, DrawingSettings
from fedsim_attacks.gradient_matching._image_priors import VARIATIONS, expose


@dataclass(kw_only=True)
class _Drawn(SearchState):
    spec: ModelSpec
    drawing: Drawing


@final
class PriorOnly(IterativeAttack[_Drawn]):
    """Minimizes the total variation of images that it draws, and nothing else, as a control.

    With the defaults it is that of feature_inversion. That of factored_inversion has `prior:
    pixel`, `variation: chromatic`, `total_variation: 0.02` and, behind noise and group norm,
    `stretched`.
    """

    paper: ClassVar[str] = "fedsim: control (Ulyanov et al., Deep Image Prior, CVPR 2018)"
    ignores_update: ClassVar[bool] = True

    iterations: Annotated[int, Field(ge=1)] = 100
    """Steps of Adam; more only make the images flatter."""
    prior: Canvas = "unet"
    """Variables that are optimized: the weights of an untrained U-Net, or random pixels, alone or
    with coarser images that are added to them (`pyramid`)."""
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Channels of the U-Net at full resolution."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Step size, divided by 10 at 3/8, 5/8 and 7/8; default 0.001 for the U-Net, 0.1 for pixels."""
    total_variation: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the total variation; with 0 the answer is what is drawn at first."""
    variation: Literal["absolute", "chromatic", "opponents"] = "absolute"
    """`absolute`: variation of all channels alike. `chromatic`: three times the weight in color.
    `opponents`: of the channels and of their differences."""
    stretched: bool = False
    """Whether each image is finally multiplied by what makes it fill the valid pixels."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> _Drawn:
        """Draws random weights or pixels, by the images' shape alone. See `Attack.init`."""
        settings = DrawingSettings(
            canvas=self.prior, iterations=self.iterations, width=self.width, rate=self.learning_rate
        )
        seed = int(torch.randint(2**31, (), generator=rng))
        drawing = Drawing(settings, observation, rng, seed=seed)
        best = drawing.draw().detach().clone()
        return _Drawn(spec=observation.model, drawing=drawing, best=best)

    def step(self, state: _Drawn) -> _Drawn:
        """Takes a step of Adam down the weighted total variation. See `Attack.step`."""
        drawn = state.drawing.draw()
        images = drawn.detach()
        variation, slope = VARIATIONS[self.variation](images)
        state.loss = self.total_variation * variation
        state.keep_best(images)
        state.drawing.step(drawn, self.total_variation * slope)
        state.iteration += 1
        return state

    def postprocess(self, state: _Drawn) -> Reconstruction:
        """Returns the images of least total variation over all steps, `stretched` if asked for."""
        images = expose(state.best, state.drawing.box) if self.stretched else state.best
        return Reconstruction(
            images=denormalize(images, state.spec).clamp(0, 1).float().contiguous(),
            loss=float(state.best_loss),
            iterations=state.iteration,
        )
