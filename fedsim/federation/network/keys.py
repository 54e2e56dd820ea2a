"""Makes the keys of a whole federation: a folder for each party, with no more than it needs.

    DIR/superlink/   ca.crt, server.crt, server.key, superexec.secret
    DIR/gate/        ca.crt, server.crt, server.key
    DIR/node-0/      ca.crt, key; signing.key and peers.json, for secure sums
    DIR/runner/      ca.crt, superexec.secret, and each node's public key, node-0.pub

The authority's own key is never among them and is forgotten, so that it vouches for nobody else.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedsim.federation.network import addresses
from fedsim.federation.network.certificates import (
    make_authority,
    make_node_key,
    prepare,
    write_private,
)
from fedsim.federation.network.identities import KEY_NAME, PEERS_NAME, make_signing_keys
from fedsim.system import paths
from fedsim.types import FedsimError

SECRET_BYTES = 32
"""Of the secret by which a SuperLink knows who may execute its tasks."""
_SECRET = "superexec.secret"  # noqa: S105 - the name of a file


def make_keys(folder: Path, nodes: int, hosts: Sequence[str], *, days: int) -> list[Path]:
    """Writes the folders of a SuperLink, its gate, a runner and `nodes` nodes; returns them.

    Args:
        folder: What they are made in; the folders may be there, as mounted volumes are.
        nodes: How many clients there are, numbered from 0.
        hosts: Names and addresses at which the SuperLink and the gate are reached.
        days: After so many, the certificates end.

    Raises:
        FedsimError: a host is none, one of the files exists, or others may write into a folder.
            Nothing is written.
    """
    if not hosts:
        raise FedsimError("--host: name the SuperLink's and the gate's hosts, as nodes reach them")
    for host in hosts:
        if not addresses.is_host(host):
            raise FedsimError(
                f"--host: expected a name or an address alone, as in server.org, got {host!r}"
            )
    with tempfile.TemporaryDirectory(prefix="fedsim-keys-") as made:
        authority = make_authority(Path(made) / "authority", hosts, days=days)
        root = paths.content(authority.certificate, paths.TEXT)
        server = {
            "server.crt": paths.content(authority.server_certificate, paths.TEXT),
            "server.key": paths.content(authority.server_key, paths.TEXT),
        }
        secret = {_SECRET: secrets.token_bytes(SECRET_BYTES)}
        parties: dict[str, dict[str, bytes]] = {
            "superlink": {**server, **secret},
            "gate": server,
        }
        public: dict[str, bytes] = {}
        signing, peers = make_signing_keys(nodes)
        for client in range(nodes):
            key = Path(made) / f"node-{client}"
            public[f"{key.name}.pub"] = paths.content(make_node_key(key), paths.TEXT)
            parties[key.name] = {
                "key": paths.content(key, paths.TEXT),
                KEY_NAME: signing[client],
                PEERS_NAME: peers,
            }
    parties["runner"] = {**secret, **public}  # the last, so that its ca.crt says that all are there
    for party, files in parties.items():
        prepare(folder / party, [folder / party / name for name in (*files, "ca.crt")])
    for party, files in parties.items():
        for name, content in {**files, "ca.crt": root}.items():
            write_private(folder / party / name, content)
    return [folder / party for party in parties]
