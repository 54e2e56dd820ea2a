"""Deep Leakage from Gradients (DLG).

Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019, algorithm 1 and equation (4).
"""

from __future__ import annotations

from typing import ClassVar, final

import torch

from fedsim.types import Knowledge, Observation
from fedsim_attacks.gradient_distance import GradientDistance
from fedsim_attacks.matching import Candidate, Matching


@final
class DeepLeakage(GradientDistance):
    """Matches the update in squared distance, over images and soft labels together, by L-BFGS.

    Where the threat model grants labels (known or inferred) only the images are optimized.
    """

    paper: ClassVar[str] = "Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, equation (4)"

    def start(
        self,
        matching: Matching,
        observation: Observation,
        knowledge: Knowledge,
        rng: torch.Generator,
    ) -> Candidate:
        """Images and label logits from N(0, 1)."""
        return matching.random_candidate(knowledge, rng)
