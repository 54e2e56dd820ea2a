"""Loads benchmark sets through torchvision, with their published normalization."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from fedsim.contracts.learner import DataSource
from fedsim.system.paths import from_home
from fedsim.types import Dataset, FedsimError


class _VisionSource(DataSource):
    """Loads the torchvision data set of the same class name, from the folders torchvision makes."""

    root: str = "data"
    """Where the set lies, or is downloaded to; `~` is the home directory."""
    download: bool = False
    """Whether the set is fetched if it is not there."""

    title: ClassVar[str]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    @final
    def load(self) -> Dataset:
        """Returns both splits, in the published order; a FedsimError if they are not there."""
        train, test = self._split(True), self._split(False)
        return Dataset(
            name=self.title,
            train_images=_pixels(train),
            train_labels=torch.as_tensor(train.targets, dtype=torch.int64),
            test_images=_pixels(test),
            test_labels=torch.as_tensor(test.targets, dtype=torch.int64),
            mean=self.mean,
            std=self.std,
            classes=tuple(train.classes),
            private_statistics=(),
        )

    def _split(self, train: bool) -> Any:
        from torchvision import datasets

        root = from_home(self.root).absolute()
        try:
            # torchvision unpickles only files whose published checksum it has verified.
            made = getattr(datasets, type(self).__name__)
            return made(root, train=train, download=self.download)
        except (RuntimeError, OSError) as error:
            remedy = (
                "check the network and that the folder can be written"
                if self.download
                else f"set `root` to where it lies, or `download: true` to fetch it to {root}"
            )
            raise FedsimError(
                f"{self.title} was not found in {root} ({error}): {remedy}"
            ) from error


@final
class CIFAR10(_VisionSource):
    """60,000 colour photographs of 32x32 pixels in 10 classes; 50,000 train, 10,000 test.

    Its fields are `root`, the folder that holds the set, and `download`, whether to fetch it there.
    """

    paper: ClassVar[str] = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    title: ClassVar[str] = "cifar10"
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)


@final
class CIFAR100(_VisionSource):
    """60,000 colour photographs of 32x32 pixels in 100 classes; 50,000 train, 10,000 test.

    Its fields are `root`, the folder that holds the set, and `download`, whether to fetch it there.
    """

    paper: ClassVar[str] = CIFAR10.paper
    title: ClassVar[str] = "cifar100"
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)


@final
class MNIST(_VisionSource):
    """70,000 handwritten digits in grey, 28x28 pixels; 60,000 train, 10,000 test.

    Its fields are `root`, the folder that holds the set, and `download`, whether to fetch it there.
    """

    paper: ClassVar[str] = (
        "LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document "
        "Recognition, 1998"
    )
    title: ClassVar[str] = "mnist"
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)


def _pixels(split: Any) -> Tensor:
    """Converts torchvision's (N, H, W) tensor or (N, H, W, 3) array to (N, C, H, W) uint8."""
    images = torch.as_tensor(split.data)
    if images.dim() == 3:
        return images[:, None].contiguous()
    return images.permute(0, 3, 1, 2).contiguous()
