"""The order in which tensors of images lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Brings a tensor (N, C, H, W) into the memory order of `like`, or leaves it there.

    PyTorch's kernels read both as if they lay alike: up to 2.11, whether or not they do.
    """
    last = like.device.type == "cpu" and like.is_contiguous(memory_format=torch.channels_last)
    last = last and not like.is_contiguous()
    return tensor.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
