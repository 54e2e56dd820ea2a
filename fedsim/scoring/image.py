"""Computes metrics of N image pairs, (N, C, H, W) pixels in [0, 1] each: (N,) float64 values."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import rng
from fedsim.contracts.metric import ScoringError, Unavailable
from fedsim.system import memory, paths

PSNR_CAP = 60.0
"""Largest PSNR in dB, an RMSE of 0.001. Without it, one perfect image makes a mean infinite."""
_SSIM_WINDOW = 7


def check_pixels(images: Tensor, what: str) -> None:
    """Refuses, by a ScoringError that begins with `what`, all but (N, C, H, W) floats in [0, 1]."""
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
    """Returns the mean squared error of each of N pairs of images (N, C, H, W): (N,) float64."""
    return (reconstruction.double() - truth.double()).square().flatten(1).mean(1)


def rmse(reconstruction: Tensor, truth: Tensor) -> Tensor:
    """Returns the root mean squared error of each of N pairs of (N, C, H, W): (N,) in [0, 1]."""
    return mse(reconstruction, truth).sqrt()


def psnr(reconstruction: Tensor, truth: Tensor) -> Tensor:
    """Returns the PSNR of each of N pairs of pixels (N, C, H, W): (N,) dB, cut off at 60."""
    # 10 log10(range² / MSE) with a range of 1.
    return -10 * mse(reconstruction, truth).clamp(min=10 ** (-PSNR_CAP / 10)).log10()


def ssim(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the structural similarity of each of N pairs (N, C, H, W): (N,) in [-1, 1].

    The form is that of scikit-image (Wang et al., IEEE TIP 13(4), 2004). The window is uniform, of
    7 x 7 pixels, or the largest odd window that fits a smaller image. Images have to be on the CPU
    and need no gradient. An `Unavailable` says that a side is below 3 pixels, or that scikit-image
    is missing.
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


SMALLEST_SIDE = 16
"""Least side in pixels: half of it is the size of the coarsest wavelet."""
_C, _ALPHA = 30.0, 4.2
"""Constants C and α of the paper, for pixels in [0, 255]."""
_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
_SCALES = (2, 4, 8)
"""Sides of the wavelets. The first two are compared, and the last weighs places."""


def haarpsi(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns HaarPSI of each pair of images, (N,) float64 in [0, 1]; 1 if they are identical.

    Both are (N, C, H, W), pixels in [0, 1]. An `Unavailable` says that there are not 1 or 3
    channels, or that a side is below 16 pixels. Alone it is fooled: pixel noise on a plain picture
    of 32 x 32 scores up to 0.8, for borders weigh most there.

    Source: Reisenhofer, Bosse, Kutyniok and Wiegand, A Haar Wavelet-Based Perceptual Similarity
    Index for Image Quality Assessment, Signal Processing: Image Communication 61, 2018.
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
    *fine, coarse = ([_wavelet(each[:, :1], side) for each in (a, b)] for side in _SCALES)
    similarity = torch.stack([_similarity(*both) for both in fine]).mean(0)
    weight = torch.maximum(*coarse)
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


Backbone = Literal["alex", "vgg", "squeeze"]

MINIMUM_SIDE = 32
"""Side in pixels to which smaller images are enlarged, as some backbones have no output below."""
_PUBLISHED: dict[Backbone, str] = {
    "alex": "alexnet-owt-7be5be79.pth",
    "vgg": "vgg16-397923af.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
}
"""Backbone -> file of torchvision's weights, which ends with digits of its SHA-256."""
_BATCH = 16


