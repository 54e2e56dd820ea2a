"""Checks that a script is safe to import by the worker processes that it starts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType

from fedsim.types import FedsimError


def check() -> None:
    """Refuses a script that calls for worker processes outside `if __name__ == "__main__":`.

    Raises:
        FedsimError: each worker would run the script from its start, and die in it; with the line.
    """
    main = sys.modules["__main__"].__dict__
    path = main.get("__file__")
    if path is None:
        return  # an interactive session or a notebook, which workers do not import
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            if not _guarded(Path(path), frame.f_lineno):
                raise FedsimError(
                    f"{path}, line {frame.f_lineno}: worker processes import this script, and "
                    'would run this line again; put it below `if __name__ == "__main__":`, or use '
                    "workers=1"
                )
            return
        frame = frame.f_back


def _guarded(path: Path, line: int) -> bool:
    """Whether `line` of a script is only reached by the process that was started with it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True  # what cannot be read, such as a frozen program, cannot be judged
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or line
            if first <= line <= last:
                return True
    return False
