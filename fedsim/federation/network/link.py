"""Where a federation's SuperLink is, and how one speaks with it. Imports nothing of Flower."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedsim.system import addresses, paths
from fedsim.types import FedsimError

SCENARIO = "scenario"
"""Value of a node's data option that stands for its client's share of the scenario's own source."""

# How long a host may take to answer before it counts as not there.
_REACH_SECONDS = 4.0
# An HTTP server answers this in plain text; a TLS server takes it for no beginning of TLS.
_HELLO = b"GET / HTTP/1.0\r\n\r\n"
# A clock that is further ahead or behind makes signatures that Flower does not take.
_AHEAD_SECONDS, _BEHIND_SECONDS = 5.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """Way by which a run reaches the SuperLink that carries its messages."""

    superlink: str
    """Address of the SuperLink, HOST:PORT."""
    roots: Path | None = None
    """File of certificates that may vouch for the SuperLink (PEM); None: no TLS, on loopback."""
    secret: Path | None = None
    """File of the secret by which the SuperLink knows who may execute its tasks; None without
    one."""
    shared_seed: bool = False
    """Whether nodes draw batches and noise from the scenario's seed, as on the other engines.
    Results are then the same bytes, but whoever knows the seed can take the noise off."""

    def certificates(self) -> bytes | None:
        """Returns the bytes of `roots` (PEM), None without; an unreadable file is an OSError."""
        return None if self.roots is None else paths.content(self.roots, paths.TEXT)


def check(address: str, roots: Path | None) -> None:
    """Refuses, by a FedsimError, a SuperLink at `address` (HOST:PORT) that cannot be trusted.

    It must answer and, beyond loopback, use TLS. `roots` is the file of certificates that vouch for
    it; None for no TLS.
    """
    if reason := addresses.unfit(address, has_roots=roots is not None):
        raise FedsimError(f"--superlink: {reason}")
    host, port = addresses.split(address)
    context = None if roots is None else _trusting(roots)
    try:
        with socket.create_connection((host, port), timeout=_REACH_SECONDS) as plain:
            if context is None:
                _refuse_tls(plain, address)
            else:
                _refuse_certificate(plain, host, context, address)
    except OSError as error:
        raise FedsimError(
            f"--superlink: nobody answers at {address}: {error}; start it first, or check the "
            "address"
        ) from error


def clock_error(address: str, roots: Path | None) -> str:
    """Returns a text on how far this machine's clock is off the server's at `address`, HOST:PORT.

    It is empty if the clocks are close enough, or the server does not answer. `roots` is the file
    of certificates that vouch for the server; None for no TLS. A malformed address is a ValueError.
    """
    host, port = addresses.split(address)
    try:
        connection = http.client.HTTPConnection(host, port, timeout=_REACH_SECONDS)
        if roots is not None:
            context = _trusting(roots)
            connection = http.client.HTTPSConnection(
                host, port, timeout=_REACH_SECONDS, context=context
            )
        with closing(connection):
            connection.request("GET", "/")
            # Any answer will do: every HTTP server dates its answers.
            dated = connection.getresponse().headers["date"] or ""
        ahead = time.time() - parsedate_to_datetime(dated).timestamp()
    except (OSError, ValueError, TypeError, FedsimError, http.client.HTTPException):
        return ""
    if -_BEHIND_SECONDS < ahead < _AHEAD_SECONDS:
        return ""
    where = "ahead of" if ahead > 0 else "behind"
    return (
        f"this machine's clock is {abs(ahead):.0f} s {where} the server's, which so takes no "
        "signature of it; set the clock"
    )


def _refuse_tls(plain: socket.socket, address: str) -> None:
    try:
        plain.sendall(_HELLO)
        answered = plain.recv(5)
    except ConnectionError:  # what it takes for the beginning of TLS is none
        answered = b""
    if not answered.startswith(b"HTTP"):
        raise FedsimError(
            f"--superlink: {address} speaks TLS; give the certificate of its authority with "
            "--root-certificates"
        )


def _trusting(roots: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(roots))
    except (OSError, ssl.SSLError) as error:
        raise FedsimError(f"--root-certificates: {roots}: no certificate: {error}") from error


def _refuse_certificate(
    plain: socket.socket, host: str, context: ssl.SSLContext, address: str
) -> None:
    try:
        with context.wrap_socket(plain, server_hostname=host):
            pass
    except ssl.SSLCertVerificationError as error:
        raise FedsimError(
            f"--superlink: {address} has a certificate that is not accepted: {error.verify_message}"
        ) from error
    except ssl.SSLError as error:
        raise FedsimError(f"--superlink: {address} does not speak TLS: {error.reason}") from error
