"""Every bundled attack keeps to the contract, and the contract catches attacks that do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedsim.attacking.knowledge import hand_over_row
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.plugins import load, names
from fedsim.testing import AttackContract, RowAttackContract, make_kernel_release
from fedsim.testing.cases import example_batch
from fedsim.types import Observation
from fedsim_attacks.classifier_features.classifier_fit import ClassifierFit
from fedsim_attacks.closed_form.membership_inference import MembershipInference
from fedsim_attacks.closed_form.row_reconstruction import RowReconstruction
from fedsim_attacks.gradient_matching.deep_leakage import DeepLeakage
from fedsim_attacks.gradient_matching.generative_prior import (
    GenerativePrior,
    over_parameterized,
    pack_generator,
)
from fedsim_attacks.gradient_matching.grad_inversion import GradInversion
from fedsim_attacks.gradient_matching.idlg import IDLG
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients
from fedsim_attacks.gradient_matching.prior_only import PriorOnly
from fedsim_attacks.head_features.activation_features import ActivationFeatures
from fedsim_attacks.head_features.best_features import BestFeatures
from fedsim_attacks.head_features.head_fit import HeadFit
from fedsim_attacks.head_features.spectral_features import SpectralFeatures
from fedsim_attacks.head_features.tensor_features import TensorFeatures
from fedsim_attacks.head_features.unrolled_features import UnrolledFeatures
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion
from fedsim_attacks.images_from_features.feature_inversion import FeatureInversion
from fedsim_attacks.images_from_features.feature_regression import FeatureRegression
from fedsim_attacks.imprint.imprint import ImprintAttack
from fedsim_attacks.kan.spline_inversion import SplineInversion
from fedsim_attacks.labels.label_inference import LabelInference
from fedsim_attacks.layer_inputs.cocktail_party import CocktailParty
from fedsim_attacks.layer_inputs.extreme_rays import ExtremeRays
from fedsim_attacks.layer_inputs.spear import Spear
from fedsim_attacks.patch_embedding.patch_inversion import PatchInversion


class TestDeepLeakage(AttackContract):
    def make(self) -> DeepLeakage:
        return DeepLeakage(iterations=7)


class TestIDLG(AttackContract):
    def make(self) -> IDLG:
        return IDLG(iterations=7)


class TestInvertingGradients(AttackContract):
    def make(self) -> InvertingGradients:
        return InvertingGradients(iterations=7)


class TestInvertingGradientsOnConvolutions(AttackContract):
    model = "convnet"

    def make(self) -> InvertingGradients:
        return InvertingGradients(iterations=3)


class OfATwoLayerHead(AttackContract):
    model = "mlp"
    model_parameters: ClassVar[dict[str, Any]] = {
        "hidden": [12],
        "head": {"width": 640, "planted": 512},
    }


class TestSpectralFeatures(OfATwoLayerHead):
    def make(self) -> SpectralFeatures:
        return SpectralFeatures()


class TestSplineInversion(AttackContract):
    model = "kan"

    def make(self) -> SplineInversion:
        return SplineInversion(iterations=3)


class TestActivationFeatures(OfATwoLayerHead):
    def make(self) -> ActivationFeatures:
        return ActivationFeatures()


class TestTensorFeatures(OfATwoLayerHead):
    def make(self) -> TensorFeatures:
        return TensorFeatures()


class TestHeadFit(OfATwoLayerHead):
    def make(self) -> HeadFit:
        return HeadFit(iterations=100, starts=2)


class TestBestFeatures(OfATwoLayerHead):
    def make(self) -> BestFeatures:
        return BestFeatures(iterations=100, starts=2, trials=1)


class TestClassifierFit(AttackContract):
    def make(self) -> ClassifierFit:
        return ClassifierFit(iterations=20, starts=2, exchanges=2)


class OfAFullyConnectedNetwork(AttackContract):
    model = "mlp"
    model_parameters: ClassVar[dict[str, Any]] = {"hidden": [48, 24]}


class TestExtremeRays(OfAFullyConnectedNetwork):
    def make(self) -> ExtremeRays:
        return ExtremeRays()


class TestSpear(OfAFullyConnectedNetwork):
    def make(self) -> Spear:
        return Spear(iterations=2)


class TestSpearByDescent(OfAFullyConnectedNetwork):
    def make(self) -> Spear:
        return Spear(iterations=2, search="descent")


class TestCocktailParty(OfAFullyConnectedNetwork):
    def make(self) -> CocktailParty:
        return CocktailParty(iterations=5)


class TestFactoredInversionOfAnOrdinaryClassifier(AttackContract):
    model = "convnet"

    def make(self) -> FactoredInversion:
        return FactoredInversion(iterations=3)


class TestFeatureRegression(OfATwoLayerHead):
    def make(self) -> FeatureRegression:
        return FeatureRegression()


class TestFeatureInversion(OfATwoLayerHead):
    def make(self) -> FeatureInversion:
        return FeatureInversion(iterations=3, width=8)


class TestFeatureInversionOfPixels(AttackContract):
    model = "convnet"
    model_parameters: ClassVar[dict[str, Any]] = {"width": 4, "norm": "batch"}

    def make(self) -> FeatureInversion:
        return FeatureInversion(iterations=3, prior="pixel", features_from="none")


class TestGradInversion(AttackContract):
    def make(self) -> GradInversion:
        return GradInversion(iterations=4, seeds=2)


class TestGradInversionWithBatchNorm(AttackContract):
    model = "convnet"
    model_parameters: ClassVar[dict[str, Any]] = {"width": 4, "norm": "batch"}

    def make(self) -> GradInversion:
        return GradInversion(iterations=3, seeds=2)


class TestImprint(AttackContract):
    model_parameters: ClassVar[dict[str, Any]] = {"imprint": {"bins": 64}}

    def make(self) -> ImprintAttack:
        return ImprintAttack()


class TestInvertingGradientsBehindAnImprint(AttackContract):
    model_parameters: ClassVar[dict[str, Any]] = {"imprint": {"bins": 16}}

    def make(self) -> InvertingGradients:
        return InvertingGradients(iterations=3)


class TestGenerativePrior(AttackContract):
    def make(self) -> GenerativePrior:
        return GenerativePrior(iterations=3)


class TestGenerativePriorOfAFile(AttackContract):
    file = Path("unwritten")

    @pytest.fixture(autouse=True)
    def _written(self, tmp_path: Path) -> None:
        self.file = tmp_path / "generator.safetensors"
        self.file.write_bytes(pack_generator(over_parameterized(1, (1, 16, 16)), "nothing"))

    def make(self) -> GenerativePrior:
        return GenerativePrior(
            weights=str(self.file), public="nothing", iterations=4, latent_iterations=2
        )


class TestPriorOnly(AttackContract):
    def make(self) -> PriorOnly:
        return PriorOnly(iterations=3, width=8)


class TestFactoredInversion(OfATwoLayerHead):
    def make(self) -> FactoredInversion:
        return FactoredInversion(iterations=5)


class TestUnrolledFeatures(OfATwoLayerHead):
    def make(self) -> UnrolledFeatures:
        return UnrolledFeatures(iterations=100, trials=1)


class TestLabelInference(AttackContract):
    def make(self) -> LabelInference:
        return LabelInference()


class TestPatchInversion(AttackContract):
    model = "vit"
    model_parameters: ClassVar[dict[str, Any]] = {"width": 32}
    batch_sizes = (1,)

    def make(self) -> PatchInversion:
        return PatchInversion()


class TestInvertingGradientsOnATransformer(AttackContract):
    model = "vit"
    model_parameters: ClassVar[dict[str, Any]] = {"width": 16}

    def make(self) -> InvertingGradients:
        return InvertingGradients(iterations=3)


class TestRowReconstruction(RowAttackContract):
    def make(self) -> RowReconstruction:
        return RowReconstruction(iterations=20, starts=2)


class TestRowReconstructionFromCoefficients(RowAttackContract):
    learner = "least_squares"
    learner_parameters: ClassVar[dict[str, Any]] = {"method": "als", "columns": 40}

    def make(self) -> RowReconstruction:
        return RowReconstruction(iterations=20, starts=2, prior="ranges")


class TestMembershipInference(RowAttackContract):
    def make(self) -> MembershipInference:
        return MembershipInference()


class TestMembershipInferenceFromCoefficients(RowAttackContract):
    learner = "least_squares"
    learner_parameters: ClassVar[dict[str, Any]] = {"method": "ls", "columns": 40}

    def make(self) -> MembershipInference:
        return MembershipInference()


class _OfKernels(RowAttackContract):
    """On the predictors of so many clients, of six images each."""

    parameters: ClassVar[Mapping[str, Any]] = {"kernel": "continuous"}

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        images, _ = example_batch(6 * size)
        observation, truth = make_kernel_release(
            (images * 255).round().to(torch.uint8),
            torch.arange(6 * size) % 5,
            torch.arange(6 * size) % 3 > 0,
            parameters=self.parameters,
            defense=[
                {"name": "truncated_laplace", "beta": 0.01, "epsilon": 1, "delta": 1e-3},
                *([{"name": "aggregate"}] if size > 1 else []),
            ],
            num_clients=size,
        )
        granted = Grant.most() if most else self.make().required()
        target = int(truth.members.nonzero()[0])
        return observation, hand_over_row(truth, target, granted, self.make().asked_of_candidates)


class TestRowReconstructionOfKernels(_OfKernels):
    def make(self) -> RowReconstruction:
        return RowReconstruction(samples=5)


class TestMembershipInferenceOfKernels(_OfKernels):
    def make(self) -> MembershipInference:
        return MembershipInference()


class TestMembershipInferenceOfAKernelModel(_OfKernels):
    parameters: ClassVar[Mapping[str, Any]] = {"release": "model"}

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        """Of one client, whatever the size."""
        return super().case(1, most)

    def make(self) -> MembershipInference:
        return MembershipInference()


def test_no_bundled_attack_is_left_out() -> None:
    suites = [value for name, value in globals().items() if name.startswith("Test")]
    tested = {type(suite().make()).__module__ for suite in suites}
    bundled = {load("fedsim.attacks", name).__module__ for name in names("fedsim.attacks")}
    assert {module for module in tested if module.startswith("fedsim_attacks.")} == bundled
