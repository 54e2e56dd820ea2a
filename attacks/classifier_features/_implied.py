"""What features of an ordinary classifier tell of their images: labels and error signals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient


def implied(classifier: ClassifierGradient, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Derives labels (N,), error signals (N, d) and the scale of clipping (0-d) from `features`.

    What reproduces the gradient with these features is p - y but for that scale: the label is where
    it lies furthest below p. Where each image has a scale of its own, error signals have it.
    """
    whole = classifier.with_constant(features.double())
    read = classifier.num_images * torch.linalg.pinv(whole.T) @ classifier.gradient.T
    probabilities = (whole @ classifier.weights.T).softmax(1)
    labels, scale = read.argmin(1), read.new_ones(1, 1)
    for _ in range(2):
        errors = probabilities - F.one_hot(labels, probabilities.shape[1])
        if classifier.factors:
            over = (0, 1) if classifier.factors == 1 else 1
            along = (read * errors).sum(over, keepdim=True)
            scale = along / errors.square().sum(over, keepdim=True)
        labels = (read / scale - probabilities).argmin(1)
    errors = probabilities - F.one_hot(labels, probabilities.shape[1])
    weights = classifier.weights[:, :-1] if classifier.biased else classifier.weights
    signals = errors @ weights / classifier.num_images
    if classifier.factors > 1:
        signals, scale = scale * signals, read.new_ones(1, 1)
    return labels, signals.to(features.dtype), scale[0, 0].to(features.dtype)
