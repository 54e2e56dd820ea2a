"""Every file that a user names is a regular one of a bounded size, whoever reads it."""

from __future__ import annotations

import ast
import functools
import os
import re
import tracemalloc
from pathlib import Path

import pytest

from fedsim.system import paths
from fedsim.types import FedsimError

ROOT = Path(__file__).parents[2]
OPENERS = {"open", "fdopen", "read_bytes", "read_text", "ZipFile", "safe_open", "load_file"}
OPENERS |= {"fromfile", "memmap", "loadtxt", "mmap"}
LIBRARIES = {"ZipFile", "safe_open", "load_file"}
"""Which take a name: the function that calls them has it looked at by `regular`."""
ALLOWED = {
    "fedsim/system/paths.py": "the way itself",
    "fedsim/cli/stand_ins.py": "the pipe to its child",
    "fedsim/system/memory.py": "the kernel's files",
    "fedsim/system/lock.py": "a lock of its own, and no link",
    "fedsim/recording/files.py": "writes to a temporary file of its own",
    "fedsim/federation/simulation.py": "a log of its own, and the pipes to its parent",
    "fedsim/federation/spool.py": "files that the process has written in a folder of its own",
    "fedsim/federation/network/up.py": "a key that it has just made",
    "fedsim/federation/network/superlink.py": "a log of its own",
}
"""Files that read what no user names, and what that is."""


def reads_nothing_named(call: ast.Call) -> bool:
    """Whether a call only writes, makes a new file, or reads memory or a path that is constant."""
    modes = [node.value for node in call.args if isinstance(node, ast.Constant)]
    text = ast.unparse(call)
    return (
        any(re.fullmatch(r"[wxa]b?", str(mode)) for mode in modes)
        or "O_EXCL" in text
        or "(io.BytesIO(" in text
        or text.startswith("Path('/proc/")
    )


@functools.cache
def openings() -> list[tuple[str, str, str]]:
    """(file, called, source of the function around it) of each call that opens a file to read."""
    found = []
    named = re.compile(rf"\b({'|'.join(OPENERS)}|load)\(")
    for folder in ("fedsim", "attacks", "defenses"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not named.search(text):
                continue
            tree = ast.parse(text)
            functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else None
                name = called.id if isinstance(called, ast.Name) else name
                whole = ast.unparse(called)
                if name not in OPENERS and whole not in ("torch.load", "numpy.load", "np.load"):
                    continue
                if reads_nothing_named(node):
                    continue
                around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
                inner = max(around, key=lambda f: f.lineno) if around else None
                source = ast.get_source_segment(text, inner) or "" if inner else ""
                found.append((path.relative_to(ROOT).as_posix(), name or whole, source))
    return found


def test_nothing_opens_files_beside_the_one_way() -> None:
    calls = [
        f"{file}: {called}"
        for file, called, source in openings()
        if file not in ALLOWED
        and not ((called in LIBRARIES or called.endswith("load")) and "regular(" in source)
    ]
    assert not calls, "open files by fedsim.system.paths"


def test_the_search_finds_what_it_is_for() -> None:
    calls = {(file, called) for file, called, _ in openings()}
    assert ("fedsim/recording/files.py", "safe_open") in calls
    assert ("fedsim/data/tree.py", "ZipFile") in calls
    assert {file for file, _ in calls} >= set(ALLOWED)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large", "sparse", "nul"])
def test_only_regular_files_of_a_bounded_size_are_opened(kind: str, tmp_path: Path) -> None:
    path, message = tmp_path / "x", {"pipe": "a named pipe", "device": "a device"}.get(kind, "")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
        message = "a folder"
    elif kind == "nul":
        path, message = Path("a\0b"), "no file name"
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40 if kind == "sparse" else 2_000_000)
        message = "and at most 1.0 MiB are read"
    with pytest.raises(FedsimError, match=message):
        paths.content(path, paths.MIB)
    with pytest.raises(FedsimError, match=message):
        paths.regular(path, paths.MIB)


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1" * 100)
    monkeypatch.setattr(paths, "_check", lambda *given: None)
    with pytest.raises(FedsimError, match="at most"):
        paths.content(path, 10)


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1" * 100)
    tracemalloc.start()
    try:
        assert paths.content(path, paths.LINES) == b"1" * 100
        assert tracemalloc.get_traced_memory()[1] < 4 * paths.MIB
    finally:
        tracemalloc.stop()
    assert paths.content(Path("/proc/self/status"), paths.MIB), "a file that tells no size"


def test_folders_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "kept").mkdir(mode=0o500)
    for name in ("file", "file/x", "loop", "loop/x", "lost", "n" * 300, "a\0b"):
        with pytest.raises(FedsimError, match="--out"):
            paths.writable_folder(tmp_path / name, "--out")
    paths.writable_folder(tmp_path / "new" / "deep", "--out")
    paths.writable_folder(tmp_path, "--out")
