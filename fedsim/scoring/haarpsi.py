"""Computes HaarPSI, a perceptual similarity of images that needs no trained weights.

Reisenhofer, Bosse, Kutyniok and Wiegand, A Haar Wavelet-Based Perceptual Similarity Index for Image
Quality Assessment, Signal Processing: Image Communication 61, 2018. In its study it followed the
opinions of people on four data sets of distorted photographs better than SSIM did. Alone it is
fooled: pixel noise on a plain picture of 32 x 32 scores up to 0.8, for borders weigh most there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.metric import Unavailable

SMALLEST_SIDE = 16
"""Least side in pixels: half of it is the size of the coarsest wavelet."""

_C, _ALPHA = 30.0, 4.2
"""Constants C and α of the paper, for pixels in [0, 255]."""

_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))

_SCALES = (2, 4, 8)
"""Sides of the wavelets. The first two are compared, and the last weighs places."""


def haarpsi(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the similarity of each pair of images, (N,) float64 in [0, 1]; 1 if identical.

    Both are (N, C, H, W), pixels in [0, 1]. The reason is returned where channels are not 1 or 3,
    or a side is below 16 pixels (`SMALLEST_SIDE`).
    """
    channels, height, width = truth.shape[1:]
    if channels not in (1, 3):
        return Unavailable(f"HaarPSI needs 1 or 3 channels, these images have {channels}")
    if min(height, width) < SMALLEST_SIDE:
        return Unavailable(
            f"HaarPSI needs images of at least {SMALLEST_SIDE} x {SMALLEST_SIDE} pixels, these "
            f"have {height} x {width}"
        )
    a, b = _seen_from_afar(reconstruction), _seen_from_afar(truth)
    fine, weights = [], []
    for side in _SCALES:
        both = _wavelet(a[:, :1], side), _wavelet(b[:, :1], side)
        if side == _SCALES[-1]:
            weights.append(torch.maximum(*both))
        else:
            fine.append(_similarity(*both))
    similarity, weight = torch.stack(fine).mean(0), weights[0]
    if channels == len(_YIQ):
        smooth = torch.full((2, 1, 2, 2), 0.25, dtype=torch.float64)
        colors = [F.conv2d(_pad(each[:, 1:], 2), smooth, groups=2).abs() for each in (a, b)]
        similarity = torch.cat([similarity, _similarity(*colors).mean(1, keepdim=True)], 1)
        weight = torch.cat([weight, weight.mean(1, keepdim=True)], 1)
    # Without this a pair of black images, which has no edge anywhere, would be 0 / 0.
    weight = weight + 1e-9
    score = (torch.sigmoid(_ALPHA * similarity) * weight).sum((1, 2, 3)) / weight.sum((1, 2, 3))
    return (torch.logit(score) / _ALPHA).square()


def _seen_from_afar(pixels: Tensor) -> Tensor:
    """Returns YIQ, or gray, in [0, 255] at half the size, as a distant viewer sees it."""
    values = 255 * pixels.detach().cpu().double()
    if values.shape[1] == len(_YIQ):
        yiq = torch.tensor(_YIQ, dtype=torch.float64)
        values = torch.einsum("ij,njhw->nihw", yiq, values)
    odd = [values.shape[-1] % 2, values.shape[-2] % 2]
    return F.avg_pool2d(F.pad(values, (0, odd[0], 0, odd[1])), 2)


def _pad(values: Tensor, side: int) -> Tensor:
    # A filter of even size has no middle: zeros as of MATLAB's conv2(..., 'same').
    before, after = side // 2 - 1, side // 2
    return F.pad(values, (before, after, before, after))


def _wavelet(luma: Tensor, side: int) -> Tensor:
    """Returns (N, 2, H, W) magnitudes of horizontal and vertical Haar coefficients of a scale."""
    step = torch.full((side, side), 1 / side, dtype=torch.float64)
    step[side // 2 :] *= -1
    return F.conv2d(_pad(luma, side), torch.stack([step, step.T])[:, None]).abs()


def _similarity(a: Tensor, b: Tensor) -> Tensor:
    return (2 * a * b + _C) / (a.square() + b.square() + _C)
