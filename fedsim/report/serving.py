"""Serves the page of runs to browsers while they go on; no part of a request names a file."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fedsim.report.content import Content
from fedsim.report.page import html_of
from fedsim.results.reading import RESULTS, load_runs
from fedsim.results.record import PLAN
from fedsim.system.addresses import is_loopback
from fedsim.system.lock import is_locked
from fedsim.types import FedsimError, RunFailed

PORT = 8321

_FILES = (PLAN, RESULTS, "rounds.jsonl", "audit.jsonl", "record.json", "scenario.yaml")

_LONGEST = 1000
"""Why runs cannot be read is cut behind so many characters."""

_COOKIE = "fedsim_page"

_SILENCE = 10.0
"""A browser that sends or takes nothing for so many seconds is hung up on."""

_AT_ONCE = 32
"""So many requests are answered at once; further ones wait."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _WatchedPage:
    """The page of some run folders, built again only if they changed; safe for several threads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Reads nothing yet; `folders` are of runs, or hold folders of runs."""
        self._folders = folders
        self._lock = threading.Lock()
        self._signature: tuple[tuple[str, int, int], ...] | None = None
        self._content = Content([])
        self._body = b""

    def current(self) -> tuple[bytes, str]:
        """Returns the page of the folders, and a tag that no other page has."""
        with self._lock:
            signature = self._sign()
            if signature != self._signature:
                try:
                    # Where they cannot be read, the page is that of the last time, and says why.
                    content = Content(load_runs(self._folders))
                    self._body, self._content = _encode(content), content
                except Exception as error:  # else the page would stand still, and nobody be told
                    problem = str(error)
                    if not isinstance(error, FedsimError | OSError):
                        problem = f"{type(error).__name__}: {error}"
                    problem = problem.encode(errors="backslashreplace").decode()
                    self._body = _encode(self._content, problem[:_LONGEST])
                self._signature = signature
            return self._body, f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'

    def _sign(self) -> tuple[tuple[str, int, int], ...]:
        entries = []
        found = [p for f in self._folders for name in (RESULTS, PLAN) for p in f.rglob(name)]
        for run in sorted({path.parent for path in found}):
            entries.append((str(run), int(is_locked(run)), 0))  # a kill changes no file
            for path in (run / name for name in _FILES):
                with suppress(OSError):
                    status = path.stat()
                    entries.append((str(path), status.st_mtime_ns, status.st_size))
        return tuple(entries)


def _encode(content: Content, problem: str = "") -> bytes:
    return html_of(content, live=True, problem=problem).encode()


class PageServer(ThreadingHTTPServer):
    """Serves the page of run folders over HTTP; a `with` block closes it at its end."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str, port: int, token: str | None) -> None:
        """Listens at once; `serve_forever` answers. `port` 0 stands for any free one.

        `folders` are of runs, or hold folders of runs. `token` is what a request must have, as
        `/?token=...`; None only on the loopback interface. A FedsimError says that a folder or that
        token is missing, a RunFailed that the address is taken, or is none of this machine's.
        """
        for folder in folders:
            if not folder.is_dir():
                raise FedsimError(f"{folder}: no such folder; name a run's output folder")
        if token is None and not is_loopback(host):
            raise FedsimError(
                f"--host {host}: whoever reaches this machine could read the page; give a token"
            )
        self.page = _WatchedPage(folders)
        self.token = token
        self.host = host
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise RunFailed(
                f"--host {host} --port {port}: {error.strerror or error}; name another one"
            ) from error

    @property
    def address(self) -> str:
        """Address to open, with the token if one is needed."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = f"?token={self.token}" if self.token else ""
        return f"http://{host}:{self.server_address[1]}/{query}"

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Answers one request, once fewer than 32 others are being answered."""
        with self._places:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]

    def handle_error(self, request: object, client_address: object) -> None:
        """Does nothing: a browser that left before it had its answer is no error."""


def serve(
    folders: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    demand_token: bool = False,
    on_ready: Callable[[PageServer], None],
) -> None:
    """Serves the page over HTTP until a KeyboardInterrupt, which it passes on.

    A FedsimError says that a folder is missing, a RunFailed that the address is taken, or is none
    of this machine's.

    Args:
        folders: Folders of runs, or that hold folders of runs.
        host: Name or address to listen on; off the loopback interface a token is needed.
        port: Port to listen on; 0 for any free one.
        demand_token: Whether a token is needed on the loopback interface, too.
        on_ready: Function that is called with the server once it listens.
    """
    needed = demand_token or not is_loopback(host)
    token = secrets.token_urlsafe(24) if needed else None
    with PageServer(folders, host, port, token) as server:
        on_ready(server)
        server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _SILENCE
    server_version = "fedsim"
    sys_version = ""

    def handle_one_request(self) -> None:
        """Hangs up on a request that comes byte by byte: the timeout is one of silence alone."""
        connection = self.connection

        def hang_up() -> None:
            with suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RD)

        self._deadline = threading.Timer(self.timeout, hang_up)
        self._deadline.daemon = True
        self._deadline.start()
        try:
            super().handle_one_request()
        finally:
            self._deadline.cancel()

    def do_GET(self) -> None:
        self._deadline.cancel()
        url = urlsplit(self.path)
        if not self._names_this_host():
            # Another site's name that was made to point here must not read the page.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"no such host here\n")
        elif url.path != "/":
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")
        elif self.server.token is not None and self._is_token(parse_qs(url.query).get("token")):
            cookie = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Lax; Path=/"
            headers = {"Set-Cookie": cookie, "Location": "/"}
            self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", headers)
        elif self.server.token is not None and not self._is_token([self._cookie()]):
            text = b"open the address that the terminal of `fedsim serve` shows, with its token\n"
            self._send(HTTPStatus.FORBIDDEN, "text/plain", text)
        else:
            body, tag = self.server.page.current()
            known = self.headers.get("If-None-Match") == tag
            status = HTTPStatus.NOT_MODIFIED if known else HTTPStatus.OK
            kind = "text/html; charset=utf-8"
            self._send(status, kind, b"" if known else body, {"ETag": tag})

    do_HEAD = do_GET  # noqa: N815 - the name that http.server asks for

    def log_message(self, format: str, *args: object) -> None:
        """Writes no line for a request: its address may hold the token."""

    def _names_this_host(self) -> bool:
        """Whether the request is for a name of this server; behind a token any name will do."""
        if self.server.token is not None:
            return True
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return name is not None and (is_loopback(name) or name == self.server.host)

    def _is_token(self, values: Sequence[str] | None) -> bool:
        wanted = (self.server.token or "").encode()
        return any(hmac.compare_digest(value.encode(), wanted) for value in values or ())

    def _cookie(self) -> str:
        try:
            morsel = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return ""
        return morsel.value if morsel else ""

    def _send(
        self,
        status: HTTPStatus,
        kind: str,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
