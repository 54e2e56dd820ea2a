"""Computes LPIPS with a pretrained backbone, or says why it cannot.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018.
The `lpips` package would have the backbone downloaded. Here it comes from a file that is named or
that torchvision has already cached; nothing is ever downloaded, and a randomly initialized
backbone, which is another metric, is never used.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import rng
from fedsim.contracts.metric import Unavailable
from fedsim.system import memory, paths

Backbone = Literal["alex", "vgg", "squeeze"]

MINIMUM_SIDE = 32
"""Side in pixels to which smaller images are enlarged, as some backbones have no output below."""

_PUBLISHED: dict[Backbone, str] = {
    "alex": "alexnet-owt-7be5be79.pth",
    "vgg": "vgg16-397923af.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
}
"""Backbone -> file name of torchvision's ImageNet weights, which ends with the first 8 digits of
the file's SHA-256."""

_BATCH = 16


@dataclass(frozen=True)
class LpipsMetric:
    """Computes LPIPS v0.1 of matched pixels in [0, 1] on the CPU; 0 for identical images."""

    backbone: Backbone
    weights_sha256: str
    model: nn.Module = field(repr=False)

    def __call__(self, reconstruction: Tensor, truth: Tensor) -> Tensor:
        """Compares (N, C, H, W) pixels, C = 1 or 3; returns (N,) float64.

        Gray images are repeated to three channels, pixels scaled to [-1, 1] as the metric expects,
        and images with a side below `MINIMUM_SIDE` enlarged bilinearly until it has that length.
        """
        with torch.no_grad():
            values = [
                self.model(_prepare(reconstruction[chunk]), _prepare(truth[chunk])).flatten()
                for chunk in (slice(i, i + _BATCH) for i in range(0, len(truth), _BATCH))
            ]
        return torch.cat(values).double()

    def describe(self, height: int, width: int) -> str:
        """Returns a text of backbone, weights and image size; values of others do not compare."""
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
    """Loads LPIPS on `backbone`, from `weights_path` or else from torchvision's cache.

    `weights_path` is a state dict of torchvision's AlexNet, VGG-16 or SqueezeNet 1.1, as
    `.safetensors` or as the `.pth` file that torchvision publishes (read as plain tensors). The
    reason is returned where the file or the `lpips` package is missing, or the weights do not fit.
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
    digest = _sha256(path)
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
        # `pnet_rand` only stops the download: every tensor of the backbone is replaced here.
        model.net.load_state_dict(_backbone_state(model.net, _read(path)))
    except (KeyError, RuntimeError, ValueError, OSError) as error:
        return Unavailable(f"LPIPS: {path} does not hold the {backbone} backbone: {error}")
    return LpipsMetric(backbone, digest, model.eval().requires_grad_(False))


def perceptual_distance(
    claimed: Tensor, truth: Tensor, lpips: LpipsMetric | Unavailable | None
) -> Tensor | Unavailable:
    """Returns LPIPS, (N,) float64, of pixels (N, C, H, W) in [0, 1], or the reason for none."""
    if lpips is None:
        return Unavailable("LPIPS was not asked for")
    if isinstance(lpips, Unavailable):
        return lpips
    if truth.shape[1] not in (1, 3):
        return Unavailable(f"LPIPS needs 1 or 3 channels, these images have {truth.shape[1]}")
    return lpips(claimed, truth)


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


def _backbone_state(net: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    # lpips cuts torchvision's `features` into slices and keeps each layer's number:
    # slice2.3.weight is features.3.weight.
    return {name: weights[f"features.{name.partition('.')[2]}"] for name in net.state_dict()}


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


def _sha256(path: Path) -> str:
    with paths.open_regular(path, memory.limit()) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
