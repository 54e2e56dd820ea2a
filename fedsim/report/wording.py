"""Marks up sentences for the page: figures that do not break, and terms that explain themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from markupsafe import Markup, escape

from fedsim.report.glossary import terms

_NUMBER = r"[+−-]?\d+(?:[.,]\d+)*(?:e-?\d+)?"

_TOKEN = re.compile(
    rf"\(?[εδσ] [=<>≤≥] (?:{_NUMBER}|∞)|n = \d+(?: trials?)?"
    rf"|{_NUMBER} (?:dB|s\b|trials?|points?|images?)|{_NUMBER}%? to {_NUMBER}%?(?: dB)?|{_NUMBER}%"
)
"""Figures with their units, which no line may end within."""

_TERMS = {
    "dB": "db",
    "over guessing": "gain",
    "guess": "guess",
    "chance": "chance",
    "interval": "interval",
    "n": "n",
    "ε": "epsilon",
    "δ": "delta",
    "audit": "audit",
    "recognizable": "recognizable",
    "colors only": "recognizable",
    "planted": "server",
    "masked": "masked",
    "zero out": "relation",
    "replace one": "relation",
    "add or remove": "relation",
}
"""Words of an answer that are explained where they stand -> key of the glossary's term."""

_WORD = re.compile(rf"(\(?)(?<!\w)({'|'.join(re.escape(word) for word in _TERMS)})(?!\w)([).,:;]*)")
"""A term, with the punctuation that no line may end before or after: a button is no letter."""


def unbroken(text: str) -> Markup:
    """Returns `text`, escaped, with each figure and its unit kept on one line.

    A name of several words may end a line after each `_`, and nowhere else.
    """
    return _between(_TOKEN, text, lambda token: _kept(escape(token.group())), _names)


def explained(text: str, shown: Collection[str] | None = None) -> Markup:
    """Returns `text` as `unbroken` does, with each term, once, as a button of its explanation.

    `shown` are the keys of those that the page explains, by default all; others stay words.
    """
    seen: set[str] = set()

    def bare(found: re.Match[str]) -> Markup:
        before, word, after = found.groups()
        key = _TERMS[word]
        if key in seen or (shown is not None and key not in shown):
            return _names(found.group())
        seen.add(key)
        return escape(before) + tip(key, word) + escape(after)

    def kept(found: re.Match[str]) -> Markup:
        return _kept(bare(found)) if found[1] or found[3] else bare(found)

    def words(part: str) -> Markup:
        return _between(_WORD, part, kept, _names)

    def figure(token: re.Match[str]) -> Markup:
        return _kept(_between(_WORD, token.group(), bare, escape))

    return _between(_TOKEN, text, figure, words)


_TURNS = dict.fromkeys(
    [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"
)
"""Characters that turn the direction of the text after them."""


def straight(page: str) -> str:
    """Returns a page without characters by which a name would turn the words after it."""
    return page.translate(_TURNS)


def tip(key: str, text: str) -> Markup:
    """Returns a button with `text` that shows the glossary's term `key`, by tap, key or hover."""
    return Markup(
        '<button type="button" class="tip" popovertarget="tip-{}" title="{}">{}</button>'
    ).format(key, terms()[key].meaning, text)


def _names(text: str) -> Markup:
    return Markup("_<wbr>").join(text.split("_"))


def _between(
    pattern: re.Pattern[str],
    text: str,
    match: Callable[[re.Match[str]], Markup],
    rest: Callable[[str], Markup],
) -> Markup:
    """Joins what `match` makes of each match of `pattern`, and `rest` of what lies between."""
    parts, end = [], 0
    for found in pattern.finditer(text):
        parts += [rest(text[end : found.start()]), match(found)]
        end = found.end()
    return Markup("").join([*parts, rest(text[end:])])


def _kept(token: Markup) -> Markup:
    return Markup('<span class="token">{}</span>').format(token)
