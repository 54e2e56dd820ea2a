"""Sets a dossier as a PDF: text that can be selected, bookmarks, page numbers, no time of now."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from fedsim.report.dossier.document import (
    Block,
    Chapter,
    Commands,
    Document,
    Facts,
    Heading,
    Literal,
    Notice,
    Paragraph,
    Pictures,
    Points,
    Table,
    command_lines,
)
from fedsim.report.pictures import NEAREST, from_png
from fedsim.words import printable

_FONTS = {
    "FedsimSans": "DejaVuSans.ttf",
    "FedsimSans-Bold": "DejaVuSans-Bold.ttf",
    "FedsimMono": "DejaVuSansMono.ttf",
}
"""Names of the fonts, and their files, which come with matplotlib."""

_MARGIN, _WIDTH, _HEIGHT = 54.0, 595.28, 841.89
"""A4 in points."""
_INNER = _WIDTH - 2 * _MARGIN
_INK, _MUTED, _RULE, _WARN, _SHADE = "#1a1d21", "#59616b", "#d5d9de", "#9a3412", "#f4f5f7"
_COLUMNS = 116
"""Characters of a line of code; longer ones are broken."""
_POINTS_PER_PIXEL = 0.75
_FIXED = "\N{NO-BREAK SPACE}"
_ENLARGED = 4
"""Images are enlarged before they are set, since readers blur what they enlarge themselves."""


def pdf_of(document: Document) -> bytes:
    """Returns the PDF; the same document gives the same bytes."""
    _register_fonts()
    # The first pass finds on which page each chapter begins, and how many pages there are.
    first = _Pass(document, [0] * len(document.chapters), 0)
    first.build()
    second = _Pass(document, first.begins, first.pages)
    return second.build()


@cache
def _register_fonts() -> None:
    import matplotlib
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for name, file in _FONTS.items():
        pdfmetrics.registerFont(TTFont(name, str(folder / file)))


@cache
def _glyphs(font: str) -> frozenset[int]:
    from reportlab.pdfbase import pdfmetrics

    return frozenset(pdfmetrics.getFont(font).face.charToGlyph)


def _shown(text: str, font: str = "FedsimSans") -> str:
    """Replaces what the font cannot show by its code point, so that nothing is lost unseen."""
    known = _glyphs(font)
    # A space that does not break is not printable, and is meant.
    parts = [printable(part) for part in text.split(_FIXED)]
    return _FIXED.join(
        "".join(c if ord(c) in known else f"[U+{ord(c):04X}]" for c in part) for part in parts
    )


class _Pass:
    """One pass over the document, with the page numbers that the pass before it has found."""

    def __init__(self, document: Document, begins: Sequence[int], pages: int) -> None:
        self.document, self.expected, self.total = document, begins, pages
        self.begins: list[int] = []
        self.pages = 0
        self.styles = _styles()

    def build(self) -> bytes:
        """Returns the file."""
        from reportlab.platypus import BaseDocTemplate, Frame, PageTemplate

        outer = self

        class Template(BaseDocTemplate):  # type: ignore[misc]
            def afterFlowable(self, flowable: Any) -> None:  # noqa: N802
                outer.mark(self.canv, flowable, self.page)

        stream = io.BytesIO()
        template = Template(
            stream,
            pagesize=(_WIDTH, _HEIGHT),
            title=_shown(self.document.title),
            subject=_shown(self.document.subtitle),
            author="fedsim",
            creator="fedsim",
            lang="en",
            invariant=1,
            pageCompression=1,
        )
        frame = Frame(_MARGIN, _MARGIN, _INNER, _HEIGHT - 2 * _MARGIN, 0, 0, 0, 0, id="text")
        template.addPageTemplates(PageTemplate(id="page", frames=[frame], onPage=self.foot))
        template.build(self.story())
        self.pages = template.page
        return stream.getvalue()

    def mark(self, canvas: Any, flowable: Any, page: int) -> None:
        """Enters a heading that was just set among the bookmarks."""
        entry = getattr(flowable, "bookmark", None)
        if entry is None:
            return
        text, level, key = entry
        canvas.bookmarkPage(key)
        canvas.addOutlineEntry(text, key, level, closed=level == 0)
        if level == 0:
            self.begins.append(page)

    def foot(self, canvas: Any, template: Any) -> None:
        """Draws a page's foot: the title, and the page's number."""
        canvas.saveState()
        canvas.setFont("FedsimSans", 7)
        canvas.setFillColor(_MUTED)
        title = _shown(self.document.title)
        canvas.drawString(_MARGIN, _MARGIN / 2, title if len(title) < 80 else f"{title[:79]}…")
        canvas.drawRightString(
            _WIDTH - _MARGIN, _MARGIN / 2, f"page {template.page} of {self.total}"
        )
        canvas.restoreState()

    def story(self) -> list[Any]:
        """Returns everything that is set, in order."""
        from reportlab.platypus import Spacer

        flowables = [
            self.text(self.document.title, "title"),
            self.text(self.document.subtitle, "subtitle"),
            Spacer(1, 10),
            *self.contents(),
        ]
        for number, chapter in enumerate(self.document.chapters, start=1):
            flowables += self.chapter(number, chapter)
        return flowables

    def contents(self) -> list[Any]:
        """Sets the list of chapters with their pages, which are links."""
        from reportlab.platypus import Table as Grid

        rows = [
            [
                self.text(f"{number}. {chapter.title}", "contents", link=f"chapter-{number}"),
                self.text(str(page), "page"),
            ]
            for number, (chapter, page) in enumerate(
                zip(self.document.chapters, self.expected, strict=True), start=1
            )
        ]
        style = [("LEFTPADDING", (0, 0), (-1, -1), 0), ("TOPPADDING", (0, 0), (-1, -1), 1)]
        style += [("BOTTOMPADDING", (0, 0), (-1, -1), 1), ("RIGHTPADDING", (0, 0), (-1, -1), 0)]
        return [Grid(rows, colWidths=[_INNER - 40, 40], style=style)]

    def chapter(self, number: int, chapter: Chapter) -> list[Any]:
        """Sets a chapter; no heading stands alone at the foot of a page."""
        heading = self.text(f"{number}. {chapter.title}", "chapter")
        heading.bookmark = (_shown(f"{number}. {chapter.title}"), 0, f"chapter-{number}")
        flowables = [heading]
        for index, block in enumerate(chapter.blocks):
            flowables += self.block(block, f"chapter-{number}-{index}")
        return flowables

    def block(self, block: Block, key: str) -> list[Any]:
        """Sets one block; `key` names it among the bookmarks."""
        if isinstance(block, Heading):
            heading = self.text(block.text, "heading")
            heading.bookmark = (_shown(block.text), 1, key)
            return [heading]
        if isinstance(block, Paragraph):
            return [self.text(block.text)]
        if isinstance(block, Notice):
            return self.notice(block)
        if isinstance(block, Points):
            return [self.text(item, "point", bullet="•") for item in block.items]
        if isinstance(block, Facts):
            return self.facts(block)
        if isinstance(block, Table):
            return self.table(block)
        if isinstance(block, Commands):
            return self.commands(block)
        if isinstance(block, Literal):
            return [self.code(block.text.split("\n"))]
        return self.pictures(block)

    def text(self, text: str, style: str = "body", bullet: str = "", link: str = "") -> Any:
        """Sets a paragraph, whose text is no markup."""
        from reportlab.platypus import Paragraph as Flowing

        inner = escape(_shown(text))
        inner = f'<a href="#{link}">{inner}</a>' if link else inner
        return Flowing(inner, self.styles[style], bulletText=bullet or None)

    def notice(self, block: Notice) -> list[Any]:
        from reportlab.platypus import Table as Grid

        inner = [self.text(block.title, "warning"), *(self.text(line) for line in block.lines)]
        style = [
            ("LINEBEFORE", (0, 0), (0, -1), 3, _WARN),
            ("BACKGROUND", (0, 0), (-1, -1), "#fff4ec"),
        ]
        rows = [[each] for each in inner]
        return [Grid(rows, colWidths=[_INNER], style=style, splitInRow=1, spaceAfter=6)]

    def facts(self, block: Facts) -> list[Any]:
        from reportlab.platypus import Table as Grid

        if not block.items:
            return []
        rows = [[self.text(name, "name"), self.text(value, "cell")] for name, value in block.items]
        style = [("VALIGN", (0, 0), (-1, -1), "TOP"), ("LEFTPADDING", (0, 0), (0, -1), 0)]
        style += [("TOPPADDING", (0, 0), (-1, -1), 1), ("BOTTOMPADDING", (0, 0), (-1, -1), 2)]
        widths = [110, _INNER - 110]
        return [Grid(rows, colWidths=widths, style=style, splitInRow=1, spaceAfter=6)]

    def table(self, block: Table) -> list[Any]:
        from reportlab.platypus import Table as Grid

        head = [self.text(name, "head") for name in block.columns]
        body = [
            [self.text(cell, "name" if i == 0 else "cell") for i, cell in enumerate(row)]
            for row in block.rows
        ]
        scale = _INNER / sum(block.widths)
        style = [
            ("VALIGN", (0, 0), (-1, -1), "TOP"),
            ("LINEBELOW", (0, 0), (-1, 0), 1, _INK),
            ("LINEBELOW", (0, 1), (-1, -1), 0.4, _RULE),
            ("LEFTPADDING", (0, 0), (-1, -1), 0),
            ("RIGHTPADDING", (0, 0), (-1, -1), 5),
            ("TOPPADDING", (0, 0), (-1, -1), 2),
            ("BOTTOMPADDING", (0, 0), (-1, -1), 3),
        ]
        widths = [share * scale for share in block.widths]
        grid = Grid(
            [head, *body], colWidths=widths, style=style, repeatRows=1, splitInRow=1, spaceAfter=3
        )
        return [grid, *([self.text(block.note, "note")] if block.note else [])]

    def commands(self, block: Commands) -> list[Any]:
        flowables = []
        for purpose, words in block.items:
            flowables += [self.text(purpose, "purpose"), self.code(command_lines(words))]
        return flowables

    def code(self, lines: Sequence[str]) -> Any:
        from reportlab.platypus import Preformatted

        # A line of text may not be empty: it would take no room.
        shown = [_shown(line, "FedsimMono") or " " for line in lines]
        broken = [part for line in shown for part in _broken(line)]
        return Preformatted("\n".join(broken), self.styles["code"])

    def pictures(self, block: Pictures) -> list[Any]:
        from reportlab.platypus import KeepTogether, Spacer
        from reportlab.platypus import Table as Grid

        side = min(block.side * _POINTS_PER_PIXEL, (_INNER / 4 - 14) / 2)
        cells = [
            Grid(
                [
                    [_image(pair.truth, side), _image(pair.reconstruction, side)],
                    [self.text(pair.caption, "note"), ""],
                ],
                colWidths=[side + 2, side + 8],
                style=[
                    ("LEFTPADDING", (0, 0), (-1, -1), 0),
                    ("RIGHTPADDING", (0, 0), (-1, -1), 0),
                    ("SPAN", (0, 1), (1, 1)),
                ],
            )
            for pair in block.pairs
        ]
        widths = [2 * side + 14] * len(cells)
        row = Grid(
            [cells], colWidths=widths, hAlign="LEFT", style=[("LEFTPADDING", (0, 0), (-1, -1), 0)]
        )
        return [KeepTogether([self.text(block.title, "note"), row, Spacer(1, 6)])]


def _broken(line: str) -> list[str]:
    """Breaks a line of code that is too long for the page."""
    return [line[i : i + _COLUMNS] for i in range(0, len(line), _COLUMNS)]


def _image(png: bytes, side: float) -> Any:
    """Sets an image, its pixels enlarged to squares."""
    from reportlab.platypus import Image as Picture

    picture = from_png(png)
    width, height = picture.size
    large = picture.resize((width * _ENLARGED, height * _ENLARGED), NEAREST)
    stream = io.BytesIO()
    large.save(stream, format="PNG")
    stream.seek(0)
    return Picture(stream, width=side, height=side * height / width, hAlign="LEFT")


def _styles() -> dict[str, Any]:
    from reportlab.lib.styles import ParagraphStyle

    style: Callable[..., Any] = partial(
        ParagraphStyle, fontName="FedsimSans", fontSize=8.5, leading=12.5, textColor=_INK
    )
    bold = {"fontName": "FedsimSans-Bold", "keepWithNext": 1}
    return {
        "body": style("body", spaceAfter=5),
        "title": style("title", fontName="FedsimSans-Bold", fontSize=19, leading=24),
        "subtitle": style("subtitle", textColor=_MUTED, fontSize=10, leading=14, spaceBefore=4),
        "contents": style("contents"),
        "page": style("page", alignment=2),
        "chapter": style("chapter", **bold, fontSize=13, leading=17, spaceBefore=18, spaceAfter=6),
        "heading": style("heading", **bold, fontSize=9.5, spaceBefore=9, spaceAfter=3),
        "warning": style("warning", fontName="FedsimSans-Bold", textColor=_WARN),
        "point": style("point", leftIndent=11, bulletIndent=0, spaceAfter=3),
        "name": style("name", fontName="FedsimSans-Bold", fontSize=6.6, leading=9),
        "cell": style("cell", fontSize=6.6, leading=9),
        "head": style("head", fontName="FedsimSans-Bold", fontSize=6.6, leading=9),
        "note": style("note", fontSize=7, leading=9.5, textColor=_MUTED, spaceAfter=5),
        "purpose": style("purpose", **bold, fontSize=7.5, leading=10, spaceBefore=4, spaceAfter=2),
        "code": style(
            "code",
            fontName="FedsimMono",
            fontSize=6.8,
            leading=9.2,
            backColor=_SHADE,
            borderPadding=3,
            spaceBefore=3,
            spaceAfter=8,
        ),
    }
