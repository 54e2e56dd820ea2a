"""A generator of images from latent codes: the prior of `generative_prior`, and its file.

The layout is that of Zhang et al., Generative Gradient Inversion via Over-Parameterized Networks in
Federated Learning, ICCV 2023 (their code): a code becomes a map of the smallest resolution, and two
convolutions follow at each, between nearest-neighbour enlargements. Group norm stands for their
batch norm and spectral norm, so that an image does not depend on those that it is drawn with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, final

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedsim.models.weights import read_weights
from fedsim.system.paths import GIB, regular
from fedsim.types import FedsimError
from fedsim_attacks.gradient_matching._unet import resolutions

LATENT = 128
_LEAST_WIDTH = 32
_GROUPS = 8
_SLOPE = 0.1


@final
class Generator(nn.Module):
    """Codes (N, latent) -> pixels (N, C, H, W) in (0, 1). Of a code only the direction counts."""

    def __init__(self, shape: tuple[int, int, int], latent: int, width: int) -> None:
        """Makes layers of `width` channels. Weights are drawn from torch's global stream."""
        super().__init__()
        self.shape, self.latent, self.width = shape, latent, width
        channels, height, columns = shape
        levels = resolutions(height, columns)
        self._base = width, height >> (levels - 1), columns >> (levels - 1)
        self.first = nn.Linear(latent, torch.Size(self._base).numel())
        parts: list[nn.Module] = [nn.GroupNorm(_GROUPS, width), nn.LeakyReLU(_SLOPE)]
        for level in range(levels):
            parts += [nn.Upsample(scale_factor=2)] if level else []
            for _ in range(2):
                parts += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(_GROUPS, width)]
                parts += [nn.LeakyReLU(_SLOPE)]
        self.rest = nn.Sequential(*parts, nn.Conv2d(width, channels, 1), nn.Sigmoid())

    def forward(self, codes: Tensor) -> Tensor:
        """Draws images from codes, as the class says."""
        codes = codes * codes.square().mean(1, keepdim=True).rsqrt()
        pixels: Tensor = self.rest(self.first(codes).unflatten(1, self._base))
        return pixels


def over_parameterized(count: int, shape: tuple[int, int, int]) -> Generator:
    """Makes a generator of more than four weights for each position of `count` images."""
    width = _LEAST_WIDTH
    while True:
        generator = Generator(shape, LATENT, width)
        weights = sum(weight.numel() for weight in generator.parameters())
        if weights > 4 * count * shape[1] * shape[2]:
            return generator
        width *= 2


class _Header(BaseModel):
    """The metadata of a generator's file."""

    model_config = ConfigDict(extra="forbid")

    shape: tuple[int, int, int]
    latent: Annotated[int, Field(ge=1, le=4096)]
    width: Annotated[int, Field(ge=16, le=1024, multiple_of=_GROUPS)]
    public: str


def pack_generator(generator: Generator, public: str) -> bytes:
    """Packs `generator` into a safetensors file that says that it was trained on `public`."""
    header = _Header(
        shape=generator.shape, latent=generator.latent, width=generator.width, public=public
    )
    weights = {name: weight.detach().cpu() for name, weight in generator.named_parameters()}
    return save(weights, {"generator": header.model_dump_json()})


def read_generator(path: Path, shape: tuple[int, int, int], public: str) -> Generator:
    """Reads the generator in `path`, which has to draw images of `shape` and to know only `public`.

    Raises:
        FedsimError: it is missing, damaged, no generator, or another one.
    """
    try:
        with safe_open(regular(path, GIB), framework="pt") as file:
            header = _Header.model_validate_json((file.metadata() or {}).get("generator", "null"))
    except (OSError, SafetensorError) as error:
        raise FedsimError(f"{path}: cannot be read as safetensors: {error}") from error
    except ValidationError as error:
        raise FedsimError(
            f"{path}: not a generator; write one with benchmarks/train_generator.py"
        ) from error
    if header.shape != shape:
        raise FedsimError(
            f"{path}: draws images of {_times(header.shape)}, the victim's are of {_times(shape)}; "
            "train a generator on public images of that shape"
        )
    if header.public != public:
        raise FedsimError(
            f"{path}: was trained on {header.public!r}, the attack declares {public!r}; correct "
            "`public`, or name the file that was trained on it"
        )
    with torch.device("meta"):  # draws no random weights
        generator = Generator(header.shape, header.latent, header.width)
    weights, _ = read_weights(path, generator)
    generator.load_state_dict(weights, assign=True)
    return generator


def _times(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))
