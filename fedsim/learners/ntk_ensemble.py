"""Implements the NTK learner: each client's regression, once, and the server's ensemble of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedsim import rng
from fedsim.contracts.guarantee import Release
from fedsim.contracts.learner import (
    Computation,
    Computed,
    Evaluation,
    Learner,
    Problem,
    Request,
    model_spec,
)
from fedsim.learners import ntk
from fedsim.learners.closed_form import OneRelease, all_members, counted_once
from fedsim.models.base import build, normalize, read_weights
from fedsim.system.device import compute_exactly
from fedsim.system.paths import from_home
from fedsim.types import (
    Dataset,
    FedsimError,
    ReleaseKind,
    ReleaseSpec,
    RowTruth,
    Tensors,
    as_pixels,
)
from fedsim.words import number_of

MODEL = "form"
"""Name of the only tensor that crosses the wire in a release of Q."""

FEATURES, ALPHA = "features", "alpha"
"""Names of the tensors in a release of (X, α)."""

KERNEL = "kernel"
"""Name of the buffer S, which the server sends."""

_KINDS: dict[str, ReleaseKind] = {"form": "kernel_regression", "model": "kernel_model"}

_LARGEST = 10**8
"""Maximum number of entries of Q."""

_BATCH = 256


class _FeatureExtractor:
    """Computes rows of L2 norm 1: features of a frozen, public model, or pixels without one."""

    def __init__(self, problem: Problem) -> None:
        dataset = problem.dataset
        assert isinstance(dataset, Dataset)
        self._device = problem.device
        compute_exactly(self._device)
        self._spec = model_spec(problem) if problem.model else None
        if self._spec:
            self._model = build(self._spec, rng.derive(problem.seed, "model"))
            if problem.weights is not None:
                # They must not have been trained on the clients' data.
                parameters, buffers = read_weights(from_home(problem.weights), self._model)
                self._model.load_state_dict({**parameters, **buffers}, strict=False)
            self._model.to(self._device).eval()
        self.dimension = self.of(torch.zeros(1, *dataset.input_spec.input_shape)).shape[1]

    def of(self, pixels: Tensor) -> Tensor:
        """Computes (n, d) float64, on the CPU, of (n, C, H, W) `pixels` in [0, 1]."""
        if self._spec is None:
            rows = pixels.flatten(1)
        else:
            with torch.no_grad():
                rows = torch.cat(
                    [
                        self._model.features(normalize(part.to(self._device), self._spec)).cpu()
                        for part in torch.split(pixels, _BATCH)
                    ]
                )
        # normalize divides by 1e-12 at least, so a row of zeros stays one.
        return F.normalize(rows.double(), dim=1)


@final
class NTK(Learner):
    """Regresses the classes on features by the quadratic neural tangent kernel, once per client.

    A client computes α = (K + λ I)⁻¹ Y of the kernel matrix K of its features X (of norm 1: those
    of the scenario's `model`, which is frozen, or else pixels) and of one column Y per class. What
    it predicts, K(x, X) α, is a quadratic form x'Qx for each class, and it releases Q (c, d, d).
    The server takes the plain mean over the clients, which is the ensemble that averages their
    predictions, exactly. The test loss is the mean squared distance of the predictions from Y.
    With `release: model` a single client releases X and α themselves, as the paper's curator does.

    The defenses `gaussian_sampling` and `truncated_laplace` privatize K and X before α and Q are
    computed from them: together they are the paper's Algorithm 2.
    """

    paper: ClassVar[str] = (
        "Gu, Liang, Sha, Shi and Song, Differential Privacy Mechanisms in Neural Tangent Kernel "
        "Regression, sections 3.3 and 3.4, Algorithm 2"
    )
    data = Dataset
    reads_features = True

    kernel: Literal["discrete", "continuous"] = "discrete"
    """`discrete`: (x'z)(x'Sz) with S = W'W / m of random neurons W, the same for all clients.
    `continuous`: its limit σ² (x'z)²."""
    neurons: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """m, the number of neurons of the discrete kernel. Default: 256."""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """σ of the neurons' weights N(0, σ² I)."""
    ridge: Annotated[float, Field(gt=0, le=1e12)] = 10.0
    """λ, which is added to the diagonal of K. The eigenvalues of K are at most of the order of a
    client's number of rows."""
    release: Literal["form", "model"] = "form"
    """`form`: Q. `model`: (X, α), which have no mean over several clients, so that there is one."""

    @model_validator(mode="after")
    def _neurons_fit(self) -> NTK:
        if self.kernel == "continuous" and self.neurons is not None:
            raise ValueError("ntk takes neurons with the discrete kernel, and none with continuous")
        return self

    def payload(self) -> ReleaseKind:
        """Returns `kernel_regression` for `release: form`, `kernel_model` for `release: model`."""
        return _KINDS[self.release]

    def start(self, problem: Problem) -> Computation:
        """Binds the learner to one stack's federation.

        A FedsimError says that Q has more than 10^8 entries, that `model` is of several clients, or
        that the model or its weights do not fit.
        """
        return _Ensemble(problem, self) if self.release == "form" else _Single(problem, self)


class _KernelRegression(OneRelease):
    def __init__(self, problem: Problem, learner: NTK) -> None:
        assert isinstance(problem.dataset, Dataset)
        self._dataset = problem.dataset
        self._stack = problem.stack
        self._learner = learner
        self._features = _FeatureExtractor(problem)
        d, self._classes = self._features.dimension, len(problem.dataset.classes)
        self._names = problem.dataset.classes
        self._weights: Tensor | None = None
        gain = learner.scale**2
        if learner.kernel == "discrete":
            # A stream of the shared seed: the server and all clients have the same kernel.
            stream = rng.generator(problem.seed, "learner", "neurons")
            self._weights = ntk.draw_weights(learner.neurons or 256, d, learner.scale, stream)
            # The largest eigenvalue of S = W'W / m bounds K(x, x) = x'Sx of unit features.
            gain = float(torch.linalg.matrix_norm(self._weights, 2) ** 2 / len(self._weights))
        self._declared = problem.learner
        self.release = Release(
            kind=learner.payload(),
            row_norm=1.0,
            columns=0,
            features=d,
            statistics=("features", "kernel"),
            gain=gain,
        )

    def describe(self) -> ReleaseSpec:
        return ReleaseSpec(
            learner=self._declared.name,
            parameters=self._declared.parameters,
            kind=self.release.kind,
            columns=0,
            sigma=0.0,
            row_norm=self.release.row_norm,
            names=(*(f"feature {i}" for i in range(self.release.features)), *self._names),
            intercept=False,
            classes=self._names,
            statistics={
                defense.statistic: defense.public_parameters(self.release)
                for defense in self._stack.statistic_defenses
            },
            counted=True,
        )

    def candidates(self, inputs: Tensor, labels: Tensor) -> RowTruth:
        d = self.release.features
        rows = torch.cat([self._features.of(inputs), ntk.one_hot(labels, self._classes)], 1)
        return all_members(rows, torch.arange(d + self._classes) < d, self._classes)

    def buffers(self) -> dict[str, Tensor]:
        """Returns S (d, d) of the kernel, which everybody knows."""
        if self._weights is None:
            identity = torch.eye(self.release.features, dtype=torch.float64)
            return {KERNEL: self._learner.scale**2 * identity}
        return {KERNEL: self._weights.T @ self._weights / len(self._weights)}

    def check(self, clients: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        feature_defenses = self._stack.assumed_of("features")
        kernel_defenses = self._stack.assumed_of("kernel")
        if not feature_defenses and not kernel_defenses:
            return
        for client, (pixels, _) in clients.items():
            features = self._features.of(pixels)
            for defense in feature_defenses:
                defense.check(client, features)
            for defense in kernel_defenses:
                defense.check(client, self._gram(features))

    def _gram(self, features: Tensor) -> Tensor:
        return ntk.kernel(features, features, self._weights, scale=self._learner.scale)

    def fit(self, request: Request, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Computes a client's (X̃ (n, d), α̃ (n, c)) from statistics made private by the stack."""
        pixels, classes = request.batches[0]
        features = self._features.of(pixels)
        gram = self._gram(features)
        alpha = ntk.fit(
            self._stack.private("kernel", gram, self.release, rng),
            ntk.one_hot(classes, self._classes),
            self._learner.ridge,
        )
        return self._stack.private("features", features, self.release, rng), alpha

    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        rows = self._features.of(as_pixels(self._dataset.test_images))
        values = self.predict(rows, parameters)
        labels = self._dataset.test_labels
        wrong = (values - ntk.one_hot(labels, self._classes)).square().sum(1)
        right = (values.argmax(1) == labels).double()
        return Evaluation(loss=float(wrong.mean()), accuracy=float(right.mean()))

    @abstractmethod
    def predict(self, rows: Tensor, parameters: Tensors) -> Tensor:
        """Computes (a, c) values of the classes for `rows` (a, d) of features."""


@final
class _Ensemble(_KernelRegression):
    """Clients release Q, of which the server takes the mean."""

    def __init__(self, problem: Problem, learner: NTK) -> None:
        super().__init__(problem, learner)
        d = self.release.features
        if self._classes * d * d > _LARGEST:
            raise FedsimError(
                f"a predictor of {number_of(self._classes, 'class', 'classes')} and "
                f"{number_of(d, 'feature')} has "
                f"{number_of(self._classes * d * d, 'entry', 'entries')}; use a `model` with fewer "
                "features, or smaller images"
            )

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        d = self.release.features
        return {MODEL: torch.zeros(self._classes, d, d, dtype=torch.float64)}, self.buffers()

    def compute(self, request: Request, rng: torch.Generator) -> Computed:
        rows, alpha = self.fit(request, rng)
        form = ntk.quadratic_form(rows, alpha, self._weights, scale=self._learner.scale)
        return counted_once({MODEL: form})

    def predict(self, rows: Tensor, parameters: Tensors) -> Tensor:
        return ntk.evaluate_form(rows, parameters[MODEL])


@final
class _Single(_KernelRegression):
    """One client releases (X, α), padded with rows of zeros, which predict nothing."""

    def __init__(self, problem: Problem, learner: NTK) -> None:
        super().__init__(problem, learner)
        clients = problem.clients
        if clients > 1:
            raise FedsimError(
                f"release: model is that of one client, and data.clients is {clients}: models have "
                "no mean; use `release: form`, whose mean averages their predictions, or 1 client"
            )
        self._num_examples = problem.examples

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        d, num_examples = self.release.features, self._num_examples
        zeros = {
            FEATURES: torch.zeros(num_examples, d, dtype=torch.float64),
            ALPHA: torch.zeros(num_examples, self._classes, dtype=torch.float64),
        }
        return zeros, self.buffers()

    def compute(self, request: Request, rng: torch.Generator) -> Computed:
        rows, alpha = self.fit(request, rng)
        # F.pad takes the last axis first. A probe's release of fewer rows keeps the shape.
        padding = (0, 0, 0, self._num_examples - len(rows))
        return counted_once({FEATURES: F.pad(rows, padding), ALPHA: F.pad(alpha, padding)})

    def predict(self, rows: Tensor, parameters: Tensors) -> Tensor:
        train, scale = parameters[FEATURES], self._learner.scale
        return ntk.kernel(rows, train, self._weights, scale=scale) @ parameters[ALPHA]
