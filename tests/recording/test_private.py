"""Who may read what fedsim writes: its owner alone, if it is a client's or leaks one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.federation.client_state import ClientState
from fedsim.federation.network.home import make_private, secret_seed
from fedsim.recording.exchanges import Recorder
from fedsim.recording.files import write_bytes, write_tensors, write_text
from fedsim.recording.truth import copy, save_truth
from fedsim.system.lock import lock_folder
from fedsim.types import FedsimError, GroundTruth


@pytest.fixture(autouse=True)
def _careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def readable(path: Path) -> list[str]:
    """The files below `path` that others may read."""
    return [one.name for one in path.rglob("*") if one.is_file() and one.stat().st_mode & 0o077]


def test_what_is_of_a_client_is_for_its_owner(tmp_path: Path) -> None:
    truth = GroundTruth(images=torch.zeros(1, 1, 2, 2), labels=torch.zeros(1, dtype=torch.int64))
    save_truth(truth, tmp_path / "node", "none/round-0001/client-0000-training", 0)
    assert copy(tmp_path / "node", tmp_path / "run") == 1
    state = ClientState(tmp_path, "none", 0)
    state.save(1, {"a": torch.zeros(1)}, 1)
    state.save_sent(1, {"a": torch.zeros(1)})
    state.save_sum(1, {})
    state.answer((1,), [{"a": torch.zeros(1)}])
    state.open_sum(1, [0])
    write_tensors(tmp_path / "update.safetensors", {"a": torch.zeros(1)})
    recorder = Recorder(tmp_path, 7, "server", rounds=None, clients=None, max_bytes=10**6)
    recorder.save_broadcast(1, {"a": np.zeros(1)})
    assert len(list(tmp_path.rglob("*.*"))) >= 8
    assert not readable(tmp_path)


def test_a_page_is_for_whom_the_umask_lets(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        os.umask(umask)
        write_text(tmp_path / "page.html", "")
        assert (tmp_path / "page.html").stat().st_mode & 0o777 == mode
        write_bytes(tmp_path / "key", b"", private=True)
        assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_folders_of_runs_and_nodes_are_closed(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "runs" / "one"):
        assert (tmp_path / "runs" / "one").stat().st_mode & 0o777 == 0o700
    secret_seed(tmp_path / "home", "ab" * 8)
    for name in ("home", "new", "empty", "old", "other"):
        home = tmp_path / name
        if name not in ("home", "new"):
            home.mkdir()
        if name in ("old", "other"):
            (home / {"old": "secret", "other": "letter"}[name]).touch()
        if name != "other":
            make_private(home)
            assert home.stat().st_mode & 0o777 == 0o700
            continue
        with pytest.raises(FedsimError, match=r"--home: .*chmod 700"):
            make_private(home)
        assert home.stat().st_mode & 0o777 == 0o777, "it is not fedsim's to close"
        home.chmod(0o700)
        make_private(home)
