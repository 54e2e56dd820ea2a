"""LPIPS: right range, right size, weights from a file, and never a random or downloaded backbone.

The published weights cannot be assumed here, so the arithmetic is tested on a backbone whose
weights are drawn from a fixed seed and read from a file, as a user's would be.
"""

import hashlib

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsim import rng
from fedsim.scoring import Unavailable, load_lpips
from fedsim.scoring.image import MINIMUM_SIDE


def squeezenet():
    from torchvision.models import squeezenet1_1

    with rng.global_stream(3):
        return squeezenet1_1(weights=None).eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "squeezenet.safetensors"
    save_file(squeezenet().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def metric(weights):
    return load_lpips("squeeze", weights)


def pair(channels, side):
    stream = torch.Generator().manual_seed(5)
    a = torch.rand(3, channels, side, side, generator=stream)
    return a, (a + 0.2 * torch.rand(a.shape, generator=stream)).clamp(0, 1)


def test_backbone_is_the_one_in_the_file(metric):
    ours = metric.model.net.state_dict()
    theirs = squeezenet().state_dict()
    assert len(ours) == 50
    for name, value in ours.items():
        assert torch.equal(value, theirs[f"features.{name.partition('.')[2]}"]), name


def test_value_is_that_of_the_reference_on_minus_one_to_one(metric):
    a, b = pair(3, 40)
    with torch.no_grad():
        expected = metric.model(a, b, normalize=True).flatten()  # the package's own rescaling
    assert torch.allclose(metric(a, b).float(), expected, atol=1e-6)


def test_more_images_than_one_chunk(metric):
    a, b = pair(3, 32)
    many = metric(a.repeat(7, 1, 1, 1), b.repeat(7, 1, 1, 1))
    assert torch.allclose(many, metric(a, b).repeat(7), atol=1e-6)


def test_gray_is_repeated_and_small_images_are_enlarged(metric):
    a, b = pair(1, 25)
    enlarge = nn.Upsample(size=(MINIMUM_SIDE, MINIMUM_SIDE), mode="bilinear")
    by_hand = metric(enlarge(a).repeat(1, 3, 1, 1), enlarge(b).repeat(1, 3, 1, 1))
    assert torch.allclose(metric(a, b), by_hand, atol=1e-6)
    assert "25x25 enlarged to 32x32" in metric.describe(25, 25)
    assert "20x40 enlarged to 32x64" in metric.describe(20, 40)
    assert "enlarged" not in metric.describe(32, 48)


def test_cached_weights_are_used_only_if_their_checksum_is_the_published_one(tmp_path, monkeypatch):
    from fedsim.scoring import image

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("net"))
    assert "scoring.lpips_weights" in load_lpips("squeeze").reason

    cached = tmp_path / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
    cached.parent.mkdir()
    torch.save(squeezenet().state_dict(), cached)
    assert "checksum" in load_lpips("squeeze").reason

    digest = hashlib.sha256(cached.read_bytes()).hexdigest()[:8]
    named = cached.with_name(f"squeezenet1_1-{digest}.pth")
    cached.rename(named)
    monkeypatch.setitem(image._PUBLISHED, "squeeze", named.name)
    assert "torchvision's ImageNet weights" in load_lpips("squeeze").describe(32, 32)


class Payload:
    def __reduce__(self):
        return (eval, ("pytest_lpips_payload_ran",))


def test_unusable_weights_are_a_reason(tmp_path):
    assert "absent.pth" in load_lpips("alex", tmp_path / "absent.pth").reason
    other = tmp_path / "other.safetensors"
    save_file({"features.0.weight": torch.zeros(1)}, other)
    assert "does not hold" in load_lpips("squeeze", other).reason
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"\x00" * 20)
    assert isinstance(load_lpips("squeeze", torn), Unavailable)
    code = tmp_path / "code.pth"
    torch.save({"features.0.weight": Payload()}, code)
    assert "plain tensors" in load_lpips("squeeze", code).reason


def test_without_the_package_there_is_a_reason(weights, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lpips", None)
    assert "not installed" in load_lpips("squeeze", weights).reason


def test_loading_leaves_the_global_stream_alone(weights):
    before = torch.random.get_rng_state()
    load_lpips("squeeze", weights)
    assert torch.equal(before, torch.random.get_rng_state())
