"""A client's side of a secure sum: five answers, each given once, and what it refuses.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
Figure 4, with the neighbours of Bell et al., CCS 2020. Clients sign twice what they were shown: in
`masked` the keys and the model, which `agree` checks, and in `agree` who is in the sum, which
`unmask` checks. So a server that tells clients different things opens nothing.

"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedsim.federation.secure_aggregation import secrets
from fedsim.federation.secure_aggregation.secrets import (
    SHARE,
    Directory,
    Identity,
    Published,
    check_keys,
    digest,
    directory_digest,
    list_entries,
)
from fedsim.federation.secure_aggregation.terms import AbortedError, Ring, Terms
from fedsim.words import number_of

STAGES = ("keys", "shares", "masked", "agree", "unmask")


@dataclass
class Memory:
    """Everything that a client keeps from one stage to the next, its bytes as hexadecimal text."""

    done: int = 0
    """Number of stages that the client has begun to answer; none can be begun again."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Two secret keys, `sealing` and `masking`, and the `seed` of the client's own mask. They are
    forgotten once the client has masked its vector."""
    directory: dict[str, str] = field(default_factory=dict)
    """Public keys of each client, joined as `Published.to_bytes` does, by client."""
    held: dict[str, str] = field(default_factory=dict)
    """Shares of the neighbours' secrets and of the client's own, by the client whose secrets they
    are; forgotten at the end."""
    statement: str = ""
    """Digest that the client has signed last, and for which it accepts the signatures of others."""
    survivors: list[int] = field(default_factory=list)
    """Clients in the sum to which this one has agreed, ascending."""


class SumClient:
    """One client of a sum: `keys`, `shares`, `mask`, `agree`, `unmask`, in this order, once each.

    What breaks the protocol raises an `AbortedError`, and so does a call out of turn. A stage that
    fails makes the client forget its secrets; a call out of turn begins none.
    """

    def __init__(
        self,
        terms: Terms,
        number: int,
        identity: Identity,
        memory: Memory | None = None,
        keep: Callable[[Memory], None] = lambda memory: None,
    ) -> None:
        """Begins a sum, or goes on after the stages that `memory` counts as begun.

        Args:
            terms: Terms of the sum.
            number: Number of this client; an AbortedError if it is none of the participants.
            identity: Its signing key, and its peers' public keys.
            memory: What it has kept of earlier stages; None begins anew.
            keep: Saves the memory when a stage begins and when it ends; by default nothing does.
        """
        if number not in terms.participants:
            raise AbortedError(f"client {number} does not take part in this sum")
        self._terms, self._me, self._identity, self._keep = terms, number, identity, keep
        self.memory = memory or Memory()

    def keys(self, secret: Callable[[str], bytes]) -> Published:
        """Draws the client's secrets, and returns the public keys for them.

        `secret` is called with a purpose (`sealing`, `masking`, `seed`), and returns 32 bytes that
        nobody else knows, others for each purpose. A second call is an `AbortedError`.
        """
        with self._stage("keys"):
            own = {purpose: secret(purpose) for purpose in ("sealing", "masking", "seed")}
            self.memory.secrets = {purpose: value.hex() for purpose, value in own.items()}
            session = self._terms.session
            unsigned = Published(
                sealing=secrets.public_of(own["sealing"]),
                masking=secrets.public_of(own["masking"]),
                commitment=secrets.commit(own["seed"], session),
                signature=b"",
            )
            signature = self._identity.sign(unsigned.statement(self._me, session))
            return Published(**{**vars(unsigned), "signature": signature})

    def shares(self, directory: Directory) -> dict[int, bytes]:
        """Splits the client's two secrets among its neighbours; returns a sealed box for each.

        An `AbortedError` refuses a call out of turn, and a `directory` below a quorum, without this
        client's keys, of others than participants, or with keys that are invalid or not signed.
        """
        with self._stage("shares"):
            self._check(directory)
            # Kept because the later stages have to speak of the same directory.
            self.memory.directory = {str(c): one.to_bytes().hex() for c, one in directory.items()}
            neighbours = self._neighbours(directory)
            # Both sides sort: a holder's place in this list is the number of its share
            # (`SumServer._secret`).
            holders = sorted([self._me, *neighbours])
            needed = self._terms.shares
            if len(holders) < needed:
                raise AbortedError(
                    f"{number_of(len(holders), 'client')} cannot hold {needed} shares"
                )
            seed, masking = (
                secrets.split(self._secret(purpose), needed, len(holders))
                for purpose in ("seed", "masking")
            )
            boxes = {}
            for holder, *two in zip(holders, seed, masking, strict=True):
                # Its own share counts among those that reveal a secret: it is kept, and never sent.
                if holder == self._me:
                    self.memory.held[str(holder)] = b"".join(two).hex()
                else:
                    key = self._agree_key(directory, holder, "sealing", self._way(holder))
                    boxes[holder] = secrets.seal(key, b"".join(two), self._way(holder).encode())
            return boxes

    def mask(
        self, boxes: Mapping[int, bytes], compute: Callable[[], Ring], model: bytes
    ) -> tuple[Ring, bytes]:
        """Returns (masked vector, signature of the keys and the model that this client was shown).

        `boxes` are those of neighbours that have shared their secrets, by neighbour. `compute`
        returns the vector to add up, and masks are added to it in place. `model` is a digest of all
        that the vector is computed from, the same bytes for all clients. A call out of turn, too
        few boxes, damaged ones and those of no neighbours are an `AbortedError`.
        """
        with self._stage("masked"):
            directory = self._directory()
            neighbours = self._neighbours(directory)
            if not set(boxes) <= set(neighbours):
                raise AbortedError("boxes are of clients that are no neighbours")
            alive = sorted([self._me, *boxes])
            needed = self._terms.shares
            # Fewer could never reveal these secrets, and the masks would stay on the sum.
            if len(alive) < needed:
                raise AbortedError(
                    f"{number_of(len(alive), 'client')} of the neighbourhood shared secrets, "
                    f"{needed} are needed"
                )
            for sender, box in boxes.items():
                way = self._way(self._me, sender)
                key = self._agree_key(directory, sender, "sealing", way)
                self.memory.held[str(sender)] = secrets.open_box(key, box, way.encode()).hex()
            # Computed once all boxes have opened: a damaged one ends the stage before anything is
            # released.
            vector, session = compute(), self._terms.session
            # Double masking (Bonawitz et al.): once a client is declared lost, its pairwise masks
            # are revealed. Its own mask hides a vector that comes late.
            secrets.add_mask(vector, secrets.own_mask(self._secret("seed"), session), +1)
            for other in boxes:
                # The lower number adds and the higher one subtracts, so that the mask cancels in
                # the sum.
                key = self._agree_key(directory, other, "masking", "mask")
                secrets.add_mask(vector, key, +1 if self._me < other else -1)
            self.memory.secrets = {}  # nobody can make this client mask another vector with them
            return vector, self._sign(
                digest(b"masked", session, directory_digest(directory), model)
            )

    def agree(
        self,
        survivors: Collection[int],
        lost: Collection[int],
        signatures: Mapping[int, bytes],
        note: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Returns this client's signature of the clients in the sum, if it may be opened for them.

        Args:
            survivors: Clients whose vectors are in the sum.
            lost: Clients that shared secrets and sent no vector.
            signatures: Signatures of keys and model, by survivor.
            note: Called before this client signs; it may refuse by raising.

        Raises:
            AbortedError: The sum may not be opened for these clients, or a call is out of turn.
        """
        with self._stage("agree"):
            in_sum, out = set(survivors), set(lost)
            if len(in_sum) < len(survivors) or len(out) < len(lost) or in_sum & out:
                raise AbortedError("a client stands twice in the lists of the sum and of the lost")
            if not in_sum | out <= set(map(int, self.memory.directory)):
                raise AbortedError("the lists name clients that published no keys")
            if self._me not in in_sum:
                raise AbortedError("this client's own vector is not in the sum")
            held = set(map(int, self.memory.held))
            if not held <= in_sum | out:
                raise AbortedError("the lists leave out a client whose shares this client holds")
            if not in_sum & set(self._neighbours(self._directory())) <= held:
                # It has no mask in common with this one: the sum could be opened without it.
                raise AbortedError("the sum is of a client whose shares were withheld")
            if len(in_sum) < self._terms.quorum:
                raise AbortedError(
                    f"a sum of {number_of(len(in_sum), 'client')} is not opened: "
                    f"{self._terms.quorum} are needed"
                )
            # The signatures are of directory and model: a client that was shown others fails here.
            for client in sorted(in_sum):
                if not self._vouches(client, signatures):
                    raise AbortedError(
                        f"client {client} has not signed the model and the keys that this one was "
                        "shown"
                    )
            note()
            self.memory.survivors = sorted(in_sum)
            # Each list is encoded by itself, so that no client can be moved from one to the other.
            members = (list_entries(dict.fromkeys(clients, b"")) for clients in (in_sum, out))
            return self._sign(digest(b"agree", bytes.fromhex(self.memory.statement), *members))

    def unmask(self, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """Returns this client's shares of other clients' secrets and of its own, by client.

        The share is of the seed for a client in the sum, and of the masking key for a lost client:
        never both of one client, nor any a second time. `signatures` are those of `agree`, by
        client; fewer valid ones than a quorum, and a call out of turn, are an `AbortedError`.
        """
        with self._stage("unmask"):
            in_sum = set(self.memory.survivors)
            agreed = sum(self._vouches(client, signatures) for client in in_sum)
            if agreed < self._terms.quorum:
                raise AbortedError(
                    f"{number_of(agreed, 'client')} signed the lists of the sum and of the lost "
                    f"that this one was shown, {self._terms.quorum} are needed"
                )
            held = {int(client): bytes.fromhex(two) for client, two in self.memory.held.items()}
            # Forgotten before the shares leave, so that none is given a second time.
            self._forget()
            return {
                # The first half is a share of the seed, the second one of the masking key: never
                # both of one client.
                client: two[:SHARE] if client in in_sum else two[SHARE:]
                for client, two in held.items()
            }

    @contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        """Counts the stage as answered before anything is computed; forgets all if it fails."""
        at = STAGES.index(stage)
        if self.memory.done != at:
            expected = STAGES[self.memory.done] if self.memory.done < len(STAGES) else "no more"
            raise AbortedError(f"{stage} was asked for, and {expected} is next")
        self.memory.done += 1
        self._keep(self.memory)
        try:
            yield
        # A client that fails drops out: without its secrets it cannot go on in this sum.
        except BaseException:
            self._forget()
            raise
        finally:
            self._keep(self.memory)

    def _forget(self) -> None:
        self.memory = Memory(done=self.memory.done)

    def _sign(self, statement: bytes) -> bytes:
        self.memory.statement = statement.hex()
        return self._identity.sign(statement)

    def _vouches(self, client: int, signatures: Mapping[int, bytes]) -> bool:
        statement = bytes.fromhex(self.memory.statement)
        return self._identity.vouches(client, statement, signatures.get(client, b""))

    def _check(self, directory: Directory) -> None:
        if not set(directory) <= set(self._terms.participants):
            raise AbortedError("the directory names clients that do not take part")
        if len(directory) < self._terms.quorum:
            raise AbortedError(
                f"keys of {number_of(len(directory), 'client')} were published, "
                f"{self._terms.quorum} are needed"
            )
        own = directory.get(self._me)
        if own is None or own.masking != secrets.public_of(self._secret("masking")):
            raise AbortedError("this client's own keys are not in the directory")
        check_keys(directory)
        for client, one in directory.items():
            statement = one.statement(client, self._terms.session)
            if not self._identity.vouches(client, statement, one.signature):
                raise AbortedError(f"the keys of client {client} are not signed by it")

    def _directory(self) -> dict[int, Published]:
        return {
            int(client): Published.from_bytes(bytes.fromhex(content))
            for client, content in self.memory.directory.items()
        }

    def _neighbours(self, directory: Directory) -> list[int]:
        return self._terms.neighbours(self._me, directory, directory_digest(directory))

    def _secret(self, purpose: str) -> bytes:
        return bytes.fromhex(self.memory.secrets[purpose])

    def _agree_key(self, directory: Directory, other: int, kind: str, purpose: str) -> bytes:
        pair = {one: getattr(directory[one], kind) for one in (self._me, other)}
        return secrets.agree_key(self._secret(kind), other, pair, purpose, self._terms.session)

    def _way(self, to: int, sender: int | None = None) -> str:
        """Names the direction of a box, so that both have a key of their own."""
        return f"shares {self._me if sender is None else sender} {to}"
