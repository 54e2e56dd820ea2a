"""The server's side of a secure sum: it passes on what is published, adds up, takes off masks.

It holds public keys, sealed boxes, one running sum and shares; never a client's vector.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

import numpy as np

from fedsim.federation.secure_aggregation import secrets
from fedsim.federation.secure_aggregation.secrets import (
    BOX,
    SHARE,
    Directory,
    check_keys,
    directory_digest,
)
from fedsim.federation.secure_aggregation.terms import AbortedError, Ring, Terms
from fedsim.words import number_of


class SumServer:
    """The server of one sum: `publish`, `share`, `add`, `agree` and `reveal`, in this order.

    What needs a quorum of clients (`Terms.quorum`) raises an `AbortedError` while there are fewer.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._directory: Directory = {}
        self._boxes: dict[int, Mapping[int, bytes]] = {}
        self._signatures: dict[int, bytes] = {}
        self._agreed: dict[int, bytes] = {}
        self._total: Ring | None = None

    def publish(self, directory: Directory) -> None:
        """Takes all clients' public keys; too few and invalid ones are an `AbortedError`."""
        self._enough(len(directory), "published keys")
        check_keys(directory)
        self._directory = directory

    def neighbours(self, client: int) -> list[int]:
        """Returns the clients for whom `client` has to send a box, ascending, after `publish`."""
        return self._terms.neighbours(client, self._directory, directory_digest(self._directory))

    def share(self, client: int, boxes: Mapping[int, bytes]) -> None:
        """Takes a box of `client` for each neighbour; another set of boxes is an `AbortedError`."""
        sizes = {len(box) for box in boxes.values()}
        if set(boxes) != set(self.neighbours(client)) or sizes != {BOX}:
            raise AbortedError("expected a sealed box for each of its neighbours")
        self._boxes[client] = boxes

    def boxes_for(self, client: int) -> dict[int, bytes]:
        """Returns the boxes that its neighbours have sealed for `client`, by sender.

        It is an `AbortedError` until a quorum of clients has shared its secrets.
        """
        self._enough(len(self._boxes), "shared their secrets")
        return {
            sender: self._boxes[sender][client]
            for sender in self.neighbours(client)
            if sender in self._boxes
        }

    @property
    def sharers(self) -> list[int]:
        """Clients that have shared their secrets, ascending."""
        return sorted(self._boxes)

    def add(self, client: int, vector: Ring, signature: bytes) -> None:
        """Adds a masked vector to the sum without keeping it; keeps `signature`, of keys and model.

        A client without boxes, a second vector of one, and a length or dtype other than the first
        vector's are an `AbortedError`.
        """
        if client not in self._boxes or client in self._signatures:
            raise AbortedError(f"client {client} has no vector to add, or has added it")
        if self._total is None:
            # A copy: the sum grows in place, and the caller goes on to use its vector.
            self._total = vector.copy()
        elif self._total.dtype != vector.dtype or self._total.shape != vector.shape:
            raise AbortedError("masked vectors differ in type or length")
        else:
            np.add(self._total, vector, out=self._total)
        self._signatures[client] = signature

    @property
    def signatures(self) -> Mapping[int, bytes]:
        """Signatures of keys and model, by client whose vector is in the sum."""
        return self._signatures

    @property
    def survivors(self) -> list[int]:
        """Clients whose vectors are in the sum, ascending; an `AbortedError` below a quorum."""
        self._enough(len(self._signatures), "sent a masked vector")
        return sorted(self._signatures)

    @property
    def lost(self) -> list[int]:
        """Clients that shared secrets and sent no vector, ascending."""
        return [client for client in self.sharers if client not in self._signatures]

    def agree(self, client: int, signature: bytes) -> None:
        """Takes `client`'s signature of `survivors` and `lost`; other clients verify it."""
        self._agreed[client] = signature

    @property
    def agreed(self) -> Mapping[int, bytes]:
        """Signatures of `survivors` and `lost`, by client; an `AbortedError` below a quorum."""
        self._enough(len(self._agreed), "agreed to who is in the sum")
        return self._agreed

    def reveal(self, answers: Mapping[int, Mapping[int, bytes]]) -> Ring:
        """Takes all masks off the sum and returns it, once.

        `answers` holds shares, by the client that gave them and then by the client whose secret
        they are of. Too few or wrong shares are an `AbortedError`, which ends the sum. A second
        call is an AssertionError.
        """
        self._enough(len(answers), "gave shares")
        survivors, session = self.survivors, self._terms.session
        # Masks come off in place: a second opening would take them off twice.
        total, self._total = self._total, None
        if total is None:
            raise AbortedError("the sum has been opened, or could not be")
        for client in survivors:
            # Of a survivor, the mask that it added for itself comes off.
            seed = self._secret(client, answers)
            # Wrong shares give some other seed: without this, they would move the sum unnoticed.
            if not hmac.compare_digest(
                secrets.commit(seed, session), self._directory[client].commitment
            ):
                raise AbortedError(f"the shares of client {client}'s seed are wrong")
            secrets.add_mask(total, secrets.own_mask(seed, session), -1)
        for client in self.lost:
            # Of a lost client, the masks come off that survivors have in common with it.
            masking = self._secret(client, answers)
            if secrets.public_of(masking) != self._directory[client].masking:
                raise AbortedError(f"the shares of client {client}'s key are wrong")
            for other in self.neighbours(client):
                if other in self._signatures:
                    pair = {one: self._directory[one].masking for one in (client, other)}
                    key = secrets.agree_key(masking, other, pair, "mask", session)
                    # `other` added the mask if its number is the lower one, else it took it off.
                    secrets.add_mask(total, key, -1 if other < client else +1)
        return total

    def _secret(self, client: int, answers: Mapping[int, Mapping[int, bytes]]) -> bytes:
        holders = sorted([client, *self.neighbours(client)])
        needed = self._terms.shares
        shares = []
        for place, holder in enumerate(holders, start=1):
            share = answers.get(holder, {}).get(client)
            # A share's own number is where its holder stands: none can pose as another's.
            if share is not None and len(share) == SHARE and int.from_bytes(share[:2]) == place:
                shares.append(share)
        if len(shares) < needed:
            raise AbortedError(
                f"{number_of(len(shares), 'share')} of client {client}'s secret came, {needed} are "
                "needed"
            )
        return secrets.join_shares(shares[:needed])

    def _enough(self, count: int, what: str) -> None:
        if count < self._terms.quorum:
            raise AbortedError(
                f"{number_of(count, 'client')} {what}, {self._terms.quorum} are needed: nothing is "
                "opened"
            )
