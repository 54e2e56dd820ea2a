"""The served page: what it answers, to whom, and that it follows a run."""

from __future__ import annotations

import http.client
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report.serving import PageServer, serve
from fedsim.types import FedsimError, RunFailed


@contextmanager
def served(
    folders: list[Path], token: str | None = None, host: str = "127.0.0.1"
) -> Iterator[PageServer]:
    with PageServer(folders, host, 0, token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: PageServer, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; the path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    return answer.status, dict(answer.headers), answer.read()


@pytest.fixture
def run(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


ROWS = b'popovertarget="r'
"""Stands in the page once for each cell of the matrix, and once for each row of the table."""


def test_it_answers_with_the_page_once_for_each_version(run: Path) -> None:
    with served([run]) as server:
        status, headers, body = ask(server, "/")
        assert status == 200 and b"data-live" in body and ROWS in body
        assert b"connect-src &#39;self&#39;" in body
        assert headers["Cache-Control"] == "no-store"
        assert ask(server, "/", {"If-None-Match": headers["ETag"]})[0] == 304
        assert ask(server, "/", method="HEAD")[2] == b""


def test_a_run_that_grows_is_followed(run: Path) -> None:
    path = run / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]))
    with served([run]) as server:
        _, before, first = ask(server, "/")
        path.write_text("".join(lines))
        _, after, body = ask(server, "/", {"If-None-Match": before["ETag"]})
        assert before["ETag"] != after["ETag"] and body.count(ROWS) > first.count(ROWS)


@pytest.mark.parametrize(
    "path",
    [
        "/results.jsonl",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/page%00",
        "/" + "a" * 20_000,
    ],
)
def test_no_path_names_a_file(run: Path, path: str) -> None:
    with served([run]) as server:
        status, _, body = ask(server, path)
    assert status in (400, 403, 404, 414) and b"root:" not in body and b"psnr" not in body


def test_a_name_that_was_made_to_point_here_reads_nothing(run: Path) -> None:
    with served([run]) as server:
        assert ask(server, "/", {"Host": "evil.example:80"})[0] == 403
        assert ask(server, "/", {"Host": "localhost:80"})[0] == 200


def test_a_token_is_needed_kept_in_a_cookie_and_read_by_this_page_alone(run: Path) -> None:
    with served([run], token="a-secret") as server:  # noqa: S106
        assert server.address.endswith("/?token=a-secret")
        for path in ("/", "/?token=", "/?token=wrong", "/?token=%C3%A9"):
            status, _, body = ask(server, path)
            assert status == 403 and b"psnr" not in body, path
        assert ask(server, "/", {"Cookie": "fedsim_page=wrong"})[0] == 403
        status, headers, _ = ask(server, "/?token=a-secret")
        assert status == 303 and headers["Location"] == "/"
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite" in headers["Set-Cookie"]
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert ask(server, "/", cookie)[0] == 200
        for path in ("/", "/nowhere", "/?token=a-secret"):
            _, headers, _ = ask(server, path, {"Host": "board.example"})
            assert headers["Content-Security-Policy"] == "frame-ancestors 'none'", path
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin", path
            assert headers["Referrer-Policy"] == "no-referrer", path
            assert "Access-Control-Allow-Origin" not in headers, path
        # Behind a token the machine may be reached by any of its names.
        assert ask(server, "/?token=a-secret", {"Host": "board.example"})[0] == 303


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])  # noqa: S104
def test_no_server_is_open_to_others_without_a_token(run: Path, host: str) -> None:
    with pytest.raises(FedsimError, match="give a token"):
        PageServer([run], host, 0, None)


def test_a_taken_port_and_a_missing_folder_are_said(run: Path, tmp_path: Path) -> None:
    with served([run]) as server, pytest.raises(RunFailed, match="name another one"):
        PageServer([run], "127.0.0.1", server.server_address[1], None)
    with pytest.raises(FedsimError, match="no such folder"):
        PageServer([tmp_path / "nowhere"], "127.0.0.1", 0, None)


def test_a_run_without_results_is_waited_for(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "later"
    folder.mkdir()
    with served([folder]) as server:
        status, _, body = ask(server, "/")
        assert status == 200 and ROWS not in body and b"no results.jsonl" in body
        run.rename(folder / "run")
        body = ask(server, "/")[2]
        assert ROWS in body and b"NOT READ" not in body


def test_half_a_line_and_a_damaged_file_do_no_harm(run: Path) -> None:
    path = run / "results.jsonl"
    with served([run]) as server:
        rows = ask(server, "/")[2].count(ROWS)
        with path.open("a") as file:
            file.write('{"scenario": "half a li')
        assert ask(server, "/")[2].count(ROWS) == rows > 0
        path.write_text("no json\n")
        body = ask(server, "/")[2]
        assert body.count(ROWS) == rows and b"NOT READ" in body and b"line 1" in body


@pytest.mark.parametrize(("host", "wanted"), [("0.0.0.0", True), ("127.0.0.1", False)])  # noqa: S104
def test_a_token_is_made_off_the_loopback_interface(
    host: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str | None] = []
    monkeypatch.setattr(PageServer, "serve_forever", lambda self: None)
    serve([tmp_path], host=host, port=0, on_ready=lambda server: tokens.append(server.token))
    (token,) = tokens
    assert (token is not None and len(token) >= 32) == wanted


def test_requests_that_never_end_keep_nobody_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More browsers than are answered at once, each of which sends a byte now and then."""
    monkeypatch.setattr("fedsim.report.serving._Handler.timeout", 1.0)
    ended = threading.Event()

    def drip(address: tuple[str, int]) -> None:
        with suppress(OSError), socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n")
            while not ended.wait(0.3):
                connection.sendall(b"x")

    with served([run]) as server:
        address = ("127.0.0.1", server.server_address[1])
        threads = [threading.Thread(target=drip, args=(address,)) for _ in range(40)]
        try:
            for thread in threads:
                thread.start()
            assert ask(server, "/")[0] == 200
        finally:
            ended.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("error", [OverflowError("too large"), KeyError("half \ud800")])
def test_what_nobody_thought_of_is_said_on_the_page(
    error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("fedsim.report.serving.load_runs", fail)
    with served([run]) as server:
        status, _, body = ask(server, "/")
    assert status == 200 and type(error).__name__.encode() in body


def test_the_command_serves_until_it_is_interrupted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: PageServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupt)
    done = CliRunner().invoke(app, ["serve", str(run), "--port", "0", "--token"])
    assert done.exit_code == 130
    assert done.stdout.startswith("leaderboard: http://127.0.0.1:") and "/?token=" in done.stdout
