"""Keeps what clients remember of their rounds on disk, apart from any engine.

A file in OUT/client_state/<stack>/client-0000/:
    round-0001.safetensors  the state after round 1, to which a resumed run can go back
    sent-0001.safetensors   what it sent in round 1, if it looks at the next global model
    answered.jsonl          at which inputs it has answered, and digests of the answers
    opened.jsonl            for whom it agreed to open sums
    sum.json                what it is to unmask, and when
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedsim.federation.noise_use import NoiseNotes
from fedsim.recording import truth
from fedsim.recording.files import (
    read_tensors,
    remove_rounds,
    remove_torn,
    write_bytes,
    write_tensors,
)
from fedsim.system import paths
from fedsim.types import FedsimError, Tensors

_FILE = re.compile(r"round-(\d{4,6})\.safetensors")


@dataclass(frozen=True)
class ClientState:
    """Files in a run's folder `out` in which a client, from 0, remembers its rounds of a stack."""

    out: Path
    stack: str
    client: int

    def before(self, round: int) -> Tensors:
        """Returns what was last saved before `round`; empty if nothing. Damage is a FedsimError."""
        earlier = [past for past in self._rounds() if past < round]
        return read_tensors(self._path(max(earlier))) if earlier else {}

    def save(self, round: int, state: Tensors, checkpoint_every: int) -> None:
        """Keeps the tensors `state` after `round`, and removes older ones that no run needs.

        A run is resumed after a checkpoint, of which there is one every `checkpoint_every` rounds.
        """
        write_tensors(self._path(round), state)
        checkpoint = (round - 1) // checkpoint_every * checkpoint_every
        # The newest state at or before the checkpoint is what a resumed run goes back to.
        covered = sorted(past for past in self._rounds() if past <= checkpoint)
        for past in covered[:-1]:
            self._path(past).unlink(missing_ok=True)

    def save_sent(self, round: int, sent: Tensors) -> None:
        """Keeps `sent`, which `training.client.pack_round` made of the update of `round`."""
        write_tensors(self._sent_path(round), sent)

    def load_sent(self, round: int) -> Tensors:
        """Returns what `save_sent` kept of `round`; empty without it. Damage is a FedsimError."""
        path = self._sent_path(round)
        return read_tensors(path) if path.exists() else {}

    def forget_sent(self, round: int) -> None:
        """Removes what `save_sent` kept of `round`, if anything, since that answer was left out."""
        self._sent_path(round).unlink(missing_ok=True)

    def rewind(self, done: int) -> None:
        """Removes what was kept in rounds after `done`, which are trained again.

        That is the client's truth, states and sent updates, and the stack's recordings in `out`.
        Notes of answers stay, and so do states up to the last round that these notes name.
        """
        truth.forget_rounds(self.out, self.stack, self.client, done)
        # A client that forgets what it has released would release the same again as its first.
        kept = max([done, *self._notes.rounds()])
        for past in self._rounds():
            if past > kept:
                self._path(past).unlink(missing_ok=True)
        for path in self._path(0).parent.glob("sent-*.safetensors"):
            if int(path.stem.removeprefix("sent-")) > done:
                path.unlink(missing_ok=True)
        # A node has a folder of its own; in a shared one the server has done it.
        remove_rounds(self.out / "observations" / self.stack, done)
        remove_torn(self._path(0).parent)

    def answer(self, asked: tuple[int, ...], inputs: Sequence[Tensors]) -> None:
        """Notes that the client answers the order `asked` at these `inputs`, before it answers.

        `asked` is the key of the release (`noise_use.release_key`), and `inputs` are all tensors
        that decide the answer beside the client's data. A FedsimError refuses other inputs than
        before, a new order of a round before the last one answered, and damaged notes.
        """
        self._notes.refuse_past(asked)
        self._notes.use_once(asked, inputs)

    def note_release(self, asked: tuple[int, ...], release: Sequence[Tensors]) -> None:
        """Notes a digest of the tensors that answer the order `asked`, before they are sent.

        Tensors other than those noted before are a FedsimError. Nothing is noted unless `answer`
        has noted the order.
        """
        self._notes.note_release(asked, release)

    def open_sum(self, round: int, survivors: Collection[int]) -> None:
        """Notes consent to a sum of `round` over `survivors`; later, others are a FedsimError."""
        opened = self._notes_in("opened.jsonl")
        # Noted like noise: the first set of clients holds, and any other is refused.
        members = {"survivors": torch.tensor(sorted(survivors))}
        opened.use_once((round,), [members], "consent to a sum")

    def save_sum(self, round: int, memory: Mapping[str, Any]) -> None:
        """Keeps `memory` (JSON values) of the secure sum of `round`, in place of any other's."""
        content = json.dumps({"round": round, "memory": memory}).encode()
        write_bytes(self._path(0).with_name("sum.json"), content, private=True)

    def sum_of(self, round: int) -> dict[str, Any]:
        """Returns what `save_sum` kept of `round`; empty without it. Damage is a FedsimError."""
        path = self._path(0).with_name("sum.json")
        if not path.exists():
            return {}
        try:
            kept = json.loads(paths.text(path, paths.TEXT))
            return dict(kept["memory"]) if kept["round"] == round else {}
        except (ValueError, KeyError, TypeError) as error:
            raise FedsimError(f"{path}: damaged; the client misses this round's sum") from error

    @property
    def _notes(self) -> NoiseNotes:
        return self._notes_in("answered.jsonl")

    def _notes_in(self, name: str) -> NoiseNotes:
        return NoiseNotes(self._path(0).with_name(name), f"client {self.client}")

    def _rounds(self) -> list[int]:
        home = self._path(0).parent
        found = (_FILE.fullmatch(path.name) for path in home.glob("round-*.safetensors"))
        return [int(match[1]) for match in found if match]

    def _sent_path(self, round: int) -> Path:
        return self._path(0).with_name(f"sent-{round:04d}.safetensors")

    def _path(self, round: int) -> Path:
        name = f"round-{round:04d}.safetensors"
        return self.out / "client_state" / self.stack / f"client-{self.client:04d}" / name
