"""Rule 22: no stream of the clients or of the truth follows from what an attacker is handed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import kstest, norm
from tiny import tiny_scenario

import fedsim
from fedsim import rng
from fedsim.attacking.jobs import seed_of
from fedsim.recording.files import load_observation, save_observation
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.types import Observation, Tensors

pytestmark = pytest.mark.usefixtures("attacks_here")

NOISY: dict[str, Any] = {
    "gaussian": [{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 1.0}],
    "dp_sgd": [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 1.0}],
}
SCENARIO = tiny_scenario(training__local={"batch_size": 2}, defenses=NOISY)


def recorded(stack: str, seed: int, folder: Path) -> tuple[Observation, Tensors, Path]:
    """What is recorded of client 0, its update, and the sidecar."""
    world = Workload(resolve({**SCENARIO, "seed": seed}), stack)
    start = world.initial()
    update = world.client_update(0, 1, *start, {}).update
    path = save_observation(world.observation(1, 0, update, *start), folder)
    return load_observation(path), update.tensors, path


@pytest.mark.parametrize("stack", NOISY)
@pytest.mark.parametrize("seed", [0, 7, 2**62 + 1])
def test_what_is_recorded_has_no_scenario_seed(stack: str, seed: int, tmp_path: Path) -> None:
    seen, _, path = recorded(stack, seed, tmp_path / "one")
    other, _, there = recorded(stack, seed + 1, tmp_path / "other")
    assert seed_of(seen, "any") == seed_of(other, "any")
    texts = [json.loads(file.read_text(encoding="utf-8")) for file in (path, there)]
    different = {name for name in texts[0] if texts[0][name] != texts[1][name]}
    assert texts[0].keys() == texts[1].keys()
    assert different <= {"update_sha256", "global_sha256"}


@pytest.mark.parametrize("stack", NOISY)
def test_noise_cannot_be_drawn_again_from_a_recording(stack: str, tmp_path: Path) -> None:
    """As it could where the recording held the seed, of which the noise is a stream."""
    secret = 123456789
    seen, update, _ = recorded(stack, secret, tmp_path)
    flat = torch.cat([value.flatten() for value in update.values()]).double()

    def likeness(seed: int) -> float:
        stream = rng.generator(seed, "defense", seen.round, seen.client)
        drawn = torch.cat([rng.normal(value.shape, stream).flatten() for value in update.values()])
        return abs(float(torch.corrcoef(torch.stack([flat, drawn.double()]))[0, 1]))

    assert likeness(secret) > 0.9, "who knows the scenario's seed draws it, as record.json says"
    for handed in (seen.seed, seed_of(seen, "any"), 0):
        assert likeness(handed) < 0.2


def test_a_stream_fills_the_whole_state() -> None:
    """624 words of 32 bits, of which a seed of 32 bits reaches one state in 2^19936."""
    state = rng.generator(0, 1).get_state().numpy()
    words = state[24 : 24 + 8 * 624].view("<u8")
    digest = hashlib.shake_256(b"fedsim stream\0[0, 1]").digest(4 * 624)
    assert words.tolist() == np.frombuffer(digest, "<u4").tolist()
    drawn = torch.randint(2**31, (100_000,), generator=rng.generator(0, 1)).double() / 2**31
    assert kstest(drawn.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(
        torch.randn(9, generator=rng.generator(0, 1)), torch.randn(9, generator=rng.generator(0, 1))
    )


def test_the_record_says_that_the_noise_protects_nobody(tmp_path: Path) -> None:
    asked = {"attacks": ["label_inference"], "observe": {"batch_sizes": [1]}}
    run = fedsim.run({**SCENARIO, **asked}, out=tmp_path / "out", workers=1)
    record = json.loads((run.out / "record.json").read_text(encoding="utf-8"))
    assert "protects nobody" in record["notes"]["noise"]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (200, 100)])
def test_noise_has_its_shape_and_its_law(shape: tuple[int, ...]) -> None:
    drawn = rng.normal(shape, rng.generator(1, "law"))
    share = rng.uniform(shape, rng.generator(2, "law"))
    coins = rng.signs(shape, rng.generator(3, "law"))
    assert drawn.shape == share.shape == coins.shape == shape
    assert (drawn.dtype, share.dtype, coins.dtype) == (torch.float32, *2 * [torch.float64])
    if drawn.numel() > 1000:
        assert kstest(drawn.flatten().double().numpy(), "norm").pvalue > 1e-3
        assert kstest(share.flatten().numpy(), "uniform").pvalue > 1e-3
        assert 0 < float(share.min()) < float(share.max()) < 1
        assert set(coins.unique().tolist()) == {-1.0, 1.0}
        assert abs(float(coins.mean())) < 5 / drawn.numel() ** 0.5


def test_noise_is_that_of_the_cipher() -> None:
    """Known answer: AES-256 in counter mode from 0, under the digest of the path."""
    key = hashlib.sha256(b'fedsim noise\0[7, "x", 1]').digest()
    blocks = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
    stream = b"".join(blocks.update(i.to_bytes(16, "big")) for i in range(4))
    shares = [(int(word) // 2**11 + 0.5) / 2**53 for word in np.frombuffer(stream, "<u8")]
    drawn = rng.normal((8,), rng.generator(7, "x", 1), torch.float64)
    assert drawn.tolist() == pytest.approx(norm.ppf(shares).tolist(), rel=1e-12)


def test_a_secret_stream_is_another_one_each_time() -> None:
    first, second = (rng.normal((100,), rng.Stream.secret()) for _ in range(2))
    assert not torch.equal(first, second)


def test_other_draws_do_not_move_the_noise() -> None:
    """What is drawn for batches or masks is another stream, and tells nothing of it."""
    plain, used = rng.generator(1, "a"), rng.generator(1, "a")
    torch.randn(1000, generator=used)
    assert torch.equal(rng.normal((50,), plain), rng.normal((50,), used))


def test_the_withheld_row_follows_from_the_whole_truth() -> None:
    """And so from nothing that an attack is handed."""
    rows = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = rows.clone()
    other[3, 1] += 1e-9
    first, again, second = (rng.of_bytes(t.numpy().tobytes()) for t in (rows, rows.clone(), other))
    assert first == again != second


def test_streams_are_fixed_across_processes_and_versions() -> None:
    assert rng.derive(7, "batch", 1, 0) == 6937260939950972246
    assert rng.derive(7, "batch", 1, 0) != rng.derive(7, "batch", 10)
    assert rng.derive(7, "a", "b") != rng.derive(7, "ab")
    assert rng.derive(7, 1) != rng.derive(7, "1")


@pytest.mark.parametrize("byte", [0, 255])
def test_the_ends_of_the_interval_are_never_drawn(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be an infinite noise."""
    monkeypatch.setattr(rng.Stream, "keystream", lambda self, count: bytes([byte]) * count)
    stream = rng.generator(7, "x")
    assert 0 < float(rng.uniform((1,), stream)) < 1
    assert rng.normal((1,), stream, torch.float64).isfinite().all()


def test_the_global_stream_is_restored() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    with rng.global_stream(5):
        first = torch.randn(3)
    assert torch.equal(torch.randn(3), expected)
    with rng.global_stream(5):
        assert torch.equal(torch.randn(3), first)
