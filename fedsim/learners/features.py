"""Computes unit features of images, for learners that train no network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng
from fedsim.contracts.learner import Problem, model_spec
from fedsim.models.base import build, normalize, read_weights
from fedsim.system.device import compute_exactly
from fedsim.system.paths import from_home
from fedsim.types import Dataset

_BATCH = 256


class FeatureExtractor:
    """Computes rows of L2 norm 1: features of a frozen model, or pixels if there is no model.

    The model is public: it must not have been trained on the clients' data. A row of zeros has no
    direction and stays as it is. A row has `dimension` features.
    """

    def __init__(self, problem: Problem) -> None:
        """Reads the model and its weights, if `problem` has any that can be read and fit."""
        dataset = problem.dataset
        assert isinstance(dataset, Dataset)
        self._device = problem.device
        compute_exactly(self._device)
        self._spec = model_spec(problem) if problem.model else None
        if self._spec:
            self._model = build(self._spec, rng.derive(problem.seed, "model"))
            if problem.weights is not None:
                weights = from_home(problem.weights)
                parameters, buffers = read_weights(weights, self._model)
                self._model.load_state_dict({**parameters, **buffers}, strict=False)
            self._model.to(self._device).eval()
        self.dimension = self.of(torch.zeros(1, *dataset.input_spec.input_shape)).shape[1]

    def of(self, pixels: Tensor) -> Tensor:
        """Computes the features of (n, C, H, W) `pixels` in [0, 1]: (n, d) float64 on the CPU."""
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
