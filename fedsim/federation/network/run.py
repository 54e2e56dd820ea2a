"""What a run over a network keeps in its folder: who holds how much, and the server's own secret.

    OUT/census.json      how many examples each client holds
    OUT/server.secret    of the noise that the server adds; not there if all follows from the seed
    OUT/nodes/           of a federation on this machine: the nodes' own folders

`join` brings the truth that nodes keep into the run's own folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.federation import NO_LINK
from fedsim.federation.delivery import OnWait
from fedsim.federation.deployment import run_name, take_census
from fedsim.federation.network import link as links
from fedsim.federation.network.home import run_folder
from fedsim.federation.network.link import Link
from fedsim.recording import files, truth
from fedsim.scenario import Scenario
from fedsim.system import paths
from fedsim.training.census import Census
from fedsim.training.server import Server
from fedsim.training.source import load_dataset
from fedsim.types import FedsimError

_SECRET_BYTES = 32


@dataclass(frozen=True)
class Deployed:
    """What is known of a deployed run beside its scenario."""

    census: Census
    secret: bytes | None
    """Of the server's noise; None: it follows from the scenario's seed, as that of all nodes."""

    @classmethod
    def of(
        cls, out: Path, scenario: Scenario, link: Link, on_wait: OnWait | None = None
    ) -> Deployed:
        """Ask the nodes behind `link`; a run that is resumed keeps its secret.

        Args:
            out: The run's folder.
            scenario: That they are to answer.
            link: To their SuperLink.
            on_wait: Told how many are there while more have to come.

        Raises:
            FedsimError: the SuperLink is not reachable or not safe, or a node refuses.
        """
        links.check(link.superlink, link.roots)
        eavesdropper = "eavesdropper" in scenario.observe.vantages
        if eavesdropper and scenario.federation.tls != (link.roots is not None):
            raise FedsimError(
                f"federation.tls: {str(scenario.federation.tls).lower()}, and the link to "
                f"{link.superlink} is {'plaintext' if link.roots is None else 'encrypted'}: say "
                "what the wire is that an eavesdropper listens on"
            )
        census = take_census(scenario, link, on_wait)
        path = out / "server.secret"
        if link.shared_seed:
            return cls(census, None)
        return cls(
            census,
            paths.content(path, paths.TEXT)
            if path.exists()
            else secrets.token_bytes(_SECRET_BYTES),
        )

    @classmethod
    def read(cls, out: Path) -> Deployed:
        """What `save` wrote.

        Raises:
            FedsimError: `out` holds no deployed run.
        """
        path = out / "census.json"
        if not path.exists():
            raise FedsimError(NO_LINK)
        try:
            found = json.loads(paths.text(path, paths.TEXT))
            census = Census(
                held=[int(count) for count in found["held"]],
                private_statistics={
                    "client": tuple(found["private_statistics"]["client"]),
                    "example": tuple(found["private_statistics"]["example"]),
                },
            )
        except (ValueError, KeyError, TypeError) as error:
            raise FedsimError(
                f"{path}: damaged; run the scenario anew, with another --out"
            ) from error
        secret = out / "server.secret"
        return cls(census, paths.content(secret, paths.TEXT) if secret.exists() else None)

    def save(self, out: Path) -> None:
        """Write it below `out`; the secret is for its owner's eyes alone."""
        statistics = {unit: list(said) for unit, said in self.census.private_statistics.items()}
        files.write_json(
            out / "census.json",
            {"held": list(self.census.held), "private_statistics": statistics},
        )
        path = out / "server.secret"
        if self.secret is not None and not path.exists():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(self.secret)

    def servers(self, scenario: Scenario) -> dict[str, Server]:
        """What the server of each stack knows.

        Raises:
            FedsimError: the data cannot be described, or do not fit the learner.
        """
        described = load_dataset(scenario).without_training()
        return {
            name: Server(scenario, name, described, self.census, self._noise_seed(name))
            for name in scenario.defenses
        }

    def _noise_seed(self, stack: str) -> int | None:
        """Of the noise that the server adds behind `stack`, and behind no other one."""
        if self.secret is None:
            return None
        digest = hashlib.sha256(b"fedsim server\0" + self.secret + stack.encode()).digest()
        return int.from_bytes(digest, "big")


def join(out: Path, homes: Sequence[Path]) -> int:
    """Copy the truth that the nodes with these `homes` keep of the run in `out`; how many files.

    With it goes what a participant has seen (`observe.vantages`).

    Raises:
        FedsimError: there is no deployed run, or no home, or a home is none, or it holds truth of
            another client than its own.
    """
    if not (out / "run").exists():
        raise FedsimError(f"{out}: no deployed run, so that there is nothing to collect")
    chosen = list(homes) or sorted((out / "nodes").glob("node-*"))
    if not chosen:
        raise FedsimError(
            f"{out}: no folder of a node in it; name the nodes' folders with --from (copies will "
            "do)"
        )
    copied = 0
    for client, kept in _owned(out, chosen).items():
        copied += truth.copy(kept, out)
        for path in sorted(kept.glob("observations/**/*.*")):
            # What the server recorded stays; the global model is the same for all who saw it.
            is_global = path.name == files.GLOBAL and not (out / path.relative_to(kept)).exists()
            if is_global or path.name.startswith(f"participant-{client:04d}-"):
                files.copy_file(path, kept, out)
    return copied


def _owned(out: Path, homes: Sequence[Path]) -> dict[int, Path]:
    """What each client keeps of the run in `out`, by client."""
    owned: dict[int, Path] = {}
    for home in homes:
        if not home.is_dir():
            raise FedsimError(f"--from: {home}: no such folder")
        kept = paths.unlinked(run_folder(home, run_name(out)), home)
        client = truth.owner(kept)
        if client is None:
            continue
        own = home.name.removeprefix("node-") if home.parent == out / "nodes" else str(client)
        if client in owned or own != str(client):
            raise FedsimError(
                f"--from: {home}: truth of client {client}, which is in the folder of its own node "
                "alone; name the folder of each client's node, once"
            )
        owned[client] = kept
    return owned
