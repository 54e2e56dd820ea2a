"""What candidates must look like inside the victim's model: features, and batch norm's inputs.

Features: Liu et al., Data Reconstruction Attacks and Defenses, equation 2. Batch norm's statistics:
Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021, equation 9;
which ones, the threat model says (`knowledge.bn`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.contracts.grant import Knowledge
from fedsim.models.local import features_function
from fedsim.models.victim import rebuild
from fedsim.types import Observation


class Features(NamedTuple):
    """Features (N, d) that the images are known to have, in their order."""

    values: Tensor
    measure: Literal["squared_cosine", "relative"]
    trust: Tensor | float = 1.0
    """(N,): what each image's misfit counts."""

    def misfit(self, features: Tensor) -> Tensor:
        """Computes the mean over the images of 1 - cos², or of |x - f|² / |f|²."""
        if self.measure == "squared_cosine":
            away = 1 - F.cosine_similarity(features, self.values).square()
        else:
            away = (features - self.values).square().sum(1) / self.values.square().sum(1)
        return (self.trust * away).mean()


@final
class ForwardPrior:
    """α_f R_feature + α_BN R_BN of candidates, by one pass through the body."""

    def __init__(
        self,
        observation: Observation,
        knowledge: Knowledge,
        features: Features | None,
        *,
        feature_weight: float = 1.0,
        batch_norm: float = 0.0,
    ) -> None:
        """Reads the granted statistics; the prior is zero without them and without features."""
        self._features, self._feature_weight = features, feature_weight
        self._statistics = _statistics(observation, knowledge) if batch_norm else {}
        self._batch_norm = batch_norm
        model = rebuild(observation)
        self._inputs: dict[str, Tensor] = {}
        for name in self._statistics:
            model.get_submodule(name).register_forward_pre_hook(self._watch(name))
        parameters = {n: t.detach() for n, t in observation.parameters.items()}
        buffers = {n: t.clone() for n, t in observation.buffers.items()}
        forward = features_function(model, buffers, observation.training)
        self._forward: Callable[[Tensor], Tensor] = lambda images: forward(parameters, images)

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes value (0-d) and slope (N, C, H, W) at normalized `images`."""
        if self._features is None and not self._statistics:
            return images.new_zeros(()), torch.zeros_like(images)
        with torch.enable_grad():
            variable = images.detach().clone().requires_grad_()
            features = self._forward(variable)
            value = variable.new_zeros(())
            if self._features is not None:
                value = value + self._feature_weight * self._features.misfit(features)
            for name, (mean, variance) in self._statistics.items():
                layer_input = self._inputs[name]
                gap = torch.linalg.vector_norm(layer_input.mean((0, 2, 3)) - mean)
                gap = gap + torch.linalg.vector_norm(
                    layer_input.var((0, 2, 3), unbiased=False) - variance
                )
                value = value + self._batch_norm * gap
        (slope,) = torch.autograd.grad(value, variable)
        return value.detach(), slope

    def _watch(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._inputs[name] = inputs[0]

        return hook


def _statistics(observation: Observation, knowledge: Knowledge) -> dict[str, tuple[Tensor, Tensor]]:
    """Reads batch-norm layer -> (mean, variance) of its input, as far as `knowledge` grants it."""
    layers = {
        n: m for n, m in rebuild(observation).named_modules() if isinstance(m, nn.BatchNorm2d)
    }
    if knowledge.grant.bn == "exact" and knowledge.exact_bn is not None:
        exact = knowledge.exact_bn
        return {name: (exact[f"{name}.mean"], exact[f"{name}.var"]) for name in layers}
    statistics = {}
    for name, layer in layers.items():
        keys = f"{name}.running_mean", f"{name}.running_var"
        before = [observation.buffers[key] for key in keys if key in observation.buffers]
        after = [
            observation.buffers_update[key] for key in keys if key in observation.buffers_update
        ]
        if knowledge.grant.bn == "inferred" and len(after) == 2 and layer.momentum:
            # new = (1 - m) old + m batch, its variance unbiased: of many positions, nearly the same
            m = layer.momentum
            mean, variance = ((b - (1 - m) * a) / m for a, b in zip(before, after, strict=True))
            statistics[name] = mean, variance.clamp_min(0)
        elif knowledge.grant.bn in ("running", "inferred") and len(before) == 2:
            statistics[name] = before[0], before[1]
    return statistics
