"""Image folders: the same from a directory and from a zip, and safe on bad archives."""

import io
import shutil
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim.data import tree
from fedsim.data.folder import ImageFolder
from fedsim.data.images import statistics
from fedsim.types import FedsimError


def png(colour, size=(6, 6), mode="RGB", kind="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind)
    return buffer.getvalue()


FILES = {
    "train/b/2.png": png((20, 0, 0)),
    "train/b/10.png": png((10, 0, 0)),
    "train/a/x.PNG": png((1, 2, 3)),
    "train/a/y.bmp": png((4, 5, 6), kind="BMP"),
    "test/a/z.png": png((7, 8, 9)),
    "test/b/z.png": png((0, 0, 255)),
    "train/a/notes.txt": b"not an image",
    "train/a/.hidden.png": b"not an image",
    "train/stray.png": b"not in a class",
    "__MACOSX/train/a/x.PNG": b"not an image",
}


def write_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in reversed(list(files.items())):
            archive.writestr(name, content)
    return str(path)


def write_directory(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return str(path)


@pytest.fixture(params=[write_zip, write_directory], ids=["zip", "directory"])
def write(request, tmp_path):
    def written(files):
        path = tmp_path / "set.zip"
        if path.is_dir():
            shutil.rmtree(path)
        return request.param(path, files)

    return written


def test_classes_order_pixels_and_normalization(write):
    data = ImageFolder(path=write(FILES)).load()
    assert data.classes == ("a", "b")
    assert data.train_labels.tolist() == [1, 1, 0, 0]
    # By name, whatever the class: "10.png" before "2.png".
    assert data.train_images[:, :, 0, 0].tolist() == [[10, 0, 0], [20, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert not data.placed_by_label
    assert data.test_images[:, :, 3, 3].tolist() == [[7, 8, 9], [0, 0, 255]]
    assert data.train_images.shape == (4, 3, 6, 6)
    assert data.train_images.dtype == torch.uint8
    assert (data.mean, data.std) == ((0.5,) * 3, (0.25,) * 3)
    assert data.private_statistics == ()
    assert data.client_of is None


def test_normalization_by_the_training_images_is_asked_for_and_declared(write):
    path = write(FILES)
    data = ImageFolder(path=path, normalization="training").load()
    assert (data.mean, data.std) == statistics(data.train_images)
    assert any("mean and std" in what for what in data.private_statistics)
    with pytest.raises(ValueError, match="mean and std are declared"):
        ImageFolder(path=path, normalization="training", mean=(0.5,) * 3, std=(0.2,) * 3)


def test_grey_and_given_normalization(write):
    path = write(FILES)
    data = ImageFolder(path=path, channels=1, mean=(0.5,), std=(0.25,)).load()
    assert data.train_images.shape == (4, 1, 6, 6)
    assert (data.mean, data.std) == ((0.5,), (0.25,))
    for wrong in ({"mean": (0.5,)}, {"mean": (0.5,), "std": (0.0,)}, {"std": (1.0, 1.0)}):
        with pytest.raises(ValueError, match=r"mean|std"):
            ImageFolder(path=path, channels=1, **wrong)


def test_size_scales_and_cuts_at_the_centre(write):
    picture = Image.new("RGB", (20, 10), (255, 0, 0))
    picture.paste((0, 255, 0), (5, 0, 15, 10))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    files = {"train/a/wide.png": buffer.getvalue(), "test/a/small.png": png((9, 9, 9))}
    path = write(files)
    data = ImageFolder(path=path, size=8).load()
    assert data.train_images.shape == data.test_images.shape == (1, 3, 8, 8)
    assert data.train_images[0, :, :, 2:6].float().mean((1, 2)).tolist() == [0, 255, 0]
    with pytest.raises(FedsimError, match=r"small\.png has 6x6.*10x20.*set `size`"):
        ImageFolder(path=path).load()


def test_client_folders_name_the_natural_clients(write):
    files = {
        "train/zoe/a/1.png": png((1, 0, 0)),
        "train/ann/b/1.png": png((2, 0, 0)),
        "train/ann/a/1.png": png((3, 0, 0)),
        "train/ann/a/2.png": png((4, 0, 0)),
        "test/a/1.png": png((5, 0, 0)),
    }
    data = ImageFolder(path=write(files), client_folders=True, limit=1).load()
    assert data.train_images[:, 0, 0, 0].tolist() == [3, 2, 1]
    assert data.client_of.tolist() == [0, 0, 1]
    assert data.train_labels.tolist() == [0, 1, 0]
    assert data.placed_by_label


def test_a_member_with_a_wrong_checksum_is_named(tmp_path):
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    content = bytearray(path.read_bytes())
    content[content.index(FILES["train/b/10.png"]) + 60] ^= 1
    path.write_bytes(content)
    with pytest.raises(FedsimError, match=r"train/b/10\.png cannot be read.*CRC"):
        ImageFolder(path=str(path)).load()


def test_neither_directory_nor_zip(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"not a zip")
    for path in ("x.zip", "absent"):
        with pytest.raises(FedsimError, match="correct `path`"):
            ImageFolder(path=str(tmp_path / path)).load()


def test_names_that_climb_out_are_never_read(tmp_path):
    (tmp_path / "secret.png").write_bytes(png((99, 99, 99)))
    climbing = {
        "../secret.png": png(0),
        "train/../secret.png": png(0),
        "/train/a/abs.png": png(0),
        "train//a.png": png(0),
    }
    path = write_zip(tmp_path / "set.zip", {**climbing, **FILES})
    before = sorted(tmp_path.rglob("*"))
    assert len(ImageFolder(path=path).load().train_images) == 4
    assert sorted(tmp_path.rglob("*")) == before


def test_a_large_picture_is_refused_before_it_is_decoded(write, monkeypatch):
    """64 million pixels in 8 kB: the size in the header is enough to refuse it."""
    header_only = png(0, size=(8000, 8000), mode="1")
    monkeypatch.setattr(Image.Image, "convert", None)
    with pytest.raises(FedsimError, match=r"bomb\.png has 8000x8000 pixels"):
        ImageFolder(path=write({"train/a/0-bomb.png": header_only, **FILES})).load()


def test_a_member_that_states_a_large_size_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "MAX_FILE_BYTES", 1000)
    files = {**FILES, "train/a/zeros.png": bytes(1 << 20)}
    path = write_zip(tmp_path / "set.zip", files)
    read = zipfile.ZipFile.read

    def watched(archive, member):
        assert member.file_size <= 1000
        return read(archive, member)

    monkeypatch.setattr(zipfile.ZipFile, "read", watched)
    with pytest.raises(FedsimError, match=r"zeros\.png has more than"):
        ImageFolder(path=path).load()


PHOTOS = {
    f"{name}/{index}.png": png((index, value, 0))
    for name, value in (("cat", 100), ("dog", 200))
    for index in range(30)
}


def test_class_folders_are_split_by_the_digests_of_names(write):
    data = ImageFolder(path=write(PHOTOS)).load()
    assert data.classes == ("cat", "dog")
    assert len(data.train_labels) + len(data.test_labels) == 60
    assert 4 <= len(data.test_labels) <= 20
    held_out = set(data.test_images[:, 0, 0, 0].tolist())
    assert held_out.isdisjoint(data.train_images[:, 0, 0, 0].tolist()), "by names, not by classes"
    fewer = {name: content for name, content in PHOTOS.items() if not name.endswith("/3.png")}
    again = ImageFolder(path=write(fewer)).load()
    assert set(again.test_images[:, 0, 0, 0].tolist()) == held_out - {3}, "no image moves another"


def test_the_share_to_test_on_is_kept_to_and_refused_beside_splits(write):
    more = ImageFolder(path=write(PHOTOS), test_share=0.6).load()
    assert 24 <= len(more.test_labels) <= 48
    with pytest.raises(FedsimError, match=r"test_share.*none is left to train"):
        ImageFolder(path=write({"cat/0.png": png(0)}), test_share=0.99).load()
    with pytest.raises(FedsimError, match=r"test_share.*has folders train and test"):
        ImageFolder(path=write(FILES), test_share=0.5).load()


def rows_of(lines):
    return "\n".join(["file,label", *lines]).encode()


FLAT = {f"IMG_{index}.png": png((index, 0, 0)) for index in range(20)}


def test_a_csv_names_the_labels(write):
    rows = [f'"./{name}", {"odd" if index % 2 else "even"}' for index, name in enumerate(FLAT)]
    files = {**FLAT, "labels.csv": rows_of(rows), "IMG_99.png": png(0)}
    data = ImageFolder(path=write(files), labels="labels.csv").load()
    assert data.classes == ("even", "odd") and not data.placed_by_label
    for images, labels in (
        (data.train_images, data.train_labels),
        (data.test_images, data.test_labels),
    ):
        assert (images[:, 0, 0, 0].long() % 2).tolist() == labels.tolist()
    assert data.left_out == (("not asked for", 1),)


def without(split):
    return {name: content for name, content in FILES.items() if not name.startswith(split)}


def labelled(row):
    return {**FLAT, "labels.csv": rows_of(["IMG_0.png,a", "IMG_2.png,b", row])}


DAMAGED = [b"", b"\x89PNG\r\n\x1a\n garbage", png((1, 2, 3))[:-30], png(0, kind="BMP")]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (without("train"), "no image at train/<class>/<name>"),
        (without("test"), "no image at test/<class>/<name>"),
        ({**FILES, "test/c/1.png": png(0)}, "class 'c'"),
        # The text of Pillow's error names a buffer.
        *(
            ({**FILES, "train/a/bad.png": content}, r"bad\.png cannot be read (?!.*BytesIO)")
            for content in DAMAGED
        ),
        (labelled("../secret.png,a"), r"line 4: '../secret.png' is no path within the folder"),
        (labelled("IMG_1.png"), "line 4: no label"),
        (labelled("IMG_0.png,a"), "line 4: 'IMG_0.png' is listed before"),
        (labelled('"IMG_1.png,a'), "line 4: unexpected end of data"),
        ({**FLAT, "labels.csv": b""}, "no column 'file'"),
        ({**FLAT, "labels.csv": b"file,class\n"}, "no column 'label'"),
        ({**FLAT, "labels.csv": b"\xff\xfe\x00"}, "UTF-8"),
    ],
)
def test_what_is_no_set_of_images_is_refused(write, files, said):
    labels = "labels.csv" if "labels.csv" in files else None
    with pytest.raises(FedsimError, match=said):
        ImageFolder(path=write(files), labels=labels).load()


def test_a_link_out_of_the_folder_is_no_file_of_it(tmp_path):
    (tmp_path / "secret.png").write_bytes(png((99, 99, 99)))
    root = tmp_path / "set"
    write_directory(root, {**FLAT, "labels.csv": rows_of(["IMG_0.png,a", "out.png,b"])})
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(FedsimError, match=r"line 3: there is no file 'out.png'"):
        ImageFolder(path=str(root), labels="labels.csv").load()


def test_what_is_left_out_is_counted_by_reason(write, monkeypatch):
    monkeypatch.setattr(tree, "MAX_PIXELS", 100)
    bad = {
        "cat/phone.HEIC": b"ftypheic",
        "cat/readme.txt": b"hello",
        "cat/.DS_Store": b"hidden",
        "cat/empty.jpg": b"",
        "dog/half.png": png((1, 2, 3), size=(8, 8))[:-30],
        "dog/lie.png": b"GIF89a",
        "dog/deep.png": png(40000, mode="I;16"),
        "dog/wide.png": png(0, size=(20, 20)),
    }
    path = write({**PHOTOS, **bad})
    with pytest.raises(FedsimError, match="unreadable: skip"):
        ImageFolder(path=path).load()
    data = ImageFolder(path=path, unreadable="skip").load()
    assert len(data.train_labels) + len(data.test_labels) == 60
    assert dict(data.left_out) == {
        "HEIC, which is not read: convert to JPEG or PNG": 1,
        "no image by its name": 1,
        "empty (0 bytes)": 1,
        "damaged or cut off": 1,
        "no image of the kind that its name says": 1,
        "more than 8 bits per channel": 1,
        "more than 100 pixels": 1,
    }
    assert ImageFolder(path=write(PHOTOS)).load().left_out == ()


@pytest.mark.parametrize(
    ("below", "options"),
    [
        ("cat/2019/a/b/c/1.png", {}),
        ("train/a/deep/er/x.png", {}),
        ("train/one/a/deep/x.png", {"client_folders": True}),
    ],
)
def test_images_below_a_class_are_refused_or_counted(write, below, options):
    files = {name: content for name, content in FILES.items() if "stray" not in name}
    if options:
        files = {name.replace("train/", "train/one/"): one for name, one in files.items()}
    files = PHOTOS if below.startswith("cat") else files
    files = {**files, below: png((1, 1, 1)), below.replace("1.png", "2.png"): png((2, 2, 2))}
    path = write(files)
    count = len({below, below.replace("1.png", "2.png")})
    with pytest.raises(FedsimError, match=rf"{count} images? in folders below"):
        ImageFolder(path=path, **options).load()
    data = ImageFolder(path=path, unreadable="skip", **options).load()
    assert ("in a folder below a class's", count) in data.left_out
    listed = [f"{name},x" for name in files if name.endswith("png") and "MACOSX" not in name]
    listed = [row for row in listed if "hidden" not in row]
    path = write({**files, "labels.csv": rows_of(listed)})
    data = ImageFolder(path=path, labels="labels.csv", test_share=0.4).load()
    assert len(data.train_labels) + len(data.test_labels) == len(listed)


def png_of_16_bits(values):
    """A PNG with 16 bits per channel of (height, width, channels) `values`."""
    values = np.asarray(values, dtype=">u2")
    height, width, channels = values.shape
    lines = b"".join(b"\0" + line.tobytes() for line in values)
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]

    def chunk(name, data):
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize(
    ("pixel", "bits", "seen"),
    [
        ((65535, 40000, 0), None, [255, 156, 0]),
        ((4095, 2048, 0), 12, [255, 128, 0]),
        ((4095, 2048, 0), None, None),
        ((5000, 2048, 0), 12, None),
        ((4095,), 12, [255] * 3),
        ((4095, 0, 0, 65535), 12, [255, 0, 0]),
    ],
)
def test_pictures_of_16_bits_are_scaled_or_refused(write, pixel, bits, seen):
    content = png_of_16_bits(np.broadcast_to(pixel, (6, 6, len(pixel))))
    if seen is None:
        with pytest.raises(FedsimError, match=r"`bits"):
            only(write, content, bits=bits)
        return
    assert only(write, content, bits=bits)[:, 3, 3].tolist() == seen


