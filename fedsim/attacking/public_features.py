"""Features of public images under the weights that a recorded update started from."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.models.base import normalize
from fedsim.models.local import features_of
from fedsim.models.victim import rebuild
from fedsim.types import FedsimError, Observation

MOST = 256
"""Images: hundreds tell which directions features share, and a model may take long for each."""


def public_features(observation: Observation, images: Tensor) -> Tensor | None:
    """(P, d) inputs of the head, float32 on the CPU, as a client computes them of `images`.

    `images` are (P, C, H, W), uint8. They go through the model in batches of the observed size, as
    batch norm sees them; those that do not fill one are left out, if there is one. None where the
    model cannot compute them.
    """
    model = rebuild(observation)
    device = next(iter(observation.parameters.values())).device
    size = min(observation.training.batch_size, len(images))
    parts = []
    try:
        for batch in torch.split(images[: len(images) // size * size], size):
            inputs = normalize(batch.to(device).float() / 255, observation.model)
            parts.append(
                features_of(
                    model, observation.parameters, observation.buffers, inputs, observation.training
                ).cpu()
            )
    except (FedsimError, ValueError):  # batch norm of a single value per channel
        return None
    return torch.cat(parts)
