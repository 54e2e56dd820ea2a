"""The terms of the leaderboard and the report, each explained once: page, tips and docs use them.

A page that shows a figure explains it from here. Terms of metrics come with the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsim.report.judge import LARGEST_DELTA, WEAK_EPSILON
from fedsim.report.row import (
    EXPOSED_GAIN,
    EXPOSED_IMAGE,
    LIKENESS_GAIN,
    RECOGNIZABLE_PSNR,
    RECOGNIZABLE_SSIM,
    REQUIRED_GAIN,
    LeaderboardRow,
)
from fedsim.scoring import LEAST, METRICS, Term
from fedsim.words import number_of

_TABLE = (
    Term(
        key="gain",
        name="gain",
        meaning="How many dB of PSNR an attack is above the best guess of someone who saw no "
        "update. Zero is guessing. Only a gain can have come from the update.",
    ),
    Term(
        key="guess",
        name="guess",
        meaning="The answer of someone who saw no update: the mean image, or whatever fits better, "
        "learned from images that are none of the victim’s. A failed attack counts as the guess.",
    ),
    Term(
        key="db",
        name="dB",
        meaning="Decibel, the unit of PSNR and gain. 10 dB more is a tenth of the squared error, "
        "3 dB more is half of it.",
    ),
    Term(
        key="recognizable",
        name="recognizable, colors only, nothing",
        meaning=f"Recognizable: an attack certainly gains {REQUIRED_GAIN:g} dB or more, at a mean "
        f"SSIM of {RECOGNIZABLE_SSIM:g} or more (without SSIM, a mean PSNR of "
        f"{RECOGNIZABLE_PSNR:g} dB). Recognizable in 1 of 5 trials, say: it certainly gains "
        f"something, and so many trials with {REQUIRED_GAIN:g} dB or more have that likeness, or "
        f"one gains {EXPOSED_GAIN:g} dB, or one image is {EXPOSED_IMAGE:g} dB above its own "
        "guess and above the same image as drawn from another update. Pictures also leak by "
        f"structure (SSIM) or likeness (LPIPS) that is {LIKENESS_GAIN:g} better than both. Colors "
        "only: it certainly gains something, below that likeness, and nothing else leaks. Nothing "
        "beyond the guess: the interval of every gain reaches down to guessing, or another update "
        "gives the same picture, and neither labels nor members are told better "
        "on average.",
    ),
    Term(
        key="verdict",
        name="rely, do not rely, not shown",
        meaning="Do not rely: an attack works, or an audit refutes the ε. Rely: no attack works, "
        "each that certainly works without a defense was tried here in the same way, none of its "
        "runs failed, what it does here is certainly less, every interval ends below "
        f"{REQUIRED_GAIN:g} dB, the model learned here and without a defense, and a "
        f"differential-privacy guarantee with ε below {WEAK_EPSILON:g} and δ of at most "
        f"{LARGEST_DELTA:g} is proven. "
        "Not shown: anything else. Attacks that fail here are no proof that all do.",
    ),
    Term(
        key="certified",
        name="certified",
        meaning="Of these images the attacker knows that features and labels are right, without "
        "any truth: they reproduce the update to rounding, rounding leaves them no room, and no "
        "other answer was found that does as well. Determined are images of which the first two "
        "hold but for noise. A certificate is as good as what the client declares of its update.",
    ),
    Term(
        key="interval",
        name="interval",
        meaning="Where the mean over many more trials would lie at the stated confidence "
        "(Student’s), or the chance of a trial (Clopper and Pearson’s). Trials of one run share "
        "weights, client and partition: its interval is of this network and this client, and says "
        "nothing of another. Runs of other seeds widen it. In the table it is of each "
        "attack alone. In answers and verdicts it is wider, for it allows for the choice of the "
        f"best of several attacks (Bonferroni). Of fewer than {number_of(LEAST, 'trial')} a mean "
        "has none.",
    ),
    Term(
        key="n",
        name="n",
        meaning="Number of trials: attacks of the same kind on other images. Trials that share an "
        "image count once.",
    ),
    Term(
        key="chance",
        name="chance level",
        meaning="What is reached without any knowledge: the accuracy of always naming the most "
        "frequent class, the labels or features that a guess has right, and 0.5 of an AUC.",
    ),
    Term(
        key="accuracy",
        name="accuracy",
        meaning="Share of the test set that the trained model classifies correctly, with Wilson’s "
        "interval; ! if it is no better than chance.",
    ),
    Term(
        key="epsilon",
        name="ε",
        meaning="What a defense guarantees against every attack, known or not: the presence of "
        "one unit changes the odds of any conclusion by at most a factor of exp(ε), up to δ. It "
        "is only comparable at the same unit and neighbours. ∞ means no guarantee.",
    ),
    Term(
        key="delta",
        name="δ",
        meaning="Probability with which the guarantee of ε may fail altogether. It should be far "
        "below one over the number of people.",
    ),
    Term(
        key="unit",
        name="unit",
        meaning="Whose presence ε hides: one example of a client, or a whole client with all its "
        "data. A person with several examples, or at several clients, is as many units.",
    ),
    Term(
        key="relation",
        name="neighbours (relation)",
        meaning="Which data sets ε makes hard to tell apart. Zero out: one unit’s contribution is "
        "exchanged for zero. Add or remove: the unit is there or not. Replace one: it is exchanged "
        "for any other, which is harder. Close and relative hide only how far apart values are, or "
        "which of declared databases was used, and are "
        "no differential privacy for who took part.",
    ),
    Term(
        key="audit",
        name="audit",
        meaning="Canaries show that at least so much ε is spent. Above the claimed ε it refutes "
        "the claim; below, it proves nothing.",
    ),
    Term(
        key="vantage",
        name="vantage",
        meaning="Where the attacker stands. Server: sees each client’s update. Aggregate: only the "
        "sum of a round. Client: a participant who sees global models. Eavesdropper: on the wire.",
    ),
    Term(
        key="server",
        name="planted, modified",
        meaning="A malicious server that chose weights of the model’s head (planted), or put a "
        "module into the model (modified). A gain that rests on it says nothing of an honest "
        "server, so the two are never ranked together.",
    ),
    Term(
        key="masked",
        name="masked",
        meaning="A client’s part of a secure sum, as the server receives it. Alone it is random.",
    ),
    Term(
        key="other",
        name="other update",
        meaning="The same attack’s picture of another update, scored against this truth: of "
        "another client’s or, where none is recorded, of public images. If it scores as well, the "
        "attack drew what it knew beforehand. Another batch of the same client tells nothing: its "
        "data look alike.",
    ),
    Term(
        key="control",
        name="positive control",
        meaning="Attacks must work where there is no defense. If they do not, their failure "
        "behind a defense says nothing.",
    ),
    Term(
        key="invalid",
        name="INVALID",
        meaning="The positive control did not pass, so that the comparison has no answer: the "
        "attacks did not work without a defense either. That is no proof of safety; labels that "
        "were recovered leak all the same.",
    ),
    Term(
        key="unscored",
        name="UNSCORED",
        meaning="The truth is still with the clients, so that no attack is scored yet and there "
        "is no answer.",
    ),
    Term(
        key="batch",
        name="batch size",
        meaning="How many images an update was computed from. Fewer are easier to reconstruct.",
    ),
    Term(
        key="matching",
        name="matching",
        meaning="A batch has no order. Reconstructions are paired with images one to one, at the "
        "least total squared error, and every metric uses that one pairing.",
    ),
)


def terms() -> Mapping[str, Term]:
    """Returns the terms by key, in the order of a page."""
    of_metrics = [metric.term for metric in METRICS.values() if metric.heading]
    return {term.key: term for term in (*_TABLE, *of_metrics)}


def terms_of(
    rows: Sequence[LeaderboardRow], *, invalid: bool = False, unscored: bool = False
) -> list[Term]:
    """Returns the terms that a page about `rows` uses, in the order of the table.

    `invalid` says that a comparison has no answer, `unscored` that truths are with the clients.
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


def markdown() -> str:
    """Returns the glossary as the table of `docs/glossary.md`."""
    lines = ["| term | meaning |", "| --- | --- |"]
    lines += [f"| **{term.name}** | {term.meaning} |" for term in terms().values()]
    return "\n".join(lines) + "\n"
