"""What both sides of a secure sum refuse: replays, forgeries, strangers, keys that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from federation_support import identities
from sum_support import MODEL, Sum, added, fresh, of, vectors

from fedsim.federation.secure_aggregation import secrets
from fedsim.federation.secure_aggregation.client import STAGES, Memory, SumClient
from fedsim.federation.secure_aggregation.secrets import BOX, Published
from fedsim.federation.secure_aggregation.terms import AbortedError, Terms
from fedsim.types import FedsimError


def _at(stage: int, count: int = 4) -> Sum:
    """A sum after so many stages; of four clients, three are its quorum."""
    return Sum(of(count), vectors(count, 6)).through(stage)


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("keys", lambda sum, one: one.keys(fresh)),
        ("shares", lambda sum, one: one.shares(sum.directory)),
        ("masked", lambda sum, one: one.mask(sum.server.boxes_for(0), sum.inputs[0].copy, MODEL)),
        ("agree", lambda sum, one: one.agree(sum.server.survivors, [], sum.server.signatures)),
        ("unmask", lambda sum, one: one.unmask(sum.server.agreed)),
    ],
)
@pytest.mark.parametrize("done", range(6))
def test_a_stage_is_answered_once_and_in_its_turn(
    name: str, ask: Callable[[Sum, SumClient], object], done: int
) -> None:
    sum = _at(4)
    if done == 5:
        sum.unmask()
    stage = STAGES.index(name)
    client = sum.clients[0]
    client.memory.done = done
    if stage == done and stage != 4:
        return  # is its turn: asked again with a memory that has moved on, which no client has
    if stage == done:
        assert set(ask(sum, client)) == {0, 1, 2, 3}  # type: ignore[call-overload]
        return
    with pytest.raises(AbortedError, match=f"{name} was asked for"):
        ask(sum, client)


def test_a_stage_counts_as_answered_before_it_is() -> None:
    """A process that is killed in the middle of a stage does not answer it a second time."""
    kept: list[int] = []
    own = identities(3)[0]
    client = SumClient(of(3), 0, own, keep=lambda memory: kept.append(memory.done))

    def killed(purpose: str) -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.keys(killed)
    assert set(kept) == {1}
    with pytest.raises(AbortedError, match="shares is next"):
        SumClient(of(3), 0, own, Memory(done=1)).keys(fresh)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (([0, 1, 2, 3], [3]), "stands twice"),
        (([0, 1, 2, 2], [3]), "stands twice"),
        (([0, 1, 2], []), "leave out a client"),
        (([0, 1, 2, 9], [3]), "published no keys"),
        (([0, 1], [2, 3]), "2 clients is not opened: 3 are needed"),
        (([1, 2, 3], [0]), "own vector is not in the sum"),
    ],
)
def test_lists_that_overlap_or_are_foreign_or_short(
    lists: tuple[list[int], list[int]], message: str
) -> None:
    """Both kinds of shares of a client are what an active server would need of it."""
    sum = _at(3)
    with pytest.raises(AbortedError, match=message):
        sum.clients[0].agree(*lists, sum.server.signatures)


def test_a_server_that_asks_for_both_kinds_of_shares_gets_one_from_everybody() -> None:
    """It tells half of the clients that 3 is in the sum, and the other half that it is lost."""
    sum = _at(3)
    everyone, without = [0, 1, 2, 3], [0, 1, 2]
    signatures = sum.server.signatures
    for client in (0, 3):
        sum.server.agree(client, sum.clients[client].agree(everyone, [], signatures))
    for client in (1, 2):
        sum.server.agree(client, sum.clients[client].agree(without, [3], signatures))
    for one in sum.clients.values():
        with pytest.raises(AbortedError, match="unmask is next"):
            one.agree(without, [3], signatures)
        with pytest.raises(AbortedError, match=r"2 clients signed the lists .* 3 are needed"):
            one.unmask(sum.server.agreed)
        assert not one.memory.held


def test_a_sum_of_fewer_than_the_quorum_is_not_opened_by_lists_that_differ() -> None:
    """Six clients, of whom four are to be in a sum, and each is told of two that are lost.

    With no say of the others each would give shares, and those of the keys of 0, 1 and 2 were
    enough: the server would see the sum over 3, 4 and 5.
    """
    sum = _at(3, 6)
    lost = {0: [1, 2], 1: [0, 2], 2: [0, 1], 3: [0, 1], 4: [1, 2], 5: [0, 2]}
    assert sum.terms.quorum == 4
    assert all([*lost.values()].count(pair) <= 2 for pair in lost.values())
    for client, out in lost.items():
        rest = [one for one in range(6) if one not in out]
        lists = rest, out, sum.server.signatures
        sum.server.agree(client, sum.clients[client].agree(*lists))
    for client in lost:
        with pytest.raises(AbortedError, match=r"signed the lists .* 4 are needed"):
            sum.clients[client].unmask(sum.server.agreed)


def test_a_sum_counts_nobody_whose_shares_were_withheld() -> None:
    """Six clients: 2 and 3 are said to be in a sum, and their boxes were passed on to nobody.

    0 and 1 have masks in common with each other and with 4 and 5, that are said to be lost: the
    sum over two would open as one of four.
    """
    sum = _at(2, 6)
    signatures = {}
    for client in range(4):
        boxes = {n: box for n, box in sum.server.boxes_for(client).items() if n not in (2, 3)}
        _, signatures[client] = sum.clients[client].mask(boxes, sum.inputs[client].copy, MODEL)
    for client in range(4):
        with pytest.raises(AbortedError, match="whose shares were withheld"):
            sum.clients[client].agree(range(4), [4, 5], signatures)


def test_consent_to_another_sum_is_none() -> None:
    """Nor are signatures of the model, or of strangers to the sum."""
    for replayed in ("masked", "elsewhere"):
        sum, other = _at(4), _at(4)
        source = sum.server.signatures if replayed == "masked" else other.server.agreed
        with pytest.raises(AbortedError, match="0 clients signed the lists"):
            sum.clients[0].unmask(source)


def test_who_is_refused_its_note_does_not_sign() -> None:
    sum = _at(3)

    def refuse() -> None:
        raise FedsimError("agreed to another")

    with pytest.raises(FedsimError, match="agreed to another"):
        sum.clients[0].agree(range(4), [], sum.server.signatures, refuse)
    assert not sum.clients[0].memory.held and sum.clients[0].memory.done == 4


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_what_fails_is_forgotten_and_what_is_out_of_turn_is_not(stage: int) -> None:
    sum = _at(stage)
    client = sum.clients[0]
    with pytest.raises(AbortedError, match="was asked for"):
        client.keys(fresh)
    assert client.memory.secrets or client.memory.held
    with pytest.raises(AbortedError):
        _fails(client, stage)
    assert client.memory == Memory(done=stage + 1)


def _fails(client: SumClient, stage: int) -> None:
    """A stage that is refused."""
    if stage == 1:
        client.shares({})
    elif stage == 2:
        client.mask({}, list, MODEL)
    elif stage == 3:
        client.agree([], [], {})
    else:
        client.unmask({})


def test_a_model_that_is_not_everyones_is_not_opened() -> None:
    """The server shows client 2 another model, whose update it would see the difference of."""
    sum = _at(2)
    sum.mask(models={2: b"another"})
    for client in range(4):
        with pytest.raises(AbortedError, match="has not signed the model"):
            sum.clients[client].agree(sum.server.survivors, [], sum.server.signatures)


def test_a_signature_is_of_one_client_and_one_session() -> None:
    everyone = identities(3)
    terms, later = of(3), of(3, session=b"later")
    old = {n: SumClient(terms, n, everyone[n]).keys(fresh) for n in range(3)}
    client = SumClient(later, 0, everyone[0])
    own = client.keys(fresh)
    with pytest.raises(AbortedError, match="keys of client 1 are not signed"):
        client.shares({0: own, 1: old[1], 2: old[2]})
    swapped = SumClient(terms, 0, everyone[0])
    own = swapped.keys(fresh)
    with pytest.raises(AbortedError, match=r"keys of client [12] are not signed"):
        swapped.shares({0: own, 1: old[2], 2: old[1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {n: one for n, one in d.items() if n}, "own keys are not in the directory"),
        (lambda d: {**d, 9: d[1]}, "do not take part"),
        (lambda d: {**d, 2: d[1]}, "stands twice"),
        (lambda d: {0: d[0], 1: d[1]}, "keys of 2 clients were published, 3 are needed"),
        (lambda d: {**d, 1: replace(d[1], masking=d[2].sealing)}, "stands twice"),
        (lambda d: {**d, 1: replace(d[1], commitment=bytes(32))}, "not signed"),
    ],
)
def test_directories_that_no_client_takes(
    change: Callable[[dict[int, Published]], dict[int, Published]], message: str
) -> None:
    sum = _at(1)
    with pytest.raises(AbortedError, match=message):
        sum.clients[0].shares(change(sum.directory))


@pytest.mark.parametrize(
    "change",
    [
        lambda boxes, sum: {**boxes, 1: boxes[2]},
        lambda boxes, sum: {**boxes, 1: boxes[1][:-1]},
        lambda boxes, sum: {**boxes, 1: bytes(BOX)},
        lambda boxes, sum: {**boxes, 1: sum.server._boxes[1][2]},  # sealed for another
        lambda boxes, sum: {**boxes, 1: b""},
    ],
)
def test_boxes_that_were_changed_or_are_anothers(
    change: Callable[[dict[int, bytes], Sum], dict[int, bytes]],
) -> None:
    sum = _at(2)
    with pytest.raises(AbortedError, match="cannot be decrypted"):
        sum.clients[0].mask(change(sum.server.boxes_for(0), sum), sum.inputs[0].copy, MODEL)


def test_boxes_of_too_few_or_of_strangers() -> None:
    sum = _at(2)
    boxes = sum.server.boxes_for(0)
    with pytest.raises(AbortedError, match="2 clients of the neighbourhood"):
        sum.clients[0].mask({1: boxes[1]}, sum.inputs[0].copy, MODEL)
    sum = _at(2)
    with pytest.raises(AbortedError, match="no neighbours"):
        sum.clients[0].mask({**sum.server.boxes_for(0), 9: boxes[1]}, list, MODEL)


def test_the_server_finds_wrong_shares_out() -> None:
    """One that lies about a share cannot move the sum; nothing is opened."""
    sum = _at(4)
    answers = sum.unmask()
    right = answers[0][2]
    answers[0][2] = right[:4] + bytes([right[4] ^ 1]) + right[5:]
    with pytest.raises(AbortedError, match="shares of client 2's seed are wrong"):
        sum.server.reveal(answers)
    with pytest.raises(AbortedError, match="has been opened, or could not be"):
        # The masks of clients 0 and 1 are off already.
        sum.server.reveal({**answers, 0: {**answers[0], 2: right}})
    sum = _at(2)
    sum.mask(gone={3})
    sum.agree()
    answers = sum.unmask()
    answers[1][3] = answers[0][3]  # another's share, with its number
    with pytest.raises(AbortedError, match="2 shares of client 3's secret came, 3 are needed"):
        sum.server.reveal(answers)


def test_the_server_adds_each_client_once_and_equal_lengths() -> None:
    sum = _at(3)
    with pytest.raises(AbortedError, match="has added it"):
        sum.server.add(0, sum.sent[0], b"")
    other = _at(2)
    vector, signature = other.clients[0].mask(
        other.server.boxes_for(0), other.inputs[0].copy, MODEL
    )
    other.server.add(0, vector, signature)
    with pytest.raises(AbortedError, match="differ in type or length"):
        other.server.add(1, vector[:-1], b"")
    with pytest.raises(AbortedError, match="differ in type or length"):
        other.server.add(1, vector.astype(np.uint64), b"")


def test_what_makes_no_sum_is_refused() -> None:
    with pytest.raises(AbortedError, match="client 7 does not take part"):
        SumClient(of(3), 7, identities(8)[7])
    with pytest.raises(FedsimError, match="two or more take part"):
        Terms(session=b"", participants=(0,), threshold=2 / 3)
    with pytest.raises(AbortedError, match="published keys are 3 bytes"):
        Published.from_bytes(b"abc")


def test_what_a_client_remembers_survives_a_process_for_each_message() -> None:
    """Every stage in a client made anew of what the one before has written down."""
    sum = Sum(of(4), vectors(4, 6))
    everyone = {n: client._identity for n, client in sum.clients.items()}

    def reborn() -> None:
        for number, client in sum.clients.items():
            memory = Memory(**asdict(client.memory))
            sum.clients[number] = SumClient(sum.terms, number, everyone[number], memory)

    sum.keys()
    reborn()
    sum.shares()
    reborn()
    sum.mask(gone={2})
    reborn()
    sum.agree()
    reborn()
    assert np.array_equal(sum.server.reveal(sum.unmask()), added(sum.inputs, {0, 1, 3}))
    assert not sum.clients[0].memory.held and not sum.clients[0].memory.secrets


P = 2**255 - 19
LOW = [0, 1, P - 1, *(int.from_bytes(bytes.fromhex(text), "little") for text in (
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
))]  # fmt: skip
"""As RFC 7748's reviewers list them."""


