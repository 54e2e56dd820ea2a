"""Reads a tree of image files, in a directory or inside a zip archive in place.

Nothing is ever extracted, so a member's name can only be looked up, never written to.
"""

from __future__ import annotations

import io
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, final

from fedsim.system import paths
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from PIL.Image import Image

# What Pillow may try to decode. Formats that run other programs (EPS) are not among them.
_FORMATS = {
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".pgm": "PPM",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
Parts = tuple[str, ...]
"""A path relative to the root, such as `("train", "cat", "0001.jpg")`."""

MAX_FILE_BYTES = 1 << 26
"""An image file has at most so many bytes."""
MAX_PIXELS = 1 << 25
"""An image has at most so many pixels."""


class Tree(ABC):
    """Gives access to image files by their path relative to the root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @abstractmethod
    def _paths(self) -> Iterator[Parts]:
        """Yields every file's relative path, in any order."""

    @abstractmethod
    def _size(self, path: Parts) -> int:
        """Returns the bytes of the file, uncompressed."""

    @abstractmethod
    def _read(self, path: Parts) -> bytes:
        """Returns the file's content."""

    @final
    def name(self, path: Parts) -> str:
        """Returns how messages call a file."""
        return f"{self.root}:{'/'.join(path)}"

    @final
    def images(self, split: str, depth: int) -> list[Parts]:
        """Returns the visible image files `split/.../name` of exactly `depth` parts, sorted."""
        return sorted(
            path
            for path in self._paths()
            if len(path) == depth
            and path[0] == split
            and _format(path) is not None
            and not any(part == "" or part.startswith(".") for part in path)
        )

    @final
    def image(self, path: Parts, mode: str) -> Image:
        """Decodes an image of `images`, converted to Pillow mode `L` or `RGB`.

        Raises:
            FedsimError: it is too large, damaged, or not of 8 bits per channel; with its name.
        """
        from PIL import Image, UnidentifiedImageError

        name = self.name(path)
        try:
            if self._size(path) > MAX_FILE_BYTES:
                raise FedsimError(
                    f"{name} has more than {MAX_FILE_BYTES >> 20} MiB: make it smaller or remove it"
                )
            picture = Image.open(io.BytesIO(self._read(path)), formats=[_format(path) or ""])
            if picture.width * picture.height > MAX_PIXELS:
                raise FedsimError(
                    f"{name} has {picture.width}x{picture.height} pixels, more than "
                    f"{MAX_PIXELS} in all: make it smaller or remove it"
                )
            if picture.mode[0] in "IF":
                raise FedsimError(
                    f"{name} has more than 8 bits per channel (mode {picture.mode}): convert it"
                )
            return picture.convert(mode)
        except (FedsimError, MemoryError):
            raise
        except UnidentifiedImageError as error:  # its text names a buffer
            raise _unreadable(name, f"its content is not {_format(path)}") from error
        except Exception as error:  # decoders raise anything on damaged data
            raise _unreadable(name, f"{type(error).__name__}: {error}".rstrip(": ")) from error


@final
class DirectoryTree(Tree):
    """Reads files below a directory. Links are followed, to the depth asked for and no deeper."""

    def _paths(self) -> Iterator[Parts]:
        for pattern in ("*/*/*", "*/*/*/*"):
            for path in self.root.glob(pattern):
                if path.is_file():
                    yield path.relative_to(self.root).parts

    def _size(self, path: Parts) -> int:
        return self.root.joinpath(*path).stat().st_size

    def _read(self, path: Parts) -> bytes:
        return paths.content(self.root.joinpath(*path), MAX_FILE_BYTES)


@final
class ZipTree(Tree):
    """Reads members of a zip archive. zipfile reads no more of a member than its stated size."""

    def __init__(self, root: Path, archive: zipfile.ZipFile) -> None:
        super().__init__(root)
        self._archive = archive
        self._members = {
            tuple(info.filename.split("/")): info
            for info in archive.infolist()
            if not info.is_dir()
        }

    def _paths(self) -> Iterator[Parts]:
        yield from self._members

    def _size(self, path: Parts) -> int:
        return self._members[path].file_size

    def _read(self, path: Parts) -> bytes:
        return self._archive.read(self._members[path])


def _unreadable(name: str, cause: str) -> FedsimError:
    return FedsimError(f"{name} cannot be read as an image ({cause}): repair or remove it")


def _format(path: Parts) -> str | None:
    return _FORMATS.get(PurePath(path[-1]).suffix.lower())


@contextmanager
def open_tree(root: Path) -> Iterator[Tree]:
    """Opens the tree at `root`, a directory or a zip archive.

    Raises:
        FedsimError: there is neither, or too many files are in it.
    """
    if root.is_dir():
        yield DirectoryTree(root)
        return
    try:
        archive = zipfile.ZipFile(paths.regular(root, paths.ARCHIVE))
    except (OSError, NotImplementedError, ValueError, zipfile.BadZipFile) as error:
        raise FedsimError(
            f"{root} is neither a directory nor a readable zip archive ({error}): correct `path`"
        ) from error
    with archive:
        yield ZipTree(root, archive)
