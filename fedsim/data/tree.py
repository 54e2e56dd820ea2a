"""Reads a tree of image files, in a directory or inside a zip archive; extracts nothing."""

from __future__ import annotations

import io
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
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
_NOT_READ = {".heic": "HEIC", ".heif": "HEIC", ".avif": "AVIF", ".svg": "SVG"}
"""Picture formats that are not read, by suffix; the remedy is to convert the files."""
BELOW = "in a folder below a class's"
"""Reason given for an image that lies deeper than its class's folder."""
Parts = tuple[str, ...]
"""A path relative to the root, such as `("train", "cat", "0001.jpg")`."""

_USED_BITS = 14
"""A 16-bit colour picture with no more bits in use is assumed to be of lower depth, not dark."""
MAX_FILE_BYTES = 1 << 26
"""Maximum size of an image file, in bytes."""
MAX_PIXELS = 1 << 25
"""Maximum number of pixels of an image."""


class UnreadableError(FedsimError):
    """Raised for an unusable image file; `reason` is why, in words that many files can share."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Tree(ABC):
    """Base of trees of image files below `root`; `open_tree` opens a directory or a zip archive.

    A path is a tuple of its parts, as `("train", "cat", "1.jpg")`. A file is visible unless its
    name or a folder's begins with a dot or `__MACOSX`.
    """

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
        """Returns the name of the file at `path` for messages, as `root:train/cat/1.jpg`."""
        return f"{self.root}:{'/'.join(path)}"

    @final
    def images(self) -> list[Parts]:
        """Returns the paths of visible files with an image's suffix, sorted."""
        return sorted(path for path in self._paths() if _format(path) and _is_visible(path))

    @final
    def left_out(
        self, used: Container[Parts], depth: Callable[[Parts], int] | None
    ) -> Iterator[tuple[Parts, str]]:
        """Yields (path, reason) of visible files that are not among the paths `used`.

        `depth` returns, for a path, the number of parts that a used one would have there. At
        another depth only images are yielded; None takes every depth.
        """
        for path in self._paths():
            if path in used or not _is_visible(path):
                continue
            beyond = 0 if depth is None else len(path) - depth(path)
            if not beyond:
                yield path, _why_left_out(path)
            elif _format(path):
                yield path, BELOW if beyond > 0 else "in no class's folder"

    @final
    def has(self, path: Parts) -> bool:
        """Returns whether there is a file at `path`, which no link leads out of the root."""
        return all(part not in ("", ".", "..") for part in path) and self._has(path)

    @final
    def reads(self, path: Parts) -> bool:
        """Returns whether the suffix of `path` is that of an image format that is read."""
        return bool(path) and _format(path) is not None

    @abstractmethod
    def _has(self, path: Parts) -> bool:
        """Returns whether there is such a file, given parts that climb nowhere."""

    @final
    def text(self, path: Parts) -> str:
        """Reads a UTF-8 file; a FedsimError if it is missing, over 64 MiB, or no text."""
        name = self.name(path)
        if not self.has(path):
            raise FedsimError(f"{name}: there is no such file: correct `labels`")
        try:
            if self._size(path) > MAX_FILE_BYTES:
                raise FedsimError(f"{name} has more than {MAX_FILE_BYTES >> 20} MiB")
            return self._read(path).decode("utf-8-sig")
        except FedsimError:
            raise
        except Exception as error:  # archives raise anything on damaged data
            raise FedsimError(
                f"{name} cannot be read as text in UTF-8 ({error}): save it so"
            ) from error

    @final
    def image(self, path: Parts, mode: str, bits: int | None = None) -> Image:
        """Decodes an image, upright as EXIF says and laid over white, to Pillow mode `L` or `RGB`.

        `bits` is the number of bits that a 16-bit PNG uses per channel; without it a grey or nearly
        black one is refused, as are other formats of over 8 bits. An UnreadableError says so, or
        that a file is missing, empty, damaged, over 64 MiB or over 2^25 pixels.
        """
        from PIL import Image, ImageOps, UnidentifiedImageError

        name = self.name(path)
        try:
            if self._size(path) > MAX_FILE_BYTES:
                most = f"more than {MAX_FILE_BYTES >> 20} MiB"
                raise UnreadableError(f"{name} has {most}: make it smaller or remove it", most)
            if self._size(path) == 0:
                raise _unreadable(name, "it is empty", "empty (0 bytes)")
            content = self._read(path)
            # Image.open reads the header alone: a picture that unpacks to gigabytes is refused.
            picture: Image.Image = Image.open(io.BytesIO(content), formats=[_format(path) or ""])
            if picture.width * picture.height > MAX_PIXELS:
                raise UnreadableError(
                    f"{name} has {picture.width}x{picture.height} pixels, more than "
                    f"{MAX_PIXELS} in all: make it smaller or remove it",
                    f"more than {MAX_PIXELS:,} pixels",
                )
            # Modes I and F have over 8 bits; colour of 16 bits has mode RGB, its lower halves cut.
            if picture.mode[0] in "IF" or _is_cut(picture):
                picture = _of_16_bits(name, content, picture, bits)
            upright = ImageOps.exif_transpose(picture)
            if upright.has_transparency_data:
                shown = upright.convert("RGBA")
                white = Image.new("RGBA", shown.size, "white")
                return Image.alpha_composite(white, shown).convert("RGB").convert(mode)
            return upright.convert(mode)
        except (FedsimError, MemoryError):
            raise
        except UnidentifiedImageError as error:  # its text names a buffer
            cause = f"its content is not {_format(path)}"
            raise _unreadable(name, cause, "no image of the kind that its name says") from error
        except Exception as error:  # decoders raise anything on damaged data
            cause = f"{type(error).__name__}: {error}".rstrip(": ")
            raise _unreadable(name, cause, "damaged or cut off") from error