def shared(secret: bytes, key: bytes) -> bytes:
    """What X25519 makes of both."""
    public = X25519PublicKey.from_public_bytes(key)
    return X25519PrivateKey.from_private_bytes(secret).exchange(public)


def top_bit(key: bytes) -> bytes:
    """The same point to X25519, in other bytes."""
    return key[:31] + bytes([key[31] | 0x80])


@pytest.mark.parametrize("number", [*LOW, *(low + P for low in (0, 1)), P, 2**255 - 1, 2**256 - 1])
@pytest.mark.parametrize("at", [0, 32])
def test_a_key_of_no_client_is_refused(number: int, at: int) -> None:
    key = number.to_bytes(32, "little")
    good = secrets.public_of(bytes(range(32)))
    content = (key + good, good + key)[at == 32] + bytes(96)
    with pytest.raises(AbortedError, match="a public key is none"):
        Published.from_bytes(content)
    for length in (31, 33, 0):
        with pytest.raises(AbortedError, match="a public key is none"):
            secrets._check_public(good[:length] + bytes(max(0, length - 32)))


def test_low_order_points_are_those_that_make_every_secret_the_same() -> None:
    for number in LOW:
        with pytest.raises(ValueError, match="shared key"):
            shared(bytes(range(32)), number.to_bytes(32, "little"))


