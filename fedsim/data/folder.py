"""Loads images in folders named after their classes, from a directory or a zip archive."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsim.contracts.learner import DataSource
from fedsim.data.images import from_pil, statistics
from fedsim.data.tree import BELOW, Parts, Tree, UnreadableError, open_tree
from fedsim.system.paths import from_home
from fedsim.types import Dataset, FedsimError, Table
from fedsim.words import number_of

_MAX_BYTES = 1 << 33
_MEAN, _STD = 0.5, 0.25
_TEST_SHARE = 0.2
_COLUMNS = ("file", "label", "split", "client")
_SHOWN = 5
"""Maximum number of wrong rows that a message lists."""
_NORMALIZATION = "mean and std of the training images (data.source.normalization: training)"
_LIMIT = "which training images data.source.limit leaves out, by their classes"
_CLASSES = "the list of classes, of which one has no test image"


@dataclass(frozen=True)
class _Labelled:
    path: Parts
    class_name: str
    client: str
    name: str
    """Name by which it is ordered and split: the file's own, or its path where a CSV lists it."""
    split: str = ""  # split that a CSV gives it, `train` or `test`; empty if the CSV gives none


def _read_labels(tree: Tree, labels: Parts) -> Iterator[_Labelled]:
    """Yields the images that the CSV at `labels` in the folder lists, in its order, or refuses."""
    name = tree.name(labels)
    reader = csv.DictReader(io.StringIO(tree.text(labels)), strict=True)
    try:
        columns = list(reader.fieldnames or [])
        if lacking := {"file", "label"} - set(columns):
            raise FedsimError(
                f"labels: {name} has no column {min(lacking)!r} in its first line (there are "
                f"{', '.join(columns) or 'none'}); separate columns by commas, and name these two "
                "`file` and `label`"
            )
        if twice := {column for column in _COLUMNS if columns.count(column) > 1}:
            raise FedsimError(f"labels: {name} has two columns {min(twice)!r}; keep one of them")
        # A quoted cell may span several lines, so the row's number would not be its line's.
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise FedsimError(
            f"labels: {name}: line {reader.reader.line_num}: {error}; mend it"
        ) from error
    wrong, found = [], {}
    for line, row in rows:
        file, label = (row["file"] or "").strip(), (row["label"] or "").strip()
        path = _parts(file)
        split, client = ((row.get(column) or "").strip() for column in ("split", "client"))
        if not label:
            wrong.append(f"line {line}: no label")
        elif file.startswith(("/", "~")) or "\\" in file or ".." in path:
            wrong.append(f"line {line}: {file!r} is no path within the folder")
        elif not tree.has(path):
            wrong.append(f"line {line}: there is no file {file!r} in the folder")
        elif not tree.reads(path):
            wrong.append(f"line {line}: {file!r} is no image by its name")
        elif path in found:
            wrong.append(f"line {line}: {file!r} is listed before")
        elif "client" in columns and not client and split != "test":
            wrong.append(f"line {line}: no client")
        elif split not in (("train", "test") if "split" in columns else ("",)):
            wrong.append(f"line {line}: split {split!r} is neither train nor test")
        else:
            found[path] = _Labelled(path, label, client, "/".join(path), split)
    if wrong or not found:
        shown = "; ".join(wrong[:_SHOWN]) or "it lists nothing"
        more = f"; and {number_of(len(wrong) - _SHOWN, 'more')}" if len(wrong) > _SHOWN else ""
        raise FedsimError(f"labels: {name}: {shown}{more}; correct these rows")
    yield from found.values()


