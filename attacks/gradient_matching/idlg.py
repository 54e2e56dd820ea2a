"""Improved Deep Leakage from Gradients.

Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020, Algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from fedsim.contracts.grant import Grant, Knowledge
from fedsim.types import Observation
from fedsim_attacks.gradient_matching._matching import granted_labels
from fedsim_attacks.gradient_matching.deep_leakage import GradientDistance


@final
class IDLG(GradientDistance):
    """Reads the labels off the last layer first, then matches the update over images alone."""

    paper: ClassVar[str] = "Zhao et al., iDLG, 2020, Algorithm 1; batches as in label_inference"
    needs: ClassVar[Grant] = Grant.least(labels="inferred")

    def labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        """Returns the true labels (N,) if the threat model grants them, else inferred ones."""
        return granted_labels(observation, knowledge)
