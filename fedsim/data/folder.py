"""Loads images in folders named after their classes, from a directory or a zip archive."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Annotated, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsim.contracts.data import DataSource
from fedsim.data.images import from_pil, statistics
from fedsim.data.tree import Parts, Tree, open_tree
from fedsim.system.paths import from_home
from fedsim.types import Dataset, FedsimError, Table
from fedsim.words import number_of

_MAX_BYTES = 1 << 33
_MEAN, _STD = 0.5, 0.25
_NORMALIZATION = "mean and std of the training images (data.source.normalization: training)"
_LIMIT = "which training images data.source.limit leaves out, by their classes"
_CLASSES = "the list of classes, of which one has no test image"


@dataclass(frozen=True)
class _Labelled:
    path: Parts
    class_name: str
    client: str


@final
class ImageFolder(DataSource):
    """Images at `train/<class>/<name>` and `test/<class>/<name>`, in a directory or a zip archive.

    BMP, GIF (first frame), JPEG, PNG, PPM, TIFF and WebP, of 8 bits per channel; other files and
    hidden ones are left out. The order is that of client, file and class names, so that an image
    of another class under the same name takes the same place.
    """

    path: str
    """The directory or the .zip file, which is read in place; `~` is the home directory."""
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Height and width, in pixels: larger or smaller images are scaled and cut at the centre.
    Without it all images must have the same size."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """At most so many images of each class (of each client) in each split, by order of names."""
    channels: Literal[1, 3] = 3
    """Grey (1) or colour (3)."""
    client_folders: bool = False
    """Training images lie at `train/<client>/<class>/<name>`, for the natural partition."""
    normalization: Literal["declared", "training"] = "declared"
    """`declared`: by `mean` and `std`, which no image has a say in. `training`: by those of the
    training split; one client's image then moves what all others compute, so that no claim of
    privacy holds."""
    mean: tuple[float, ...] | None = None
    """Declared normalization of each channel; default: 0.5."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Default: 0.25."""

    @model_validator(mode="after")
    def _normalization_fits(self) -> ImageFolder:
        for name, given in (("mean", self.mean), ("std", self.std)):
            if given is not None and len(given) != self.channels:
                raise ValueError(
                    f"{name} has {number_of(len(given), 'value')} for "
                    f"{number_of(self.channels, 'channel')}"
                )
        if (self.mean is None) != (self.std is None):
            raise ValueError("give both mean and std, or neither")
        if self.mean is not None and self.normalization == "training":
            raise ValueError("mean and std are declared: leave them out, or normalization")
        return self

    def load(self) -> Dataset:
        """Reads both splits.

        Raises:
            FedsimError: no such folder, a split is empty, a file is damaged, sizes differ, or the
                whole would not fit in 8 GiB.
        """
        with open_tree(from_home(self.path)) as tree:
            train = self._labelled(tree, "train")
            test = self._labelled(tree, "test")
            cut = len(train) < len(tree.images("train", 4 if self.client_folders else 3))
            classes = sorted({item.class_name for item in train})
            unknown = {item.class_name for item in test} - set(classes)
            if unknown:
                raise FedsimError(
                    f"{tree.root} tests on class {min(unknown)!r}, of which there is no training "
                    "image: add some or remove the class"
                )
            train_images = self._images(tree, train, None)
            test_images = self._images(tree, test, train_images.shape[2:])
        clients = _indices([item.client for item in train])
        only_trained = set(classes) - {item.class_name for item in test}
        private = ((_CLASSES,) if only_trained else ()) + ((_LIMIT,) if cut else ())
        names = {(item.client, item.path[-1]) for item in train}
        declared = Dataset(
            name="image_folder",
            train_images=train_images,
            train_labels=_indices([item.class_name for item in train], classes),
            test_images=test_images,
            test_labels=_indices([item.class_name for item in test], classes),
            mean=self.mean or (_MEAN,) * self.channels,
            std=self.std or (_STD,) * self.channels,
            classes=tuple(classes),
            client_of=clients if self.client_folders else None,
            private_statistics=private,
            placed_by_label=len(names) < len(train),
        )
        return self._normalized(declared)

    def prepared(self, dataset: Dataset | Table) -> Dataset | Table:
        """Normalizes by the training images' mean and deviation, if these are asked for."""
        return dataset if isinstance(dataset, Table) else self._normalized(dataset)

    def _normalized(self, dataset: Dataset) -> Dataset:
        if self.normalization == "declared":
            return dataset
        mean, std = statistics(dataset.train_images)
        private = tuple({*(dataset.private_statistics or ()), _NORMALIZATION})
        return replace(dataset, mean=mean, std=std, private_statistics=tuple(sorted(private)))

    def _labelled(self, tree: Tree, split: str) -> list[_Labelled]:
        by_client = self.client_folders and split == "train"
        grouped: dict[tuple[str, str], list[_Labelled]] = defaultdict(list)
        for path in tree.images(split, 4 if by_client else 3):
            class_name, client = path[-2], path[1] if by_client else ""
            group = grouped[class_name, client]
            if self.limit is None or len(group) < self.limit:
                group.append(_Labelled(path, class_name, client))
        if not grouped:
            layout = f"{split}/{'<client>/' if by_client else ''}<class>/<name>"
            raise FedsimError(
                f"{tree.root} has no image at {layout}: arrange the files so, or correct `path`"
                + ("" if by_client else " (it must not include the split's folder)")
            )
        items = [item for group in grouped.values() for item in group]
        return sorted(items, key=lambda item: (item.client, item.path[-1], item.class_name))

    def _images(
        self, tree: Tree, items: list[_Labelled], expected: tuple[int, ...] | None
    ) -> Tensor:
        """Reads images as (N, C, H, W) uint8, of size `expected` or that of the first one."""
        first = self._decode(tree, items[0].path)
        shape = (len(items), self.channels, *(expected or first.shape[1:]))
        if torch.Size(shape).numel() > _MAX_BYTES:
            raise FedsimError(
                f"{number_of(len(items), 'image')} of {shape[2]}x{shape[3]} pixels in {tree.root} "
                "would take "
                f"more than {_MAX_BYTES >> 30} GiB: set `size` or `limit`"
            )
        images = torch.empty(shape, dtype=torch.uint8)
        for index, item in enumerate(items):
            image = self._decode(tree, item.path) if index else first
            if image.shape != images.shape[1:]:
                raise FedsimError(
                    f"{tree.name(item.path)} has {image.shape[1]}x{image.shape[2]} pixels, others "
                    f"have {shape[2]}x{shape[3]}: set `size` to bring all to one size"
                )
            images[index] = image
        return images

    def _decode(self, tree: Tree, path: Parts) -> Tensor:
        image = tree.image(path, "L" if self.channels == 1 else "RGB")
        if self.size is not None and image.size != (self.size, self.size):
            from PIL import ImageOps
            from PIL.Image import Resampling

            image = ImageOps.fit(image, (self.size, self.size), Resampling.BICUBIC)
        return from_pil(image)


def _indices(names: list[str], order: list[str] | None = None) -> Tensor:
    """Returns each name's place in `order`, or else among the sorted names: (N,) int64."""
    place = {name: index for index, name in enumerate(order or sorted(set(names)))}
    return torch.tensor([place[name] for name in names], dtype=torch.int64)
