"""What clients keep of their rounds, on disk and apart from any engine: truth, and what they
remember between rounds (error feedback, noise).

    OUT/client_state/<stack>/client-0000/round-0001.safetensors     the state after round 1
    OUT/client_state/<stack>/client-0000/answered.jsonl             at which weights it has answered

A file per round lets a resumed run go back to the state that its checkpoint saw.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fedsim.federation.noise_use import notes, use_once
from fedsim.recording import truth
from fedsim.recording.files import read_tensors, remove_torn, write_tensors
from fedsim.types import Tensors

_FILE = re.compile(r"round-(\d{4,6})\.safetensors")


def has_truth(out: Path, stack: str) -> bool:
    """Whether clients of `stack` have written truth."""
    return truth.home(out, stack).exists()


def folder(out: Path, stack: str) -> Path:
    """Where the states of `stack`'s clients lie."""
    return out / "client_state" / stack


@dataclass(frozen=True)
class ClientState:
    """The memory of one client of one stack. `client` is a checked integer."""

    out: Path
    stack: str
    client: int

    def before(self, round: int) -> Tensors:
        """The state after the client's last round before `round`; empty if there was none."""
        earlier = [past for past in self._rounds() if past < round]
        return read_tensors(self._path(max(earlier))) if earlier else {}

    def save(self, round: int, state: Tensors, checkpoint_every: int) -> None:
        """Keep `state` after `round`; forget what no checkpoint that may be resumed needs.

        While a client trains `round`, the last checkpoint is that of the last multiple of
        `checkpoint_every` before it.
        """
        write_tensors(self._path(round), state)
        checkpoint = (round - 1) // checkpoint_every * checkpoint_every
        covered = sorted(past for past in self._rounds() if past <= checkpoint)
        for past in covered[:-1]:
            self._path(past).unlink(missing_ok=True)

    def rewind(self, done: int) -> None:
        """Make what the client keeps what it was after round `done`: later rounds come again.

        But for what it has noted of its answers.
        """
        truth.forget_rounds(self.out, self.stack, self.client, done)
        for past in self._rounds():
            if past > done:
                self._path(past).unlink(missing_ok=True)
        remove_torn(self._path(0).parent)

    def answer(self, asked: tuple[int, ...], weights: Tensors) -> None:
        """Note that the client answers what it is `asked` at these `weights`, and at no others.

        Raises:
            FedsimError: it has answered at other weights.
        """
        path = notes(self.out, self.stack, self._path(0).parent.name)
        use_once(path, asked, weights, f"client {self.client}")

    def _rounds(self) -> list[int]:
        home = self._path(0).parent
        found = (_FILE.fullmatch(path.name) for path in home.glob("round-*.safetensors"))
        return [int(match[1]) for match in found if match]

    def _path(self, round: int) -> Path:
        name = f"round-{round:04d}.safetensors"
        return folder(self.out, self.stack) / f"client-{self.client:04d}" / name
