"""HOST:PORT, read and listened at. Imports the standard library alone."""

from __future__ import annotations

import ipaddress
import re
import socket

_NAME_LENGTH = 253
# A host's name. Digits and dots alone would be a malformed IP address.
_NAME = re.compile(r"(?![0-9.]+$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]{1,63})*")
# Clients that may wait to be accepted.
_BACKLOG = 128


def split(address: str) -> tuple[str, int]:
    """Splits HOST:PORT or [HOST]:PORT into (host, port), both unchecked; else a ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def is_host(text: str) -> bool:
    """Returns whether `text` looks like an IP address or a host's name, without port or scheme."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= _NAME_LENGTH and bool(_NAME.fullmatch(text))
    return True


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches `host`: `localhost`, or a loopback IP address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def unfit(address: str, *, has_roots: bool) -> str | None:
    """Returns why nobody may connect to `address`, HOST:PORT, as text; None if one may.

    Without root certificates to verify its TLS (`has_roots` False), it has to be on loopback.
    """
    try:
        host, port = split(address)
    except ValueError:
        port = 0  # refused below
    if not 0 < port < 2**16:
        return f"expected HOST:PORT, got {address!r}"
    if has_roots or is_loopback(host):
        return None
    return (
        f"{host} is another machine, and without TLS everybody on the way reads the updates; give "
        "the certificate of its authority with --root-certificates"
    )


def listener(address: str) -> socket.socket:
    """Returns a socket, which the caller closes, that listens at HOST:PORT (port 0: a free one).

    A malformed address is a ValueError, a port above 65535 an OverflowError, a failure an OSError.
    """
    host, port = split(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def address_of(server: socket.socket) -> str:
    """Returns the address of a listening socket, as HOST:PORT or [HOST]:PORT."""
    host, port = server.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