def test_a_csv_says_whose_an_image_is_and_what_for(write):
    rows = [
        f"IMG_{index}.png,{'ab'[index % 2]},{'test' if index > 5 else 'train'},{index % 3}"
        for index in range(8)
    ]
    head = "file,label,split,client\n"
    files = {f"IMG_{index}.png": png((index, 0, 0)) for index in range(8)}
    path = write({**files, "labels.csv": (head + "\n".join(rows)).encode()})
    data = ImageFolder(path=path, labels="labels.csv").load()
    assert data.client_of is not None
    train = list(zip(data.train_images[:, 0, 0, 0].tolist(), data.client_of.tolist(), strict=True))
    assert sorted(train) == [(index, index % 3) for index in range(6)]
    assert sorted(data.test_images[:, 0, 0, 0].tolist()) == [6, 7]
    with pytest.raises(FedsimError, match=r"test_share: .*`split`"):
        ImageFolder(path=path, labels="labels.csv", test_share=0.5).load()
    for row, said in (
        ("IMG_0.png,a,val,1", "line 2: split 'val'"),
        ("IMG_0.png,a,train,", "line 2: no client"),
        ("IMG_0.png,a,train", "line 2: no client"),
    ):
        path = write({**files, "labels.csv": (head + "\n".join([row, *rows[1:]])).encode()})
        with pytest.raises(FedsimError, match=said):
            ImageFolder(path=path, labels="labels.csv").load()
    path = write({**files, "labels.csv": (head + "\n".join(rows[:6])).encode()})
    with pytest.raises(FedsimError, match="no row of split 'test'"):
        ImageFolder(path=path, labels="labels.csv").load()
    head = "file,label,client\n"
    rows = [f"IMG_{index}.png,a,{index % 3}" for index in range(8)]
    path = write({**files, "labels.csv": (head + "\n".join(rows)).encode()})
    data = ImageFolder(path=path, labels="labels.csv", test_share=0.4).load()
    assert data.client_of is not None and len(data.test_labels)


def only(write, content, name="1.png", **more):
    files = {f"train/a/{name}": content, "test/a/z.png": png(0, size=(6, 6))}
    return ImageFolder(path=write(files), **more).load().train_images[0]


def test_photographs_are_turned_upright(write):
    picture = Image.new("RGB", (6, 6))
    picture.putpixel((5, 0), (255, 255, 255))  # at the right, above
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees, clockwise
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", exif=exif)
    shown = only(write, buffer.getvalue())
    assert shown[0, 5, 5] == 255 and shown[0, 0, 5] == 0


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [("RGBA", (0, 0, 0, 0), 255), ("RGBA", (0, 0, 0, 128), 127), ("L", 77, 77)],
)
def test_what_is_transparent_is_white(write, mode, colour, seen, channels):
    shown = only(write, png(colour, mode=mode), channels=channels)
    assert shown.unique().tolist() == [seen] and len(shown) == channels
