"""The served page: what it answers, to whom, and that it follows a run."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from board_runs import read, rewrite
from browser import Browser
from synthetic_run import STACKS, write_run

from fedsim.board import BoardServer, serve
from fedsim.results.reading import load_runs
from fedsim.types import FedsimError, RunFailed


@contextmanager
def served(
    folders: list[Path], token: str | None = None, host: str = "127.0.0.1"
) -> Iterator[BoardServer]:
    with BoardServer(folders, host, 0, token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: BoardServer, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; the path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    return answer.status, dict(answer.headers), answer.read()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    stacks = {name: STACKS[name] for name in ("none", "dp")}
    return write_run(tmp_path / "run", stacks=stacks, trials=2, batch_sizes=(1,), rounds=2)


def test_it_answers_with_the_page_and_the_data(run: Path) -> None:
    with served([run]) as server:
        status, headers, body = ask(server, "/")
        assert status == 200 and b'data-live="true"' in body
        assert (
            "connect-src &#39;self&#39;" in body.decode() or "connect-src 'self'" in body.decode()
        )
        assert headers["Cache-Control"] == "no-store"
        status, headers, body = ask(server, "/data")
        assert status == 200 and len(json.loads(body)["rows"]) == 6
        assert ask(server, "/data", {"If-None-Match": headers["ETag"]})[0] == 304
        assert ask(server, "/data", method="HEAD")[2] == b""


@pytest.mark.parametrize(
    "path",
    [
        "/results.jsonl",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/data/../results.jsonl",
        "/data%00",
        "/script/main.js",
        "file:///etc/passwd",
        "/" + "a" * 20_000,
    ],
)
def test_no_path_names_a_file(run: Path, path: str) -> None:
    with served([run]) as server:
        status, _, body = ask(server, path)
    assert status in (400, 403, 404, 414) and b"root:" not in body and b"psnr" not in body


def test_other_methods_are_refused(run: Path) -> None:
    with served([run]) as server:
        assert {ask(server, "/", method=m)[0] for m in ("POST", "PUT", "DELETE")} == {501}


def test_a_name_that_was_made_to_point_here_reads_nothing(run: Path) -> None:
    with served([run]) as server:
        assert ask(server, "/data", {"Host": "evil.example:80"})[0] == 403
        assert ask(server, "/data", {"Host": "localhost:80"})[0] == 200


def test_a_token_is_needed_and_kept_in_a_cookie(run: Path) -> None:
    with served([run], token="a-secret") as server:  # noqa: S106
        assert server.address.endswith("/?token=a-secret")
        for path in ("/", "/data", "/data?token=", "/data?token=wrong", "/?token=%C3%A9"):
            status, _, body = ask(server, path)
            assert status == 403 and b"psnr" not in body, path
        assert ask(server, "/data", {"Cookie": "fedsim_board=wrong"})[0] == 403
        status, headers, _ = ask(server, "/?token=a-secret")
        assert status == 303 and headers["Location"] == "/"
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite" in headers["Set-Cookie"]
        cookie = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
        assert ask(server, "/data", cookie)[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])  # noqa: S104
def test_no_server_is_open_to_others_without_a_token(run: Path, host: str) -> None:
    with pytest.raises(FedsimError, match="give a token"):
        BoardServer([run], host, 0, None)


def test_a_taken_port_and_a_missing_folder_are_said(run: Path, tmp_path: Path) -> None:
    with served([run]) as server, pytest.raises(RunFailed, match="name another one"):
        BoardServer([run], "127.0.0.1", server.server_address[1], None)
    with pytest.raises(FedsimError, match="no such folder"):
        BoardServer([tmp_path / "nowhere"], "127.0.0.1", 0, None)


def test_a_run_without_results_is_waited_for(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "later"
    folder.mkdir()
    with served([folder]) as server:
        document = json.loads(ask(server, "/data")[2])
        assert document["rows"] == [] and "no results.jsonl" in document["problem"]
        assert ask(server, "/")[0] == 200
        run.rename(folder / "run")
        document = json.loads(ask(server, "/data")[2])
        assert len(document["rows"]) == 6 and "problem" not in document


def test_half_a_line_and_a_damaged_file_do_no_harm(run: Path) -> None:
    path = run / "results.jsonl"
    with served([run]) as server:
        rows = json.loads(ask(server, "/data")[2])["rows"]
        with path.open("a") as file:
            file.write('{"scenario": "half a li')
        assert json.loads(ask(server, "/data")[2])["rows"] == rows
        path.write_text("no json\n")
        document = json.loads(ask(server, "/data")[2])
        assert document["rows"] == rows and "line 1" in document["problem"]


HALF = '{"scenario": "ward", "variant": {"a": "\\ud800"}}'


@pytest.mark.parametrize("name", ["plan.json", "record.json"])
def test_half_a_character_is_refused_where_it_is_read(name: str, run: Path) -> None:
    (run / name).write_text(HALF)
    with pytest.raises(FedsimError, match=name):
        load_runs([run])


def test_half_a_character_and_no_number_do_not_stop_the_server(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("\ud800", float("nan")):
        monkeypatch.setattr("fedsim.board.watch.board_data", lambda _, value=value: {"rows": value})
        with served([run]) as server:
            assert ask(server, "/")[0] == 200
            assert json.loads(ask(server, "/data")[2])["problem"]


def test_a_folder_whose_name_is_no_text_is_refused(run: Path) -> None:
    run.rename(os.fsdecode(bytes(run) + b"-\xff"))
    with pytest.raises(FedsimError, match="rename"):
        load_runs([run.parent])
    with served([run.parent]) as server:
        assert json.loads(ask(server, "/data")[2])["problem"]
        assert ask(server, "/")[0] == 200


def test_every_answer_may_be_read_by_this_page_alone(run: Path) -> None:
    with served([run], token="a-secret") as server:  # noqa: S106
        for path in ("/", "/data", "/nowhere", "/?token=a-secret"):
            _, headers, _ = ask(server, path, {"Host": "board.example"})
            assert headers["Content-Security-Policy"] == "frame-ancestors 'none'", path
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin", path
            assert headers["Referrer-Policy"] == "no-referrer", path
            assert "Access-Control-Allow-Origin" not in headers, path
        # Behind a token the machine may be reached by any of its names.
        assert ask(server, "/?token=a-secret", {"Host": "board.example"})[0] == 303


@pytest.mark.parametrize(("host", "wanted"), [("0.0.0.0", True), ("127.0.0.1", False)])  # noqa: S104
def test_a_token_is_made_off_the_loopback_interface(
    host: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str | None] = []
    monkeypatch.setattr(BoardServer, "serve_forever", lambda self: None)
    serve([tmp_path], host=host, port=0, on_ready=lambda server: tokens.append(server.token))
    (token,) = tokens
    assert (token is not None and len(token) >= 32) == wanted


def test_requests_that_never_end_keep_nobody_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More browsers than are answered at once, each of which sends a byte now and then."""
    monkeypatch.setattr("fedsim.board.server._Handler.timeout", 1.0)
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
            assert ask(server, "/data")[0] == 200
        finally:
            ended.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("error", [OverflowError("too large"), KeyError("psnr")])
