"""Writes the leaderboard as one HTML page, to be opened offline or served.

Scripts, style and data stand in the file itself. Its content security policy lets no other script
run and nothing be fetched, but for the data of a served page.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedsim.board.data import board_data
from fedsim.recording.files import write_text
from fedsim.system import paths

_FOLDER = Path(__file__).parent

_LIBRARIES = ("d3.min.js", "plot.min.js", "dataTables.min.js")
_PARTS = ("figures", "state", "matrix", "charts", "rows", "exports", "main")


def write_board(folders: Iterable[Path | str], path: Path | str) -> Path:
    """Writes the page over all runs below `folders` to `path`, and returns it.

    Raises:
        ReportError: a folder holds no results, or a file in it is damaged.
        OSError: the file cannot be written.
    """
    write_text(Path(path), html(board_data(folders)))
    return Path(path)


def html(data: dict[str, Any], live: bool = False) -> str:
    """Returns the page of `data`; a live one asks the server that it came from for newer data."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = _scripts()
    return environment.get_template("board.html.j2").render(
        policy=policy(scripts, live),
        style=Markup(_text("board.css")),  # noqa: S704 - files of this package
        scripts=[Markup(script) for script in scripts],  # noqa: S704
        data=Markup(as_script_data(data)),  # noqa: S704 - has no markup left
        live=live,
    )


def policy(scripts: Iterable[str], live: bool) -> str:
    """Returns the content security policy of a page with these scripts and no other."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    source = "'self'" if live else "'none'"
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {allowed}",
            "style-src 'unsafe-inline'",
            "img-src data:",
            f"connect-src {source}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def as_script_data(data: dict[str, Any]) -> str:
    r"""Returns JSON that no text in it can end the element around it.

    >>> as_script_data({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _scripts() -> list[str]:
    """Returns the libraries, and the page's own parts as one script."""
    own = "\n".join(_text(f"script/{part}.js") for part in _PARTS)
    wrapped = f'(() => {{\n"use strict";\n{own}}})();\n'
    return [*(_text(f"vendor/{name}") for name in _LIBRARIES), wrapped]


def _text(name: str) -> str:
    return paths.text(_FOLDER / name, paths.TEXT)
