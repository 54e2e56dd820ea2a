"""The contract suite of a defense that regularizes the rows of a closed-form learner.

class TestMyMechanism(DataDefenseContract):
    def make(self) -> MyMechanism:
        return MyMechanism(epsilon=1.0, delta=1e-5)

    def release(self) -> Release:
        return Release(kind="sketch", row_norm=2.0, columns=20, features=3)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import get_args

import pytest

from fedsim.contracts.defense import DataDefense
from fedsim.contracts.guarantee import ExactMechanism, Release
from fedsim.testing.plugin import PluginContract
from fedsim.types import FedsimError, ReleaseKind

DELTA = 1e-4


class DataDefenseContract(PluginContract[DataDefense]):
    """Tests what every `DataDefense` keeps to."""

    @abstractmethod
    def release(self) -> Release:
        """Returns a release that it protects."""

    def test_sigma_is_a_scale(self) -> None:
        """Rows twice as long need twice as much sigma for the same claim."""
        defense, release = self.make(), self.release()
        longer = replace(release, row_norm=2 * release.row_norm)
        sigma = defense.sigma(release)
        assert math.isfinite(sigma)
        assert sigma >= 0
        assert defense.sigma(longer) == pytest.approx(2 * sigma, rel=1e-9)
        short, long = self._mechanism(release), self._mechanism(longer)
        assert short.epsilon(DELTA, 1) == pytest.approx(long.epsilon(DELTA, 1), rel=1e-6)

    def test_same_arguments_same_result(self) -> None:
        """Nothing is drawn."""
        assert self.make().sigma(self.release()) == self.make().sigma(self.release())

    def test_more_is_never_more_private(self) -> None:
        """Neither more releases nor more certainty give a smaller ε."""
        mechanism = self._mechanism(self.release())
        once = mechanism.epsilon(DELTA, 1)
        assert 0 <= once < math.inf
        assert once <= mechanism.epsilon(DELTA, 2) <= mechanism.epsilon(DELTA, 3)
        assert mechanism.epsilon(10 * DELTA, 1) <= once <= mechanism.epsilon(DELTA / 10, 1)

    def test_what_cannot_be_protected_is_refused(self) -> None:
        """The same error is raised before any noise is drawn and where the claim is made."""
        defense = self.make()
        refused = 0
        for kind in get_args(ReleaseKind):
            release = replace(self.release(), kind=kind)
            try:
                defense.sigma(release)
            except FedsimError:
                refused += 1
                with pytest.raises(FedsimError):
                    defense.guarantee(release)
        assert refused < len(get_args(ReleaseKind))

    def _mechanism(self, release: Release) -> ExactMechanism:
        guarantee = self.make().guarantee(release)
        mechanism = guarantee.pooled or guarantee.mechanism
        assert isinstance(mechanism, ExactMechanism)
        return mechanism
