"""What a federation's server is told of its clients' data: how much each holds, and no example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.types import Unit


@dataclass(frozen=True, kw_only=True)
class Census:
    """The counts that ledger, learner and refusals need."""

    held: Sequence[int]
    """How many training examples each client holds, by its number."""
    private_statistics: Mapping[Unit, tuple[str, ...]]
    """What clients compute with that one unit's data had a say in, without noise."""

    @property
    def examples(self) -> int:
        """How many training examples all clients hold together."""
        return sum(self.held)
