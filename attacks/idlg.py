"""Improved Deep Leakage from Gradients (iDLG).

Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", arXiv 2001.02610, section 3.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch

from fedsim.attack import Needs
from fedsim.types import Knowledge, Observation
from fedsim_attacks.gradient_distance import GradientDistance
from fedsim_attacks.label_inference import infer_labels
from fedsim_attacks.matching import Candidate, Matching


@final
class IDLG(GradientDistance):
    """Reads the labels off the last layer's gradient, then matches the update over images alone.

    It infers labels also where they are known: that is its method. For batches it infers them as
    `label_inference` does.
    """

    needs: ClassVar[Needs] = Needs(labels="inferred")
    paper: ClassVar[str] = "Zhao et al., iDLG, arXiv 2001.02610, 2020, section 3"

    def start(
        self,
        matching: Matching,
        observation: Observation,
        knowledge: Knowledge,
        rng: torch.Generator,
    ) -> Candidate:
        """Images from N(0, 1); inferred labels."""
        images = torch.randn(
            observation.num_images, *observation.model.input_shape, generator=rng
        ).to(matching.device)
        return matching.candidate(images, infer_labels(observation), None)