def _with_key(sum: Sum, colluding: int, key: bytes, kind: str = "masking") -> None:
    """Let a client publish what is not its own, signed by it."""
    own = sum.clients[colluding]._identity
    unsigned = replace(sum.directory[colluding], **{kind: key})
    statement = unsigned.statement(colluding, sum.terms.session)
    sum.directory[colluding] = replace(unsigned, signature=own.sign(statement))


@pytest.mark.parametrize("kind", ["sealing", "masking"])
def test_a_key_with_its_top_bit_set_is_refused_by_all(kind: str) -> None:
    sum = _at(1)
    honest = getattr(sum.directory[0], kind)
    key = top_bit(honest)
    assert shared(bytes(range(32)), key) == shared(bytes(range(32)), honest)
    _with_key(sum, 3, key, kind)
    with pytest.raises(AbortedError, match="a public key is none"):
        sum.clients[1].shares(sum.directory)
    with pytest.raises(AbortedError, match="a public key is none"):
        sum.server.publish(sum.directory)


def test_the_same_key_for_two_kinds_is_refused() -> None:
    sum = _at(1)
    _with_key(sum, 3, sum.directory[0].masking, "sealing")
    with pytest.raises(AbortedError, match="stands twice"):
        sum.clients[1].shares(sum.directory)


