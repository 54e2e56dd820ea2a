"""Sphinx's settings for the site of these pages: `sphinx-build -W -c docs/site . build/site`.

The pages are read from where they lie, so that their links hold on the site and in the repository.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import navigation
import reference

project = "fedsim"
author = "the authors of fedsim"
html_title = "fedsim"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/*.md"]
exclude_patterns = [".*", "build", "dist", "runs", "outputs", "tests", "fedsim.egg-info"]

html_theme = "furo"
html_static_path = ["style"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_heading_anchors = 6
smartquotes = False  # quotes and dashes are shown as they are written
default_role = "code"  # a docstring's `name` is code
autodoc_typehints = "description"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

GENERATED = {
    "docs/commands": reference.commands,
    "docs/glossary": reference.glossary,
    "docs/plugins": reference.plugins,
    "docs/python": reference.python,
}
"""Pages that are gone on with from the program itself."""


def complete(app: Sphinx, name: str, source: list[str]) -> None:
    """Add to a page what is not written by hand: navigation, commands, plugins, functions."""
    source[0] = navigation.without_folders(source[0], (Path(app.srcdir) / name).parent)
    if name == root_doc:
        index = (Path(app.srcdir) / "docs/README.md").read_text(encoding="utf-8")
        source[0] += navigation.toctrees(navigation.groups(index))
    elif name in GENERATED:
        source[0] += "\n" + GENERATED[name]()


def always_written(app: Sphinx, *_: Any) -> list[str]:
    """The pages that depend on more than their own file."""
    return [root_doc, *(name for name in GENERATED if name in app.env.found_docs)]


def set_dashes(app: Sphinx, tree: nodes.document) -> None:
    """Between an argument and what it is stands a dash, not the two signs that Sphinx writes."""
    for text in list(tree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def write_index(app: Sphinx, error: Exception | None) -> None:
    """The front page is also what a folder's address shows."""
    if error is None and app.builder.format == "html":
        out = Path(app.outdir)
        shutil.copyfile(out / f"{root_doc}.html", out / "index.html")


def setup(app: Sphinx) -> None:
    """Connects the above."""
    app.connect("source-read", complete)
    app.connect("env-get-outdated", always_written)
    app.connect("doctree-read", set_dashes)
    app.connect("build-finished", write_index)
