"""What the server and those who collude with it see tells of honest vectors no more than their sum.

The masks are pseudorandom; what is tested is that their seeds are not among what is seen.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2
from sum_support import Sum, of, vectors

from fedsim.federation.secure_aggregation import secrets
from fedsim.federation.secure_aggregation.secrets import SHARE
from fedsim.federation.secure_aggregation.terms import AbortedError, Ring

_COUNT, _LENGTH = 7, 50
_COLLUDING = (0, 1, 2, 3)
"""t - 1 of them, with t = 5."""
_HONEST = (4, 5, 6)


def _seen(inputs: dict[int, Ring], moved: Ring | None, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """All that the server and the colluding clients have seen, as bytes.

    With `moved`, the common mask of the honest clients 4 and 5 is another one by that much: it is
    as likely, and nobody but they could tell.
    """
    streams = [np.random.default_rng(who) for who in range(_COUNT)]
    own = [
        {purpose: stream.bytes(32) for purpose in ("sealing", "masking", "seed")}
        for stream in streams
    ]
    sum = Sum(of(_COUNT, 5 / 7), inputs, secret=lambda client, purpose: own[client][purpose])
    sum.keys()
    pair = {one: sum.directory[one].masking for one in (4, 5)}
    common = secrets.agree_key(own[4]["masking"], 5, pair, "mask", sum.terms.session)
    honest_mask = secrets.add_mask

    def mask(vector: Ring, key: bytes, sign: int) -> None:
        honest_mask(vector, key, sign)
        if key == common and moved is not None:
            vector -= moved if sign > 0 else -moved

    # Shamir's polynomials and signatures are drawn anew each time; what is compared is the rest.
    monkeypatch.setattr(secrets, "add_mask", mask)
    sum.shares()
    sum.mask()
    held = {number: dict(sum.clients[number].memory.held) for number in _COLLUDING}
    keys = {
        number: {purpose: secret.hex() for purpose, secret in own[number].items()}
        for number in _COLLUDING
    }
    sum.agree()
    answers = sum.unmask()
    monkeypatch.setattr(secrets, "add_mask", honest_mask)
    for number in _HONEST:
        shares = [
            bytes.fromhex(mine[str(number)])[SHARE:]
            for mine in held.values()
            if str(number) in mine
        ]
        assert len(shares) == len(_COLLUDING)  # one fewer than reveal a key
        assert secrets.join_shares(shares) != own[number]["masking"]
        for two in answers.values():
            assert two[number] not in shares  # nobody gave up a share of a survivor's key
    total = sum.server.reveal(answers)
    seeds = {
        n: secrets.join_shares([a[n] for a in list(answers.values())[:5]]).hex() for n in _HONEST
    }
    view = {
        "keys": {n: one.to_bytes()[:96].hex() for n, one in sum.directory.items()},
        "colluding": keys,
        "vectors": {n: vector.tobytes().hex() for n, vector in sum.sent.items()},
        "seeds": seeds,
        "sum": total.tobytes().hex(),
    }
    return json.dumps(view, sort_keys=True).encode()


def test_two_inputs_of_one_sum_give_one_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every other honest input of the same sum there are masks that make the view the same."""
    inputs = vectors(_COUNT, _LENGTH)
    moved = np.random.default_rng(9).integers(0, 2**32, _LENGTH, dtype=np.uint32)
    others = {**inputs, 4: inputs[4] + moved, 5: inputs[5] - moved}
    assert _seen(inputs, None, monkeypatch) == _seen(others, moved, monkeypatch)


def test_inputs_of_another_sum_give_another_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the comparison sees a difference of 1 in one number."""
    inputs = vectors(_COUNT, _LENGTH)
    others = {**inputs, 4: inputs[4].copy()}
    others[4][0] += np.uint32(1)
    assert _seen(inputs, None, monkeypatch) != _seen(others, None, monkeypatch)


def test_fewer_shares_than_the_threshold_give_another_secret() -> None:
    secret = bytes(range(32))
    shares = secrets.split(secret, 5, 7)
    assert secrets.join_shares(shares[:5]) == secret == secrets.join_shares(shares[2:])
    assert secrets.join_shares(shares[:4]) != secret


def _uniform(content: bytes) -> tuple[float, float]:
    """(p of the bytes' frequencies, largest |z| of the 32 bits of each number)."""
    octets = np.frombuffer(content, np.uint8)
    expected = len(octets) / 256
    statistic = float(((np.bincount(octets, minlength=256) - expected) ** 2 / expected).sum())
    bits: NDArray[np.uint8] = np.unpackbits(octets).reshape(-1, 32)
    z = (bits.mean(0) - 0.5) * 2 * np.sqrt(len(bits))
    return float(chi2.sf(statistic, 255)), float(np.abs(z).max())


def test_masked_bytes_are_uniform() -> None:
    """400,000 numbers: a bit that is 1 with 0.505 stands out at 6.3 standard deviations.

    It is found with a chance above 0.96; by chance one in 10,000 runs would fail, and the keys are
    fixed.
    """
    length = 400_000
    inputs = {client: np.zeros(length, np.uint32) for client in range(5)}
    keys = np.random.default_rng(4)
    sum = Sum(of(5), inputs, secret=lambda *_: keys.bytes(32))
    sum.through(3)
    for vector in sum.sent.values():
        p, z = _uniform(vector.tobytes())
        assert p > 1e-5 and z < 4.6
    # Seen to fail: one bit in a hundred numbers is stuck at 1.
    biased = sum.sent[0].copy()
    biased[::100] |= np.uint32(1 << 7)
    assert _uniform(biased.tobytes())[1] > 4.6 or _uniform(biased.tobytes())[0] < 1e-5


def test_what_two_agree_on_is_of_one_session_and_one_purpose() -> None:
    one, other = bytes(range(32)), bytes(range(1, 33))
    keys = {0: secrets.public_of(one), 1: secrets.public_of(other)}
    found = {
        secrets.agree_key(one, 1, keys, purpose, session)
        for purpose in ("mask", "shares 0 1", "shares 1 0")
        for session in (b"first", b"second")
    }
    assert len(found) == 6
    assert secrets.agree_key(other, 0, keys, "mask", b"first") in found
    others = {0: keys[0], 2: keys[1]}
    assert secrets.agree_key(one, 2, others, "mask", b"first") not in found, "of whom it is, too"


def test_a_sum_below_the_quorum_keeps_its_masks() -> None:
    sum = Sum(of(5, 4 / 5), vectors(5, 10)).through(4)
    answers = sum.unmask()
    few = {client: answers[client] for client in (0, 1, 2)}
    with pytest.raises(AbortedError, match="3 clients gave shares, 4 are needed"):
        sum.server.reveal(few)