@dataclass(frozen=True)
class LpipsMetric:
    """Computes LPIPS v0.1 on the CPU: called with two (N, C, H, W), it returns (N,), 0 if equal.

    Pixels are in [0, 1], C is 1 or 3, and `load_lpips` makes it. `weights_sha256` is in hex.

    Source: Zhang et al., The Unreasonable Effectiveness of Deep Features as a Perceptual Metric,
    CVPR 2018.
    """

    backbone: Backbone
    weights_sha256: str
    model: nn.Module = field(repr=False)

    def __call__(self, reconstruction: Tensor, truth: Tensor) -> Tensor:
        """Compares (N, C, H, W) pixels, C = 1 or 3, enlarged to `MINIMUM_SIDE`; returns (N,)."""
        with torch.no_grad():
            values = [
                self.model(_prepare(reconstruction[chunk]), _prepare(truth[chunk])).flatten()
                for chunk in (slice(i, i + _BATCH) for i in range(0, len(truth), _BATCH))
            ]
        return torch.cat(values).double()

    def describe(self, height: int, width: int) -> str:
        """Names backbone, weights and size of images; only values with equal texts compare."""
        published = self.weights_sha256.startswith(_digest_in_name(self.backbone))
        origin = "torchvision's ImageNet weights" if published else "weights from a file"
        sizes = f"{height}x{width}"
        if (enlarged := _enlarge(height, width)) != (height, width):
            sizes += f" enlarged to {enlarged[0]}x{enlarged[1]}"
        return (
            f"LPIPS v0.1, {self.backbone} with {origin} (SHA-256 {self.weights_sha256[:8]}), "
            f"images of {sizes} pixels"
        )


def load_lpips(
    backbone: Backbone = "alex", weights_path: str | Path | None = None
) -> LpipsMetric | Unavailable:
    """Loads LPIPS on `backbone`; an `Unavailable` says which weights or package are missing.

    Its weights are a state dict of torchvision's AlexNet, VGG-16 or SqueezeNet 1.1 at
    `weights_path`, as `.safetensors` or as the `.pth` file that torchvision publishes. None: they
    are in torchvision's cache. Nothing is downloaded. A FedsimError refuses a file too large, an
    OSError one that may not be read.
    """
    cached = Path(torch.hub.get_dir()) / "checkpoints" / _PUBLISHED[backbone]
    path = Path(weights_path) if weights_path else cached
    if not path.is_file():
        return Unavailable(
            f"LPIPS: no weights of the {backbone} backbone at {path}"
            if weights_path
            else f"LPIPS: torchvision's cache has no {_PUBLISHED[backbone]}; "
            "name a weights file in scoring.lpips_weights"
        )
    with paths.open_regular(path, memory.limit()) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not weights_path and not digest.startswith(_digest_in_name(backbone)):
        return Unavailable(
            f"LPIPS: {path} does not match the checksum in its name; remove it and fetch it again"
        )
    try:
        import lpips
    except ImportError:
        return Unavailable("LPIPS needs the lpips package, which is not installed")
    # Its random weights, all replaced below, must not advance the run's own stream.
    with warnings.catch_warnings(), rng.global_stream(0):
        warnings.simplefilter("ignore")  # lpips calls torchvision in a deprecated way
        model = lpips.LPIPS(net=backbone, pnet_rand=True, verbose=False)
    try:
        weights = _read(path)
        # `pnet_rand` only stops the download: every tensor of the backbone is replaced here. lpips
        # cuts torchvision's `features` into slices: slice2.3.weight is features.3.weight.
        names = {name: f"features.{name.partition('.')[2]}" for name in model.net.state_dict()}
        model.net.load_state_dict({name: weights[own] for name, own in names.items()})
    except (KeyError, RuntimeError, ValueError, OSError) as error:
        return Unavailable(f"LPIPS: {path} does not hold the {backbone} backbone: {error}")
    return LpipsMetric(backbone, digest, model.eval().requires_grad_(False))


def _prepare(pixels: Tensor) -> Tensor:
    # Expanding repeats one channel and leaves three as they are.
    images = pixels.float().expand(-1, 3, -1, -1) * 2 - 1
    size = _enlarge(*images.shape[-2:])
    if size == tuple(images.shape[-2:]):
        return images
    return F.interpolate(images, size=size, mode="bilinear", align_corners=False)


def _enlarge(height: int, width: int) -> tuple[int, int]:
    factor = max(1.0, MINIMUM_SIDE / min(height, width))
    return round(height * factor), round(width * factor)


def _read(path: Path) -> dict[str, Tensor]:
    paths.regular(path, memory.limit())
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    from pickle import UnpicklingError

    try:
        # weights_only admits tensors and containers, no code.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError("it is not a file of plain tensors") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"expected a state dict, got {type(loaded).__name__}")
    return cast(dict[str, Tensor], loaded)


def _digest_in_name(backbone: Backbone) -> str:
    return _PUBLISHED[backbone].removesuffix(".pth").rpartition("-")[2]