def test_what_nobody_thought_of_is_said_on_the_page(
    error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("fedsim.board.watch.board_data", fail)
    with served([run]) as server:
        status, _, body = ask(server, "/data")
    assert status == 200 and type(error).__name__ in json.loads(body)["problem"]


def test_the_page_follows_a_run_and_can_be_paused(browser: Browser, run: Path) -> None:
    rows = read(run)
    rewrite(run, [row for row in rows if row["defense"]["name"] == "none"])
    with served([run]) as server:
        browser.open(server.address)
        assert browser.texts("#worst h3") == ["none"]
        browser.choose("metric", "SSIM")
        rewrite(run, rows)
        browser.wait(lambda: browser.texts("#worst h3") == ["none", "dp"])
        assert "metric=ssim" in browser.address()
        browser.click("#pause")
        assert browser.text("#live") == "paused"
        assert (
            browser.run("return document.getElementById('pause').getAttribute('aria-pressed')")
            == "true"
        )
        browser.click("#pause")
    browser.wait(lambda: "does not answer" in browser.text("#live"))
    browser.open("about:blank#rows", drawn=False)


def test_a_page_that_waits_for_its_first_result_says_so(browser: Browser, tmp_path: Path) -> None:
    with served([tmp_path]) as server:
        browser.open(server.address)
        browser.wait(lambda: "no results.jsonl" in browser.text("#live"))
        assert "No run yet" in browser.text("#status")
        assert [text for text in browser.complaints() if "SEVERE" in text] == []


def test_the_command_serves_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "fedsim", "serve", str(run), "--port", "0", "--token"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # What runs the tests in the background may ignore it, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("leaderboard: http://127.0.0.1:") and "/?token=" in line
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
