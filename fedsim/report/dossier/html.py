"""Sets a dossier as one HTML file that opens anywhere, with nothing to fetch and no script."""

from __future__ import annotations

import base64
from pathlib import Path

from fedsim.report.dossier.document import Document, command_lines
from fedsim.report.wording import straight


def html_of(document: Document) -> str:
    """Returns the page; everything that the document holds is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "uri": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
        "command": lambda words: "\n".join(command_lines(words)),
    }
    return straight(environment.get_template("dossier.html.j2").render(document=document))
