"""A temporary folder that is gone after its block, and also when this process is killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsim.system import interrupts

_SWEEP = """\
import pathlib, shutil, sys, time
folder = pathlib.Path(sys.argv[1])
sys.stdin.buffer.read()
for _ in range(50):
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        break
    time.sleep(0.2)
"""
"""Program that waits until its input ends, also by the death of its parent, and then removes the
folder."""


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Makes a temporary folder for its owner alone, removed as the block or process ends."""
    with interrupts.delay_interrupts():
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        sweeper = subprocess.Popen(  # noqa: S603 - this very Python
            [sys.executable, "-I", "-S", "-c", _SWEEP, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A signal to the terminal's whole group must not end the sweeper, too.
            start_new_session=True,
            cwd="/",
        )
    try:
        yield folder
    finally:
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        sweeper.wait()
