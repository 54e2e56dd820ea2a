"""The NTK learner: each client's regression, once, and the server's ensemble of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsim import rng
from fedsim.guarantee import Release
from fedsim.learners import ntk
from fedsim.learners.base import Computation, Computed, Evaluation, Learner, Problem, Request
from fedsim.learners.features import Features
from fedsim.learners.sgd import as_pixels
from fedsim.types import Dataset, FedsimError, LocalTraining, Tensors

MODEL = "form"
"""Name of the only tensor that crosses the wire."""

_LARGEST = 10**8
"""Entries of a model, beyond which it is refused."""


@final
class NTK(Learner):
    """Regresses the classes on features by the quadratic neural tangent kernel, once per client.

    A client computes α = (K + λ I)⁻¹ Y of the kernel matrix K of its features X (of norm 1: those
    of the scenario's `model`, which is frozen, or else pixels) and of one column Y per class. What
    it predicts, K(x, X) α, is a quadratic form x'Qx for each class, and it releases Q (c, d, d).
    The server takes the plain mean over the clients, which is the ensemble that averages their
    predictions, exactly. The test loss is the mean squared distance of the predictions from Y.

    The defenses `gaussian_sampling` and `truncated_laplace` privatize K and X before α and Q are
    computed from them: together they are the paper's Algorithm 2.
    """

    paper: ClassVar[str] = (
        "Gu, Liang, Sha, Shi and Song, Differential Privacy Mechanisms in Neural Tangent Kernel "
        "Regression, sections 3.3 and 3.4, Algorithm 2"
    )
    data = Dataset
    trains = False
    reads_features = True

    kernel: Literal["discrete", "continuous"] = "discrete"
    """`discrete`: (x'z)(x'Sz) with S = W'W / m of random neurons W, the same for all clients.
    `continuous`: its limit σ² (x'z)²."""
    neurons: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """m, of the discrete kernel. Default: 256."""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """σ of the neurons' weights N(0, σ² I)."""
    ridge: Annotated[float, Field(gt=0, le=1e12)] = 10.0
    """λ. Eigenvalues of K are of the order of a client's number of rows, and less."""

    @model_validator(mode="after")
    def _neurons_fit(self) -> NTK:
        if self.kernel == "continuous" and self.neurons is not None:
            raise ValueError("ntk takes neurons with the discrete kernel, and none with continuous")
        return self

    def start(self, problem: Problem) -> Computation:
        """See Learner.

        Raises:
            FedsimError: weights of the model cannot be read, or there are too many features.
        """
        return _Ensemble(problem, self)


@final
class _Ensemble(Computation):
    release: Release

    def __init__(self, problem: Problem, learner: NTK) -> None:
        assert isinstance(problem.dataset, Dataset)
        self._dataset = problem.dataset
        self._stack = problem.stack
        self._learner = learner
        self._features = Features(problem)
        d, self._classes = self._features.dimension, len(problem.dataset.classes)
        if self._classes * d * d > _LARGEST:
            raise FedsimError(
                f"a predictor of {self._classes} classes and {d} features has "
                f"{self._classes * d * d:,} entries; use a `model` with fewer features, or smaller "
                "images"
            )
        self._weights: Tensor | None = None
        gain = learner.scale**2
        if learner.kernel == "discrete":
            stream = rng.generator(problem.scenario.seed, "learner", "neurons")
            self._weights = ntk.draw_weights(learner.neurons or 256, d, learner.scale, stream)
            gain = float(torch.linalg.matrix_norm(self._weights, 2) ** 2 / len(self._weights))
        self.release = Release(
            kind="kernel_regression",
            row_norm=1.0,
            columns=0,
            features=d,
            statistics=("features", "kernel"),
            gain=gain,
        )

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Zeros: there is no model before the first release."""
        d = self.release.features
        return {MODEL: torch.zeros(self._classes, d, d, dtype=torch.float64)}, {}

    def compute(self, request: Request, rng: torch.Generator) -> Computed:
        """The client's whole predictor, from statistics as the stack lets it use them."""
        pixels, classes = request.batches[0]
        features = self._features.of(pixels)
        gram = ntk.kernel(features, features, self._weights, scale=self._learner.scale)
        alpha = ntk.fit(
            self._stack.private("kernel", gram, self.release, rng),
            ntk.one_hot(classes, self._classes),
            self._learner.ridge,
        )
        rows = self._stack.private("features", features, self.release, rng)
        form = ntk.quadratic_form(rows, alpha, self._weights, scale=self._learner.scale)
        return Computed(update={MODEL: form}, buffers={}, num_examples=1, truth=None, loss=None)

    def moved(self, before: Tensor, update: Tensor, training: LocalTraining) -> Tensor:
        """The release itself."""
        return update

    def concluded(self, mean: Tensors, clients: int) -> Tensors:
        """The mean of the clients' predictors."""
        return mean

    def probed(self, parameters: Tensors, seed: int) -> Tensors:
        """The parameters: nothing can be planted in them."""
        return parameters

    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        rows = self._features.of(as_pixels(self._dataset.test_images))
        values = ntk.evaluate_form(rows, parameters[MODEL])
        labels = self._dataset.test_labels
        wrong = (values - ntk.one_hot(labels, self._classes)).square().sum(1)
        right = (values.argmax(1) == labels).double()
        return Evaluation(loss=float(wrong.mean()), accuracy=float(right.mean()))
