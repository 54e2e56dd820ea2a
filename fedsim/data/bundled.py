"""Loads images that scikit-image and scikit-learn carry; a fifth of each class is to test on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.learner import DataSource
from fedsim.data.images import from_pil, resize, stratified_split
from fedsim.types import Dataset

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSize = Annotated[int, Field(ge=8, le=512)]

_TEST_FRACTION = 0.2
_CROP, _GRID, _KEPT = 32, 7, 40


@final
class Faces(DataSource):
    """200 grey photographs, 100 of faces and 100 of other things (labels 0 and 1).

    They have 25x25 pixels, enlarged to 32x32 by default; 160 are to train on, 40 to test on.
    """

    paper: ClassVar[str] = (
        "A subset of Labeled Faces in the Wild (Huang et al., 2007), skimage.data.lfw_subset"
    )

    size: ImageSize = 32
    """Height and width, in pixels."""

    def load(self) -> Dataset:
        """Returns the set, with images (N, 1, `size`, `size`) uint8."""
        images = _faces(self.size)
        # scikit-image lists its 100 faces first, then its 100 crops without a face.
        labels = torch.arange(len(images)) // 100
        return _dataset("faces", images, labels, ("face", "not face"), (0.37,), (0.27,))


@final
class Digits(DataSource):
    """1797 handwritten digits in grey, 8x8 pixels, enlarged to 32x32 by default.

    The default size is one that every model and every image metric accepts; the information is
    that of 8x8 pixels at any size.
    """

    paper: ClassVar[str] = (
        "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, UCI, 1998), "
        "sklearn.datasets.load_digits"
    )

    size: ImageSize = 32
    """Height and width, in pixels; 8 leaves the images as they are."""

    def load(self) -> Dataset:
        """Returns the set, with images (N, 1, `size`, `size`) uint8."""
        images, labels = _digits(self.size)
        classes = tuple(str(digit) for digit in range(10))
        return _dataset("digits", images, labels, classes, (0.31,), (0.35,))


@final
class Photos(DataSource):
    """320 colour crops of 32x32 pixels from eight photographs; the class is the photograph.

    Each photograph is reduced until its shorter side is seven crops long, and cut into a grid of
    crops. The 40 with the most contrast are kept (so, no empty sky); 256 of all are to train on, 64
    to test on.
    """

    paper: ClassVar[str] = (
        "Photographs in skimage.data and sklearn.datasets (see their own credits)"
    )

    halves: bool = False
    """Whether the upper and the lower half of a photograph are classes of their own: 16 instead of
    8, of 20 crops each."""

    def load(self) -> Dataset:
        """Cuts the photographs into crops, and returns them as images (N, 3, 32, 32) uint8."""
        crops, classes = _photos()
        if self.halves:
            classes = tuple(f"{name}, {half}" for name in classes for half in ("upper", "lower"))
        # A photograph's crops come in reading order, so its first 20 are the upper ones.
        labels = torch.arange(len(classes)).repeat_interleave(len(crops) // len(classes))
        mean, std = (0.49, 0.40, 0.34), (0.29, 0.24, 0.25)
        return _dataset("photos", crops, labels, classes, mean, std)


def _faces(size: int) -> Tensor:
    import skimage.data

    data: Any = skimage.data
    return _resize_grey(data.lfw_subset(), size)


def _digits(size: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # scikit-learn's grey levels are whole numbers from 0 to 16.
    return _resize_grey(digits.images / 16, size), torch.from_numpy(digits.target).long()


def _photos() -> tuple[Tensor, tuple[str, ...]]:
    """Returns the crops of each photograph after those of the one before, and their names."""
    import skimage.data
    from PIL import Image
    from sklearn.datasets import load_sample_image

    data: Any = skimage.data
    pixels = {
        "astronaut": data.astronaut(),
        "cat": data.chelsea(),
        "coffee": data.coffee(),
        "rocket": data.rocket(),
        "tissue": data.immunohistochemistry(),
        "motorcycle": data.stereo_motorcycle()[0],
        "pavilion": load_sample_image("china.jpg"),
        "dahlia": load_sample_image("flower.jpg"),
    }
    crops = [_crops(Image.fromarray(array)) for array in pixels.values()]
    return torch.cat(crops), tuple(pixels)


def _crops(picture: Image) -> Tensor:
    scale = _GRID * _CROP / min(picture.size)
    width, height = (round(side * scale) for side in picture.size)
    pixels = from_pil(resize(picture, width, height))
    # What no whole crop covers is cut off evenly at both sides.
    top, left = (height % _CROP) // 2, (width % _CROP) // 2
    grid = pixels[:, top:, left:].unfold(1, _CROP, _CROP).unfold(2, _CROP, _CROP)
    crops = grid.permute(1, 2, 0, 3, 4).flatten(0, 1)
    # n Σx² - (Σx)² is n² times the variance of n = 32² pixels. It stays in exact integers, so that
    # the order never depends on rounding.
    sums = crops.long().sum((2, 3))
    variance = crops.long().square().sum((2, 3)) * _CROP**2 - sums.square()
    contrast = variance.sum(1)
    kept = contrast.argsort(descending=True, stable=True)[:_KEPT]
    return crops[kept.sort().values]


def _resize_grey(grey: Any, size: int) -> Tensor:
    """Resizes an (N, H, W) array in [0, 1] to (N, 1, size, size) uint8."""
    from PIL import Image

    return torch.stack(
        [
            from_pil(resize(Image.fromarray(image), size, size))
            for image in (grey * 255).round().clip(0, 255).astype("uint8")
        ]
    )


def _dataset(
    name: str,
    images: Tensor,
    labels: Tensor,
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    """Splits `images` (N, C, H, W) uint8; no image influences the constants that normalize them."""
    train, test = stratified_split(labels, _TEST_FRACTION, name)
    return Dataset(
        name=name,
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        mean=mean,
        std=std,
        classes=classes,
        private_statistics=(),
    )
