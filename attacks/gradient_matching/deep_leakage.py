"""Deep Leakage from Gradients.

Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019, Algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation
from fedsim_attacks.gradient_matching._gradient_distance import GradientDistance
from fedsim_attacks.gradient_matching._matching import granted_labels


@final
class DeepLeakage(GradientDistance):
    """Matches the update in squared distance by L-BFGS, over images and soft labels together.

    Only labels that the threat model declares known are taken as given: the method infers them
    itself.
    """

    paper: ClassVar[str] = "Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, Algorithm 1"

    def labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        """Returns true labels if they are known."""
        return granted_labels(observation, knowledge) if knowledge.grant.labels == "known" else None
