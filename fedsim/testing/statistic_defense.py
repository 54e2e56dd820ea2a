"""The contract suite of a defense that privatizes a statistic of a closed-form learner.

class TestMyMechanism(StatisticDefenseContract):
    def make(self) -> MyMechanism:
        return MyMechanism(epsilon=1.0, delta=1e-5)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.contracts.defense import StatisticDefense
from fedsim.contracts.guarantee import Release
from fedsim.contracts.stack import chain
from fedsim.privacy.composition.curves import of_mechanisms
from fedsim.testing.plugin import PluginContract
from fedsim.testing.updates import stream
from fedsim.types import FedsimError, LocalTraining

DELTA = 1e-2
RELEASE = Release(
    kind="kernel_regression",
    row_norm=1.0,
    columns=0,
    features=6,
    statistics=("features", "kernel"),
    gain=1.5,
)
_DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=1, lr=1.0)


class StatisticDefenseContract(PluginContract[StatisticDefense]):
    """Tests what every `StatisticDefense` keeps to."""

    def test_shape_type_and_kind_are_kept(self) -> None:
        """A kernel matrix stays symmetric and positive semidefinite; every entry stays finite."""
        value = self._value()
        statistic = self.make().apply(value, RELEASE, stream())
        assert statistic.shape == value.shape
        assert statistic.dtype == value.dtype
        assert bool(statistic.isfinite().all())
        if self.make().statistic == "kernel":
            torch.testing.assert_close(statistic, statistic.T)
            smallest = float(torch.linalg.eigvalsh((statistic + statistic.T) / 2)[0])
            assert smallest > -1e-9 * (1 + float(statistic.abs().max()))

    def test_arguments_are_not_changed(self) -> None:
        """The client computes with the arguments again."""
        value = self._value()
        before = value.clone()
        self.make().apply(value, RELEASE, stream())
        assert torch.equal(value, before)

    def test_same_stream_same_result(self) -> None:
        """The stream that is handed in is the only source of randomness, and it is used."""
        value = self._value()
        first = self.make().apply(value, RELEASE, stream())
        torch.manual_seed(12345)
        assert torch.equal(first, self.make().apply(value, RELEASE, stream()))
        assert not torch.equal(first, self.make().apply(value, RELEASE, stream(2)))

    def test_the_curve_is_one_of_privacy(self) -> None:
        """Its values are probabilities that fall with ε, and ε is their inverse."""
        mechanism = self.make().guarantee(RELEASE)
        epsilons = np.linspace(0.0, 4.0, 33)
        deltas = np.exp(mechanism.log_delta(epsilons))
        assert ((deltas >= 0) & (deltas <= 1)).all()
        assert (np.diff(deltas) <= 1e-12).all()
        epsilon = of_mechanisms((mechanism,), DELTA)
        assert float(np.exp(mechanism.log_delta(np.array([epsilon])))[0]) <= DELTA * (1 + 1e-9)

    def test_more_is_never_more_private(self) -> None:
        """Neither more releases nor more certainty give a smaller ε."""
        one = (self.make().guarantee(RELEASE),)
        once = of_mechanisms(one, DELTA)
        assert 0 <= once <= of_mechanisms(one * 2, DELTA)
        assert of_mechanisms(one, 10 * DELTA) <= once <= of_mechanisms(one, DELTA / 2)

    def test_it_stands_only_where_there_is_such_a_statistic(self) -> None:
        """It is refused for updates, beside one of its kind, and without the statistic."""
        stack = chain(self.make())
        stack.guarantees(_DECLARED, RELEASE)
        for release in (None, replace(RELEASE, statistics=())):
            with pytest.raises(FedsimError, match="learner"):
                stack.guarantees(_DECLARED, release)
        with pytest.raises(FedsimError, match="alone of its kind"):
            chain(self.make(), self.make())

    def _value(self) -> Tensor:
        rows = torch.randn(9, RELEASE.features, generator=stream(), dtype=torch.float64)
        rows /= rows.norm(dim=1, keepdim=True)
        return (rows @ rows.T) ** 2 if self.make().statistic == "kernel" else rows
