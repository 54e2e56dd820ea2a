"""Computes image metrics of matched pairs, in pixels: (N, C, H, W) in [0, 1], data range 1.

Each function returns one value per image, (N,) float64; means are taken afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsim.contracts.metric import ScoringError, Unavailable

PSNR_CAP = 60.0
"""Largest PSNR in dB, an RMSE of 0.001. Without it, one perfect image makes a mean infinite."""

_SSIM_WINDOW = 7


def check_pixels(images: Tensor, what: str) -> None:
    """Refuses tensors that are not a batch of pixels; `what` names them in the message.

    Raises:
        ScoringError: the tensor is empty, or is not (N, C, H, W), floating-point, finite and within
            [0, 1].
    """
    if images.ndim != 4 or images.numel() == 0:
        raise ScoringError(
            f"{what}: expected images of shape (N, C, H, W), got {tuple(images.shape)}"
        )
    if not images.is_floating_point():
        raise ScoringError(f"{what}: expected floating-point pixels in [0, 1], got {images.dtype}")
    if not bool(torch.isfinite(images).all()):
        raise ScoringError(f"{what}: the images hold non-finite pixels")
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise ScoringError(
            f"{what}: expected pixels in [0, 1], got values from {low:.4g} to {high:.4g}; "
            "undo the normalization and clamp before scoring"
        )


def mse(reconstruction: Tensor, truth: Tensor) -> Tensor:
    """Returns the mean squared error of each image (N, C, H, W): (N,)."""
    return (reconstruction.double() - truth.double()).square().flatten(1).mean(1)


def rmse(reconstruction: Tensor, truth: Tensor) -> Tensor:
    """Returns the root mean squared error of each image (N, C, H, W): (N,) in [0, 1]."""
    return mse(reconstruction, truth).sqrt()


def psnr(reconstruction: Tensor, truth: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio of each image (N, C, H, W): (N,) dB.

    Values are at most 60 (`PSNR_CAP`), which identical images have.
    """
    # 10 log10(range² / MSE) with a range of 1.
    return -10 * mse(reconstruction, truth).clamp(min=10 ** (-PSNR_CAP / 10)).log10()


def ssim(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the structural similarity of each image (N, C, H, W): (N,) in [-1, 1].

    The form is that of scikit-image (Wang et al., IEEE TIP 13(4), 2004). The window is uniform, of
    7 x 7 pixels, or the largest odd window that fits a smaller image. Images are on the CPU. The
    reason is returned where a side is below 3 pixels, or scikit-image is missing.
    """
    try:
        from skimage.metrics import structural_similarity
    except ImportError:
        return Unavailable("SSIM needs scikit-image, which is not installed")
    side = min(truth.shape[-2:])
    window = min(_SSIM_WINDOW, side if side % 2 else side - 1)
    if window < 3:
        return Unavailable(f"SSIM needs images of at least 3 x 3 pixels, these have a side {side}")
    similarity: Callable[..., float] = structural_similarity
    values = [
        similarity(a, b, data_range=1.0, channel_axis=0, win_size=window)
        for a, b in zip(reconstruction.double().numpy(), truth.double().numpy(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64)