@final
class _DirectoryTree(Tree):
    """Reads files below a directory. Links are followed, to the fourth level and no deeper."""

    def _paths(self) -> Iterator[Parts]:
        for pattern in ("*", "*/*", "*/*/*", "*/*/*/*"):
            for path in self.root.glob(pattern):
                if path.is_file():
                    yield path.relative_to(self.root).parts
        # Deeper files are walked as well, since a report tells which images were left out.
        for path in self.root.glob("*/*/*/*/"):
            for folder, _, names in os.walk(path):  # which follows no links
                for name in names:
                    yield (Path(folder) / name).relative_to(self.root).parts

    def _has(self, path: Parts) -> bool:
        place = self.root.joinpath(*path)
        inside = place.resolve().is_relative_to(self.root.resolve())
        return inside and place.is_file()

    def _size(self, path: Parts) -> int:
        return self.root.joinpath(*path).stat().st_size

    def _read(self, path: Parts) -> bytes:
        return paths.content(self.root.joinpath(*path), MAX_FILE_BYTES)


@final
class _ZipTree(Tree):
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

    def _has(self, path: Parts) -> bool:
        return path in self._members

    def _size(self, path: Parts) -> int:
        return self._members[path].file_size

    def _read(self, path: Parts) -> bytes:
        return self._archive.read(self._members[path])


def _is_cut(picture: Image) -> bool:
    """Whether Pillow would drop the lower 8 of 16 bits per channel."""
    # In a BMP, 16 are the bits of all channels together.
    return picture.format in ("PNG", "TIFF") and any(
        ";16" in str(tile[3]) for tile in getattr(picture, "tile", ())
    )


def _of_16_bits(name: str, content: bytes, picture: Image, bits: int | None) -> Image:
    """Converts a PNG of 16 bits per channel to 8 bits, scaled so that `bits` of them are full."""
    import torch
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_png

    grey = picture.mode[0] in "IF"
    if picture.format != "PNG" or (grey and bits is None):
        more = (
            "; or declare `bits`, as of a scanner: 10, 12 or 16" if picture.format == "PNG" else ""
        )
        raise UnreadableError(
            f"{name} has more than 8 bits per channel (mode {picture.mode}): convert it{more}",
            "more than 8 bits per channel",
        )
    encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    values = decode_png(encoded, ImageReadMode.UNCHANGED).to(torch.int32)
    channels = len(values)
    # With 2 or 4 channels the last is alpha, which spans all 16 bits whatever the scanner gives.
    colour = values[: channels - 1 + channels % 2]
    used = int(colour.max()).bit_length()
    if used > (bits or 16) or (bits is None and 0 < used <= _USED_BITS):
        raise UnreadableError(
            f"{name} has 16 bits per channel, of which it uses {used}"
            f"{f', more than `bits: {bits}` says' if bits else ''}: declare how many the scanner "
            f"gives (`bits: {max(used, 12)}`, say), or convert it to 8",
            "of 16 bits per channel, of which others are in use than is said",
        )
    # Half the divisor is added before an integer division, which then rounds to the nearest.
    largest = (1 << (bits or 16)) - 1
    colour = (colour * 255 + largest // 2) // largest
    alpha = (values[len(colour) :] * 255 + 32767) // 65535
    pixels = torch.cat([colour, alpha]).to(torch.uint8).permute(1, 2, 0)
    made = Image.fromarray(pixels.squeeze(2).contiguous().numpy())
    # decode_png drops the orientation, by which `image` turns the picture afterwards.
    made.info["exif"] = picture.getexif().tobytes()
    return made


def _unreadable(name: str, cause: str, reason: str) -> UnreadableError:
    return UnreadableError(
        f"{name} cannot be read as an image ({cause}): repair or remove it", reason
    )


def _is_visible(path: Parts) -> bool:
    return not any(part == "" or part.startswith((".", "__MACOSX")) for part in path)


def _why_left_out(path: Parts) -> str:
    suffix = PurePath(path[-1]).suffix.lower()
    if kind := _NOT_READ.get(suffix):
        return f"{kind}, which is not read: convert to JPEG or PNG"
    return "not asked for" if suffix in _FORMATS else "no image by its name"


def _format(path: Parts) -> str | None:
    return _FORMATS.get(PurePath(path[-1]).suffix.lower())


@contextmanager
def open_tree(root: Path) -> Iterator[Tree]:
    """Opens the tree at `root` for the `with` block; a FedsimError if it is no directory or zip."""
    if root.is_dir():
        yield _DirectoryTree(root)
        return
    try:
        archive = zipfile.ZipFile(paths.regular(root, paths.ARCHIVE))
    except (OSError, NotImplementedError, ValueError, zipfile.BadZipFile) as error:
        raise FedsimError(
            f"{root} is neither a directory nor a readable zip archive ({error}): correct `path`"
        ) from error
    with archive:
        yield _ZipTree(root, archive)
