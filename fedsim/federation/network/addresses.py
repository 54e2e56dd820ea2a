"""HOST:PORT, read and listened at. Imports the standard library alone."""

from __future__ import annotations

import socket

_BACKLOG = 128
"""Clients that may wait to be accepted."""


def split(address: str) -> tuple[str, int]:
    """HOST:PORT or [HOST]:PORT -> (HOST, PORT).

    Raises:
        ValueError: it is of another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def listener(address: str) -> socket.socket:
    """A socket that listens at `address`; port 0 takes a free one.

    Raises:
        OSError: the address is taken, or not of this machine.
        ValueError: it is no address.
    """
    host, port = split(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def address_of(server: socket.socket) -> str:
    """HOST:PORT of a socket that listens."""
    host, port = server.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
