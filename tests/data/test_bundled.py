"""The bundled sources: real images, always the same, split without overlap."""

import socket

import pytest
import torch

from fedsim.data.bundled import Digits, Faces, Photos
from fedsim.data.images import statistics

SOURCES = {"faces": Faces, "digits": Digits, "photos": Photos}
EXPECTED = {
    # (train, test, channels, classes)
    "faces": (160, 40, 1, 2),
    "digits": (1438, 359, 1, 10),
    "photos": (256, 64, 3, 8),
}


@pytest.fixture(scope="module")
def loaded():
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_):
            raise AssertionError("a bundled source reached for the network")

        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        return {name: cls().load() for name, cls in SOURCES.items()}


@pytest.mark.parametrize("name", SOURCES)
def test_shapes_types_and_normalization(name, loaded):
    data = loaded[name]
    train, test, channels, classes = EXPECTED[name]
    assert data.name == name
    assert data.train_images.shape == (train, channels, 32, 32)
    assert data.test_images.shape == (test, channels, 32, 32)
    assert data.train_images.dtype == data.test_images.dtype == torch.uint8
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert len(data.classes) == classes
    assert data.input_spec.input_shape == (channels, 32, 32)
    for labels in (data.train_labels, data.test_labels):
        assert labels.unique().tolist() == list(range(classes))
    measured = statistics(data.train_images)
    for declared, expected in zip((data.mean, data.std), measured, strict=True):
        assert declared == pytest.approx(expected, abs=0.015), "about right"
        assert declared == tuple(round(value, 2) for value in declared), "and no image's doing"
    assert data.private_statistics == ()


@pytest.mark.parametrize("name", SOURCES)
def test_train_and_test_share_no_image(name, loaded):
    data = loaded[name]
    train = {image.numpy().tobytes() for image in data.train_images}
    shared = [image for image in data.test_images if image.numpy().tobytes() in train]
    # lfw_subset holds a few backgrounds that are wholly black.
    assert all(float(image.float().std()) == 0 for image in shared)


@pytest.mark.parametrize("name", SOURCES)
def test_loading_twice_gives_the_same_bytes(name, loaded):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = SOURCES[name]().load()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again.train_images, loaded[name].train_images)
    assert torch.equal(again.test_images, loaded[name].test_images)
    assert torch.equal(again.train_labels, loaded[name].train_labels)
    assert again.mean == loaded[name].mean


def test_faces_are_faces(loaded):
    """The mean face has eyes, darker than forehead and cheeks; the mean of the others has none."""
    data = loaded["faces"]
    assert data.classes == ("face", "not face")

    def depth_of_eyes(images, labels, label):
        mean = images[labels == label].double().mean((0, 1)) / 255
        forehead, eyes, cheeks = (mean[top : top + 3] for top in (3, 9, 15))
        return [
            float(min(forehead[:, side].mean(), cheeks[:, side].mean()) - eyes[:, side].mean())
            for side in (slice(6, 10), slice(17, 21))
        ]

    for images, labels in (
        (data.train_images, data.train_labels),
        (data.test_images, data.test_labels),
    ):
        assert min(depth_of_eyes(images, labels, 0)) > 0.1
        assert max(depth_of_eyes(images, labels, 1)) < 0.05


def test_photos_are_crops_of_the_photographs_that_do_not_overlap(loaded):
    import skimage.data
    from PIL import Image

    data = loaded["photos"]
    whole = Image.fromarray(skimage.data.astronaut()).resize((224, 224), Image.Resampling.BICUBIC)
    tiles = {
        whole.crop((x, y, x + 32, y + 32)).tobytes(): (x, y)
        for y in range(0, 224, 32)
        for x in range(0, 224, 32)
    }
    label = data.classes.index("astronaut")
    train, test = (
        [tiles[image.permute(1, 2, 0).contiguous().numpy().tobytes()] for image in images]
        for images in (
            data.train_images[data.train_labels == label],
            data.test_images[data.test_labels == label],
        )
    )
    assert len(set(train + test)) == len(train) + len(test) == 40
    assert train == sorted(train, key=lambda place: place[::-1])
