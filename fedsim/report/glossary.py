"""The terms of the leaderboard and the report, each explained once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from markupsafe import Markup, escape

from fedsim.report.figures import read_texts
from fedsim.report.judge import LARGEST_DELTA, WEAK_EPSILON
from fedsim.report.row import LeaderboardRow
from fedsim.scoring import LEAST, METRICS, Term
from fedsim.targets.images import (
    EXPOSED_IMAGE,
    LIKENESS_GAIN,
    RECOGNIZABLE_HAARPSI,
    RECOGNIZABLE_PSNR,
    RECOGNIZABLE_SSIM,
    Images,
)

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
    """Returns `text`; one of over 1,000 characters is cut there, with a note of its length."""
    long = len(text) > _LONGEST
    return f"{text[:_LONGEST]}… ({len(text):,} characters)" if long else text


def _keep_figures_whole(text: str) -> str:
    """Returns `text`, cut if it is very long, with each figure and its unit kept on one line."""
    kept = _TOKEN.sub(lambda token: token.group().replace(" ", "\N{NO-BREAK SPACE}"), text)
    return shorten(kept)


def mark_code(text: str) -> Markup:
    """Returns `text` as escaped HTML, cut as by `shorten`; text in paired backticks is code."""
    parts = _keep_figures_whole(text).split("`")
    if len(parts) % 2 == 0:
        return escape("`".join(parts))
    marked = [Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts)]
    return Markup("").join(marked)


def explain_terms(text: str, shown: Collection[str]) -> Markup:
    """Returns `text` as escaped HTML, cut as by `shorten`, with terms as buttons that explain them.

    A term is a button where it occurs first, if its key (`Term.key`) is among `shown`.
    """
    explained_keys: set[str] = set()
    text, parts, end = _keep_figures_whole(text), [], 0
    for word in _WORD.finditer(text):
        key = _TERMS[word.group()]
        if key in explained_keys or key not in shown:
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
    """Returns `page` with each character that changes the direction of text replaced by U+FFFD."""
    return page.translate(_TURNS)


def tip(key: str, text: str) -> Markup:
    """Returns an HTML button, both texts escaped, that shows the page's element `tip-{key}`."""
    return Markup('<button type="button" class="tip" popovertarget="tip-{}">{}</button>').format(
        key, text
    )


def sentence_of(text: str) -> str:
    """Returns `text` as a sentence: a capital first, a stop at the end, and no backticks."""
    text = text.replace("`", "")
    # Greek letters stay: a capital ε is another symbol.
    first = text[:1].upper() if text[:1].isascii() else text[:1]
    return f"{first}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


_VALUES = {
    "EXPOSED_GAIN": Images.exposes,
    "EXPOSED_IMAGE": EXPOSED_IMAGE,
    "LARGEST_DELTA": LARGEST_DELTA,
    "LEAST": LEAST,
    "LIKENESS_GAIN": LIKENESS_GAIN,
    "RECOGNIZABLE_PSNR": RECOGNIZABLE_PSNR,
    "RECOGNIZABLE_HAARPSI": RECOGNIZABLE_HAARPSI,
    "RECOGNIZABLE_SSIM": RECOGNIZABLE_SSIM,
    "REQUIRED_GAIN": Images.leaks,
    "WEAK_EPSILON": WEAK_EPSILON,
}


def terms() -> Mapping[str, Term]:
    """Returns `Term.key` -> term, in the order in which a page explains them."""
    stated = [
        Term(key=each["key"], name=each["name"], meaning=each["meaning"].format(**_VALUES))
        for each in read_texts()["glossary"]
    ]
    of_metrics = [metric.term for metric in METRICS.values() if metric.heading]
    return {term.key: term for term in (*stated, *of_metrics)}


def terms_of(
    rows: Sequence[LeaderboardRow], *, invalid: bool = False, unscored: bool = False
) -> list[Term]:
    """Returns the terms that a page about `rows` uses, in the order of `terms`.

    `invalid` says whether a comparison has no answer, and `unscored` whether truths are missing.
    """
    used = {
        "audit": any(row.audited_epsilon is not None for row in rows),
        "server": any(row.server != "honest" for row in rows),
        "masked": any(row.masked for row in rows),
        "other": any("psnr" in row.others for row in rows),
        "invalid": invalid,
        "unscored": unscored,
        "matching": any(row.main.itemwise for row in rows),
    }
    for name, metric in METRICS.items():
        key, measured = metric.term.key, any(row.metrics.get(name) for row in rows)
        used[key] = used.get(key, False) or measured
    return [term for key, term in terms().items() if used.get(key, True)]