@pytest.mark.parametrize(
    "spelling",
    [
        # The point of `bytes(range(32))`, plus one of order 8, and plus one of order 2.
        "49d23b715a4d7187ac7564bc27da0ec7988aa4c3fa59c2f66adab4d76b4ef129",
        "5be15c7f1c5a05ccaf6c1d2c913baf3f4fcc7db06d9bca9f941d2a6ad1bc690d",
    ],
)
def test_masks_with_another_spelling_of_a_key_cancel_nothing(spelling: str) -> None:
    """Of four, 3 publishes the key of 0 in other bytes: both masks of 1 were the same, and gone.

    With those of 2 and 3 known, the server had the vector of 1 alone.
    """
    inputs, fixed = vectors(4, 50), {(0, "masking"): bytes(range(32))}
    sum = Sum(of(4), inputs, secret=lambda *of_whom: fixed.get(of_whom) or fresh("any"))
    sum.keys()
    key, secret = sum.directory[0].masking, sum.clients[1]._secret("masking")
    other = bytes.fromhex(spelling)
    assert other != key
    assert shared(secret, other) == shared(secret, key)
    boxes = {3: sum.clients[3].shares(sum.directory)}
    _with_key(sum, 3, other)
    sum.server.publish(sum.directory)
    boxes |= {client: sum.clients[client].shares(sum.directory) for client in range(3)}
    for client, sealed in boxes.items():
        sum.server.share(client, sealed)
    seed, session = sum.clients[1]._secret("seed"), sum.terms.session
    pair = {one: sum.directory[one].masking for one in (1, 2)}
    known = secrets.agree_key(secret, 2, pair, "mask", session)
    vector, _ = sum.clients[1].mask(sum.server.boxes_for(1), inputs[1].copy, MODEL)
    secrets.add_mask(vector, secrets.own_mask(seed, session), -1)
    secrets.add_mask(vector, known, -1)
    assert (vector == inputs[1]).mean() < 0.1
