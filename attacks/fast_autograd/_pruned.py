"""Which gradients the second differentiation of a gradient-matching attack can do without."""

from __future__ import annotations

import torch
from torch import Tensor


def is_wanted_of_input(images: Tensor) -> bool:
    """Whether anything will read a layer's gradient in its input.

    The first differentiation is in the parameters: of the images themselves it is not needed.
    """
    return images.requires_grad and not (images.is_leaf and torch.is_grad_enabled())


def is_wanted(parameter: Tensor | None) -> bool:
    """Whether anything will read the gradient of `parameter`.

    The second differentiation, which creates no graph, is in the images: the gradient of a leaf
    would be thrown away. Weights after a local step are no leaves, they depend on the images.
    """
    return parameter is not None and (torch.is_grad_enabled() or not parameter.is_leaf)