@final
class ImageFolder(DataSource):
    """Images at `train/<class>/<name>` and `test/<class>/<name>`, in a directory or a zip archive.

    Images at `<class>/<name>`, or anywhere if `labels` lists them, are split by `test_share`.
    Formats are BMP, GIF (first frame), JPEG, PNG, PPM, TIFF and WebP, of 8 bits per channel. Images
    are turned upright as EXIF says, and transparent pixels are laid over white. Other files are
    counted, hidden ones are not. Images are ordered by client, file and class names, so that an
    image of another class under the same name takes the same place.
    """

    path: str
    """The directory or the .zip file, which is read in place; `~` is the home directory."""
    size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Height and width, in pixels: larger or smaller images are scaled and cut at the centre.
    Without it all images must have the same size."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of images of each class (of each client) in each split, by order of names."""
    labels: str | None = None
    """A CSV file in the folder or archive, in place of folders named after classes. Its columns are
    `file` (path in the folder), `label`, and optionally `split` (`train` or `test`) and `client`
    (the image's owner, for the natural partition)."""
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of images to test on where there are no `train` and `test`; default: 0.2. The digest of
    a file's name decides, so that other images have no influence on it."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """Whether images that are damaged, empty, too large or of more than 8 bits are refused, or left
    out and counted by reason (`skip`)."""
    bits: Annotated[int, Field(ge=9, le=16)] | None = None
    """Number of bits that 16-bit PNGs use per channel: 12 for those of a 12-bit scanner. By default
    colour PNGs use 16 and nearly black ones are refused; so is every grey 16-bit PNG."""
    channels: Literal[1, 3] = 3
    """Number of channels: grey (1) or colour (3)."""
    client_folders: bool = False
    """Whether training images lie at `train/<client>/<class>/<name>`, for the natural partition."""
    normalization: Literal["declared", "training"] = "declared"
    """`declared`: by `mean` and `std`, which depend on no image. `training`: by those of the
    training split; one client's image then moves what all others compute, so that no claim of
    privacy holds."""
    mean: tuple[float, ...] | None = None
    """Declared mean of each channel, with pixels in [0, 1]; default: 0.5."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Declared standard deviation of each channel; default: 0.25."""

    @model_validator(mode="after")
    def _normalization_fits(self) -> ImageFolder:
        for name, given in (("mean", self.mean), ("std", self.std)):
            if given is not None and len(given) != self.channels:
                raise ValueError(
                    f"{name} has {number_of(len(given), 'value')} for "
                    f"{number_of(self.channels, 'channel')}"
                )
        if self.labels is not None and self.client_folders:
            raise ValueError(
                "labels and client_folders: a CSV names clients in its column `client`; use one of "
                "them"
            )
        if (self.mean is None) != (self.std is None):
            raise ValueError("give both mean and std, or neither")
        if self.mean is not None and self.normalization == "training":
            raise ValueError("mean and std are declared: leave them out, or normalization")
        return self

    def load(self) -> Dataset:
        """Reads both splits, images (N, `channels`, H, W) uint8.

        A FedsimError says that files do not fit the fields, images are damaged or of several sizes,
        or that a split is empty, over 8 GiB, or tests on a class without training images.
        """
        with open_tree(from_home(self.path)) as tree:
            found = self._find_images(tree)
            kept = {split: self._apply_limit(items) for split, items in found.items()}
            cut = len(kept["train"]) < len(found["train"])
            # Images beyond `limit` count as used: `left_out` has files that nobody asked to leave.
            left_out = self._left_out(tree, [item.path for some in found.values() for item in some])
            train_images, train = self._images(tree, kept["train"], None, left_out)
            classes = sorted({item.class_name for item in train})
            unknown = {item.class_name for item in kept["test"]} - set(classes)
            if unknown:
                raise FedsimError(
                    f"{tree.root} tests on class {min(unknown)!r}, of which there is no training "
                    "image: add some or remove the class"
                )
            test_images, test = self._images(tree, kept["test"], train_images.shape[2:], left_out)
        clients = _indices([item.client for item in train])
        # Declared is what one private image can change for all: classes, and what `limit` keeps.
        only_trained = set(classes) - {item.class_name for item in test}
        private = ((_CLASSES,) if only_trained else ()) + ((_LIMIT,) if cut else ())
        # Where a client has one name in two classes, the class orders them: a label moves images.
        names = {(item.client, item.name) for item in train}
        declared = Dataset(
            name="image_folder",
            train_images=train_images,
            train_labels=_indices([item.class_name for item in train], classes),
            test_images=test_images,
            test_labels=_indices([item.class_name for item in test], classes),
            mean=self.mean or (_MEAN,) * self.channels,
            std=self.std or (_STD,) * self.channels,
            classes=tuple(classes),
            client_of=clients if any(item.client for item in train) else None,
            private_statistics=private,
            placed_by_label=len(names) < len(train),
            left_out=tuple(sorted(left_out.items())),
        )
        return self._normalize(declared)

    def prepared(self, dataset: Dataset | Table) -> Dataset | Table:
        """Returns `dataset`, of images: with new mean and std if `normalization` is `training`."""
        assert isinstance(dataset, Dataset)
        return self._normalize(dataset)

    def _normalize(self, dataset: Dataset) -> Dataset:
        if self.normalization == "declared":
            return dataset
        mean, std = statistics(dataset.train_images)
        private = tuple({*(dataset.private_statistics or ()), _NORMALIZATION})
        return replace(dataset, mean=mean, std=std, private_statistics=tuple(sorted(private)))

    def _left_out(self, tree: Tree, used: list[Parts]) -> Counter[str]:
        """Counts, by reason, files that are not used; refuses images below folders of classes."""

        def depth(path: Parts) -> int:
            # The first used path tells the layout: splits on top, or classes.
            if used[0][0] != "train":
                return 2
            return 4 if self.client_folders and path[0] == "train" else 3

        rest = list(
            tree.left_out({*used, _parts(self.labels)}, None if self.labels is not None else depth)
        )
        below = [path for path, reason in rest if reason == BELOW]
        if below and self.unreadable == "refuse":
            raise FedsimError(
                f"{tree.root}: {number_of(len(below), 'image')} in folders below those of classes, "
                f"such as {'/'.join(min(below))}: move them up into their class's folder, list all "
                "images in a CSV (`labels`), or set `unreadable: skip`"
            )
        return Counter(reason for _, reason in rest)

    def _find_images(self, tree: Tree) -> dict[str, list[_Labelled]]:
        if self.labels is not None:
            return self._split(tree, list(_read_labels(tree, _parts(self.labels))))
        laid_out: dict[str, list[_Labelled]] = {"train": [], "test": []}
        bare = []
        for path in tree.images():
            by_client = self.client_folders and path[0] == "train"
            if path[0] in laid_out and len(path) == (4 if by_client else 3):
                client = path[1] if by_client else ""
                laid_out[path[0]].append(_Labelled(path, path[-2], client, path[-1]))
            elif path[0] not in laid_out and len(path) == 2:
                bare.append(_Labelled(path, path[-2], "", path[-1]))
        # Beside the folders train and test, bare classes are strays.
        if bare and not any(laid_out.values()) and not self.client_folders:
            return self._split(tree, bare)
        laid_out = {split: _in_order(items) for split, items in laid_out.items()}
        if self.test_share is not None:
            raise FedsimError(
                f"test_share: {tree.root} has folders train and test (or no image at all), which "
                "say what is held out; leave it out"
            )
        for split, items in laid_out.items():
            if not items:
                by_client = self.client_folders and split == "train"
                layout = f"{split}/{'<client>/' if by_client else ''}<class>/<name>"
                raise FedsimError(
                    f"{tree.root} has no image at {layout}: arrange the files so, or as "
                    "<class>/<name> without train and test, or correct `path`"
                    + ("" if by_client else " (it must not include the split's folder)")
                )
        return laid_out

    def _split(self, tree: Tree, items: list[_Labelled]) -> dict[str, list[_Labelled]]:
        share = _TEST_SHARE if self.test_share is None else self.test_share
        if items[0].split and self.test_share is not None:
            raise FedsimError(
                f"test_share: {self.labels} has a column `split`, which says what is held out; "
                "leave one of them out"
            )
        parted: dict[str, list[_Labelled]] = {"train": [], "test": []}
        for item in items:
            drawn = "test" if _draw_split(item.name) < share else "train"
            # A test image has no owner, by which it would be sorted.
            own = item if (item.split or drawn) == "train" else replace(item, client="")
            parted[item.split or drawn].append(own)
        for split, part in parted.items():
            part[:] = _in_order(part)
            if not part and items[0].split:
                raise FedsimError(f"labels: {self.labels} has no row of split {split!r}; add some")
            if not part:
                raise FedsimError(
                    f"test_share: of {number_of(len(items), 'image')} in {tree.root}, none is left "
                    f"to {split} with at {share:g}; choose another share, or add images"
                )
        return parted

    def _apply_limit(self, items: list[_Labelled]) -> list[_Labelled]:
        taken: Counter[tuple[str, str]] = Counter()
        kept = []
        for item in items:
            taken[item.class_name, item.client] += 1
            if self.limit is None or taken[item.class_name, item.client] <= self.limit:
                kept.append(item)
        return kept

    def _images(
        self,
        tree: Tree,
        items: list[_Labelled],
        expected: tuple[int, ...] | None,
        left_out: Counter[str],
    ) -> tuple[Tensor, list[_Labelled]]:
        """Returns (N, C, H, W) uint8 of size `expected` or the first one's, and the items read."""
        images: Tensor | None = None
        kept: list[_Labelled] = []
        for item in items:
            try:
                image = self._decode(tree, item.path)
            except UnreadableError as error:
                if self.unreadable == "refuse":
                    raise FedsimError(f"{error}, or set `unreadable: skip`") from error
                left_out[error.reason] += 1
                continue
            if images is None:
                shape = (len(items), self.channels, *(expected or image.shape[1:]))
                if torch.Size(shape).numel() > _MAX_BYTES:
                    raise FedsimError(
                        f"{number_of(shape[0], 'image')} of {shape[2]}x{shape[3]} pixels in "
                        f"{tree.root} would take more than {_MAX_BYTES >> 30} GiB: set `size` or "
                        "`limit`"
                    )
                # Filled in place: a list that is stacked at the end would take the memory twice.
                images = torch.empty(shape, dtype=torch.uint8)
            if image.shape != images.shape[1:]:
                raise FedsimError(
                    f"{tree.name(item.path)} has {image.shape[1]}x{image.shape[2]} pixels, others "
                    f"have {images.shape[2]}x{images.shape[3]}: set `size` to bring all to one size"
                )
            images[len(kept)] = image
            kept.append(item)
        if images is None:
            raise FedsimError(
                f"{tree.root}: none of {number_of(len(items), 'image')} can be read "
                f"({', '.join(left_out)}): repair them"
            )
        return images[: len(kept)], kept

    def _decode(self, tree: Tree, path: Parts) -> Tensor:
        image = tree.image(path, "L" if self.channels == 1 else "RGB", self.bits)
        if self.size is not None and image.size != (self.size, self.size):
            from PIL import ImageOps
            from PIL.Image import Resampling

            image = ImageOps.fit(image, (self.size, self.size), Resampling.BICUBIC)
        return from_pil(image)


def _parts(file: str | None) -> Parts:
    """Splits a path in the folder into its parts, without empty ones and `.`."""
    return tuple(part for part in (file or "").split("/") if part not in ("", "."))


def _in_order(items: Iterable[_Labelled]) -> list[_Labelled]:
    # The class comes last, so that it only matters between images of the same name.
    return sorted(items, key=lambda item: (item.client, item.name, item.class_name))


def _draw_split(name: str) -> float:
    """Returns the number in [0, 1) that the digest of a file's name gives."""
    digest = hashlib.sha256(b"fedsim split\0" + name.encode("utf-8", "surrogateescape")).digest()
    # A float holds 48 bits exactly, so that no processor rounds across the share.
    return int.from_bytes(digest[:6], "big") / 2**48


def _indices(names: list[str], order: list[str] | None = None) -> Tensor:
    place = {name: index for index, name in enumerate(order or sorted(set(names)))}
    return torch.tensor([place[name] for name in names], dtype=torch.int64)
