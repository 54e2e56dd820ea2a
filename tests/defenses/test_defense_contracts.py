"""Every bundled defense keeps to its kind's contract."""

from __future__ import annotations

from fedsim.contracts.defense import Defense
from fedsim.contracts.guarantee import Release
from fedsim.contracts.plugins import names
from fedsim.testing import (
    AggregationDefenseContract,
    DataDefenseContract,
    StatisticDefenseContract,
    TrainingDefenseContract,
    UpdateDefenseContract,
)
from fedsim_defenses.aggregate import Aggregate
from fedsim_defenses.clip import Clip
from fedsim_defenses.correlated_noise import CorrelatedNoise
from fedsim_defenses.dp_ftrl import DPFTRL
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.dropout import Dropout
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.gaussian_sampling import GaussianSampling
from fedsim_defenses.gradient_pruning import GradientPruning
from fedsim_defenses.least_squares import LeastSquaresMechanism
from fedsim_defenses.local_aggregation import LocalAggregation
from fedsim_defenses.quantization import Quantization
from fedsim_defenses.random_projection import RandomProjection
from fedsim_defenses.secure_aggregation import SecureAggregation
from fedsim_defenses.top_k import TopK
from fedsim_defenses.truncated_laplace import TruncatedLaplace


class TestClip(UpdateDefenseContract):
    def make(self) -> Clip:
        return Clip(norm=0.7)


class TestGaussianNoise(UpdateDefenseContract):
    def make(self) -> GaussianNoise:
        return GaussianNoise(std=0.3)


class TestGaussianNoiseByMultiplier(UpdateDefenseContract):
    def make(self) -> GaussianNoise:
        return GaussianNoise(multiplier=1.1)


class TestGaussianMechanism(UpdateDefenseContract):
    def make(self) -> GaussianNoise:
        return GaussianNoise(epsilon=2.0, delta=1e-5)


class TestGradientPruning(UpdateDefenseContract):
    def make(self) -> GradientPruning:
        return GradientPruning(ratio=0.7)


class TestGradientPruningByTensor(UpdateDefenseContract):
    def make(self) -> GradientPruning:
        return GradientPruning(ratio=0.5, scope="tensor")


class TestTopK(UpdateDefenseContract):
    def make(self) -> TopK:
        return TopK(ratio=0.2)


class TestQuantization(UpdateDefenseContract):
    def make(self) -> Quantization:
        return Quantization(bits=3)


class TestQuantizationDeterministic(UpdateDefenseContract):
    def make(self) -> Quantization:
        return Quantization(bits=8, rounding="deterministic")


class TestCorrelatedNoise(TrainingDefenseContract):
    def make(self) -> CorrelatedNoise:
        return CorrelatedNoise(norm=0.8, noise_multiplier=1.1, correlation=0.6)


class TestDPSGD(TrainingDefenseContract):
    def make(self) -> DPSGD:
        return DPSGD(norm=0.5, noise_multiplier=1.3)


class TestDropout(TrainingDefenseContract):
    def make(self) -> Dropout:
        return Dropout(rate=0.5)


class TestLocalAggregation(TrainingDefenseContract):
    def make(self) -> LocalAggregation:
        return LocalAggregation(steps=4, batches="same")


class TestAggregate(AggregationDefenseContract):
    def make(self) -> Aggregate:
        return Aggregate()


class TestDPFTRL(AggregationDefenseContract):
    def make(self) -> DPFTRL:
        return DPFTRL(noise_multiplier=1.1, correlation=0.5)


class TestRandomProjection(DataDefenseContract):
    def make(self) -> RandomProjection:
        return RandomProjection(epsilon=1.0, delta=1e-3)

    def release(self) -> Release:
        return Release(kind="sketch", row_norm=1.5, columns=40, features=4)


class TestLeastSquares(DataDefenseContract):
    def make(self) -> LeastSquaresMechanism:
        return LeastSquaresMechanism(epsilon=1.0, delta=1e-3)

    def release(self) -> Release:
        return Release(kind="sketched_coefficients", row_norm=1.5, columns=30, features=2)


class TestGaussianSampling(StatisticDefenseContract):
    def make(self) -> GaussianSampling:
        return GaussianSampling(beta=0.01, lift=0.1, epsilon=1.0, delta=1e-3)


class TestGaussianSamplingAsAssumed(StatisticDefenseContract):
    def make(self) -> GaussianSampling:
        return GaussianSampling(beta=1e-4, least_eigenvalue=0.01, samples=20)


class TestTruncatedLaplace(StatisticDefenseContract):
    def make(self) -> TruncatedLaplace:
        return TruncatedLaplace(beta=0.1, epsilon=1.0, delta=1e-3)


class TestTruncatedLaplaceOfThePaper(StatisticDefenseContract):
    def make(self) -> TruncatedLaplace:
        return TruncatedLaplace(beta=0.1, epsilon=1.0, delta=1e-3, calibration="paper")


class TestSecureAggregation(AggregationDefenseContract):
    def make(self) -> SecureAggregation:
        return SecureAggregation(range=1e3, buffer_range=1e3)


class TestSecureAggregationWithNoise(AggregationDefenseContract):
    def make(self) -> SecureAggregation:
        return SecureAggregation(
            range=1e3, buffer_range=1e3, noise_multiplier=2.0, threshold=0.8, colluding=0.2
        )


def test_no_bundled_defense_is_left_out() -> None:
    tested = {type(suite().make()) for suite in _suites()}
    assert {cls.__module__ for cls in tested} == {
        f"fedsim_defenses.{name}" for name in names("fedsim.defenses")
    }
    assert all(issubclass(cls, Defense) for cls in tested)


def _suites() -> list[type]:
    return [value for name, value in globals().items() if name.startswith("Test")]
