"""Marks up sentences for the page: figures that do not break, and terms that explain themselves."""

from __future__ import annotations

import re
from collections.abc import Collection

from markupsafe import Markup, escape

_NUMBER = r"[+−-]?\d+(?:[.,]\d+)*(?:e-?\d+)?"

_TOKEN = re.compile(
    rf"[εδσ] [=<>≤≥] (?:{_NUMBER}|∞)|n = \d+(?: trials?)?"
    rf"|{_NUMBER} (?:dB|s\b|trials?|points?|images?)|{_NUMBER}%? to {_NUMBER}%?(?: dB)?"
)
"""Figures with their units, which no line may end within."""

_TERMS = {
    "dB": "db",
    "over guessing": "gain",
    "guess": "guess",
    "chance": "chance",
    "interval": "interval",
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

_WORD = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, _TERMS))})(?!\w)")


_LONGEST = 1000
"""A text of more characters is cut on a page; the run's files have all of it."""


def shorten(text: str) -> str:
    """Returns `text`, cut behind `_LONGEST` characters with a note of its length."""
    long = len(text) > _LONGEST
    return f"{text[:_LONGEST]}… ({len(text):,} characters)" if long else text


def keep_figures_whole(text: str) -> str:
    """Returns `text`, cut if it is very long, with each figure and its unit kept on one line."""
    kept = _TOKEN.sub(lambda token: token.group().replace(" ", "\N{NO-BREAK SPACE}"), text)
    return shorten(kept)


def explain_terms(text: str, shown: Collection[str] | None = None) -> Markup:
    """Returns `text` as `keep_figures_whole` does, with terms as buttons that explain them.

    Each term is a button once.

    `shown` are the keys of those that the page explains, by default all; others stay words.
    """
    explained_keys: set[str] = set()
    text, parts, end = keep_figures_whole(text), [], 0
    for word in _WORD.finditer(text):
        key = _TERMS[word.group()]
        if key in explained_keys or (shown is not None and key not in shown):
            continue
        explained_keys.add(key)
        parts += [escape(text[end : word.start()]), tip(key, word.group())]
        end = word.end()
    return Markup("").join([*parts, escape(text[end:])])


_TURNS = dict.fromkeys(
    [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"
)
"""Characters that turn the direction of the text after them."""


def remove_turns(page: str) -> str:
    """Returns a page without characters by which a name would turn the words after it."""
    return page.translate(_TURNS)


def tip(key: str, text: str) -> Markup:
    """Returns a button with `text` that shows the glossary's term `key`, by tap or key."""
    return Markup('<button type="button" class="tip" popovertarget="tip-{}">{}</button>').format(
        key, text
    )


def sentence_of(text: str) -> str:
    """Makes a sentence of `text`: a capital at its beginning, a stop at its end, no backticks."""
    text = text.replace("`", "")
    # Greek letters stay: a capital ε is another symbol.
    first = text[:1].upper() if text[:1].isascii() else text[:1]
    return f"{first}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")
