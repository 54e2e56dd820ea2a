"""What a run's folder keeps of clients that are elsewhere: their counts, and the server's secret.

OUT/run              what nodes know the run by
OUT/census.json      how many examples each client holds
OUT/server.secret    of the noise that the server adds; not there if all follows from the seed
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from fedsim.recording import files
from fedsim.scenario import Scenario
from fedsim.system import paths
from fedsim.training.server import Census, Server
from fedsim.training.source import load_dataset
from fedsim.types import FedsimError, Unit

NO_LINK = (
    "federation.engine: deployment needs a SuperLink: name it with --superlink, or start a whole "
    "federation on this machine with fedsim up"
)
"""Text of the error when an engine with nodes on other machines has no link to them."""

_RUN_BYTES = 16
_CENSUS: TypeAdapter[Census] = TypeAdapter(Census)


@dataclass(frozen=True)
class Deployed:
    """Facts of a deployed run that its scenario does not hold."""

    census: Census
    """What nodes have told of their data: how many examples each holds."""
    secret: bytes | None
    """Secret of the server's noise; None if all noise follows from the scenario's seed."""

    @classmethod
    def read(cls, out: Path) -> Deployed:
        """Reads what `save` wrote in the run's folder `out`; missing or damaged: a FedsimError."""
        path = out / "census.json"
        if not path.exists():
            raise FedsimError(NO_LINK)
        try:
            census = _CENSUS.validate_json(paths.text(path, paths.TEXT))
            # A unit that is left out would pass for one of which no statistic is private.
            if missing := set(get_args(Unit)) - set(census.private_statistics):
                raise ValueError(f"nothing is said of {missing}")
        except ValueError as error:  # of JSON, and of its values
            raise FedsimError(
                f"{path}: damaged; run the scenario anew, with another --out"
            ) from error
        secret = out / "server.secret"
        return cls(census, paths.content(secret, paths.TEXT) if secret.exists() else None)

    def save(self, out: Path) -> None:
        """Writes these facts below the run's folder `out`; a secret that is there already stays."""
        files.write_json(out / "census.json", _CENSUS.dump_python(self.census, mode="json"))
        path = out / "server.secret"
        if self.secret is not None and not path.exists():
            # Never replaced (O_EXCL): rounds that are trained again need the noise that they had.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(self.secret)

    def servers(self, scenario: Scenario) -> dict[str, Server]:
        """Returns each stack's `Server` by name; loads the scenario's data (else a FedsimError)."""
        described = load_dataset(scenario).without_training()
        return {
            name: Server(scenario, name, described, self.census, self._noise_seed(name))
            for name in scenario.defenses
        }

    def _noise_seed(self, stack: str) -> int | None:
        if self.secret is None:
            return None
        # Noise of its own for each stack: two sums with the same noise have a difference without
        # any.
        digest = hashlib.sha256(b"fedsim server\0" + self.secret + stack.encode()).digest()
        return int.from_bytes(digest, "big")


def run_name(out: Path) -> str:
    """Returns the name by which nodes know the run in `out`; the first call draws and writes it."""
    path = out / "run"
    if not path.exists():
        files.write_bytes(path, secrets.token_hex(_RUN_BYTES).encode())
    return paths.text(path, paths.TEXT).strip()
