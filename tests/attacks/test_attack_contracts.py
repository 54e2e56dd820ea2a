"""Every installed attack keeps to the contract: attacks are found by their entry points.

One that `CASES` does not name is tried on a small network of convolutions, with few iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedsim.attacking.knowledge import hand_over_row
from fedsim.contracts.attack import Attack
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.plugins import load_as, names
from fedsim.testing import AttackContract, RowAttackContract, make_kernel_release
from fedsim.testing.attack import (
    AnyAttackContract,
    CandidateAttackContract,
    SourceAttackContract,
)
from fedsim.testing.cases import example_batch
from fedsim.types import Observation
from fedsim_attacks.gradient_matching.generative_prior import (
    GenerativePrior,
    _over_parameterized,
    pack_generator,
)


def on(name: str, model: str, *, sizes: tuple[int, ...] = (1, 3), **parameters: Any) -> type:
    """The contract on a network of this `model`."""
    fields = {"model": model, "model_parameters": parameters, "batch_sizes": sizes}
    return type(name, (AttackContract,), fields)


OnATwoLayerHead = on("OnATwoLayerHead", "mlp", hidden=[12], head={"width": 640, "planted": 512})
OnAFullyConnectedNetwork = on("OnAFullyConnectedNetwork", "mlp", hidden=[48, 24])
OnConvolutions = on("OnConvolutions", "convnet")
OnBatchNorm = on("OnBatchNorm", "convnet", width=4, norm="batch")
OnAKAN = on("OnAKAN", "kan")
OnATransformer = on("OnATransformer", "vit", width=16)
OnATransformerAlone = on("OnATransformerAlone", "vit", width=32, sizes=(1,))


class BehindAnImprint(AttackContract):
    model_parameters: ClassVar[dict[str, Any]] = {"imprint": {"bins": 64}}


class OfCoefficients(RowAttackContract):
    learner = "least_squares"
    learner_parameters: ClassVar[dict[str, Any]] = {"method": "als", "columns": 40}


class OfKernels(RowAttackContract):
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


class OfAKernelModel(OfKernels):
    parameters: ClassVar[Mapping[str, Any]] = {"release": "model"}

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        """Of one client, whatever the size."""
        return super().case(1, most)


class BesideOtherClients(CandidateAttackContract):
    """Shows the attacked client beside two others, whose updates differ from its own."""

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        observation, known = super().case(size, most)
        assert known.candidates
        others = tuple(
            replace(
                observation,
                client=observation.client + 1 + k,
                update={
                    n: torch.roll(u.flatten(), k + 1).view_as(u)
                    for n, u in observation.update.items()
                },
            )
            for k in range(2)
        )
        seen = (observation, *others)
        return observation, replace(known, candidates=replace(known.candidates, seen=seen))


Case = tuple[type[AnyAttackContract], dict[str, Any]]

CASES: dict[str, list[Case]] = {
    "activation_features": [(OnATwoLayerHead, {})],
    "best_features": [(OnATwoLayerHead, {})],
    "classifier_fit": [(AttackContract, {"iterations": 20, "exchanges": 2})],
    "cocktail_party": [(OnAFullyConnectedNetwork, {})],
    "extreme_rays": [(OnAFullyConnectedNetwork, {})],
    "factored_inversion": [(OnATwoLayerHead, {}), (OnConvolutions, {})],
    "fedmia": [(BesideOtherClients, {}), (BesideOtherClients, {"measure": "loss"})],
    "feature_inversion": [
        (OnATwoLayerHead, {}),
        (OnBatchNorm, {"prior": "pixel", "features_from": "none"}),
    ],
    "feature_regression": [(OnATwoLayerHead, {})],
    "generative_prior": [(AttackContract, {}), (OnConvolutions, {"training_iterations": 2})],
    "grad_inversion": [(AttackContract, {}), (OnBatchNorm, {})],
    "gradient_similarity": [(CandidateAttackContract, {})],
    "head_fit": [(OnATwoLayerHead, {})],
    "idlg": [(AttackContract, {}), (OnConvolutions, {"label_weight": 0.1, "pattern": 2})],
    "imprint": [(BehindAnImprint, {})],
    "inverting_gradients": [
        (AttackContract, {}),
        (OnConvolutions, {"distance": "gaussian"}),
        (BehindAnImprint, {}),
        (OnATransformer, {}),
    ],
    "loss_trajectory": [(CandidateAttackContract, {"summary": "fall"})],
    "membership_inference": [
        (RowAttackContract, {}),
        (OfCoefficients, {}),
        (OfKernels, {}),
        (OfAKernelModel, {}),
    ],
    "patch_inversion": [(OnATransformerAlone, {})],
    "property_inference": [
        (AttackContract, {"shadows": 8}),
        (AttackContract, {"shadows": 8, "of": "clients"}),
    ],
    "row_reconstruction": [
        (RowAttackContract, {"iterations": 20}),
        (OfCoefficients, {"iterations": 20, "prior": "ranges"}),
        (OfKernels, {}),
    ],
    "shadow_likelihood": [
        (CandidateAttackContract, {"shadows": 4}),
        (CandidateAttackContract, {"shadows": 4, "measure": "log_odds"}),
    ],
    "source_inference": [
        (SourceAttackContract, {}),
        (SourceAttackContract, {"evidence": "losses"}),
    ],
    "spear": [(OnAFullyConnectedNetwork, {}), (OnAFullyConnectedNetwork, {"search": "descent"})],
    "spectral_features": [(OnATwoLayerHead, {})],
    "spline_inversion": [(OnAKAN, {})],
    "tensor_features": [(OnATwoLayerHead, {})],
    "update_membership": [(CandidateAttackContract, {})],
    "unrolled_features": [(OnATwoLayerHead, {})],
}
"""What an attack is tried on, with parameters beside `SMALL`; else on the contract's network."""

SMALL = {"iterations": 4, "starts": 2, "trials": 1, "samples": 5, "seeds": 2, "width": 8}
"""Makes an attack fast that has such parameters, as far as their ranges allow it."""


def _suite(name: str, case: Case, number: int) -> type[AnyAttackContract]:
    base, parameters = case
    cls = load_as("fedsim.attacks", name, (Attack,))
    least = {
        key: max([value, *(bound.ge for bound in field.metadata if hasattr(bound, "ge"))])
        for key, value in SMALL.items()
        if (field := cls.model_fields.get(key))
    }
    made = cls(**least | parameters)
    title = f"Test{cls.__name__}" + base.__name__ * bool(number)
    return type(title, (base,), {"make": lambda self: made})


SUITES = {
    suite.__name__: suite
    for name in names("fedsim.attacks")
    for number, case in enumerate(CASES.get(name, [(AttackContract, {})]))
    for suite in [_suite(name, case, number)]
}
globals().update(SUITES)  # where pytest looks for them


class TestGenerativePriorOfAFile(AttackContract):
    file = Path("unwritten")

    @pytest.fixture(autouse=True)
    def _written(self, tmp_path: Path) -> None:
        self.file = tmp_path / "generator.safetensors"
        self.file.write_bytes(pack_generator(_over_parameterized(1, (1, 16, 16)), "nothing"))

    def make(self) -> GenerativePrior:
        return GenerativePrior(
            weights=str(self.file), public="nothing", iterations=4, latent_iterations=2
        )
