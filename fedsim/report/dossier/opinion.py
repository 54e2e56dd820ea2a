"""What a run says to the criteria of the EDPB's Opinion 28/2024, and what it cannot say.

The opinion (adopted on 17 December 2024) is about trained models: one is anonymous only if it is
insignificantly likely that personal data are extracted from it, directly or by queries, with all
means reasonably likely to be used by the controller or another person.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsim.report.dossier.attempts import Tried, Untried, tried, untried
from fedsim.report.figures import format_epsilon
from fedsim.report.row import LeaderboardRow
from fedsim.report.threat import WATCHERS
from fedsim.report.utility import utility
from fedsim.results.lines import ResultRow, nested
from fedsim.results.reading import Run
from fedsim.types import watcher_of
from fedsim.words import number_of

Row = tuple[str, str, str]
"""A criterion, what was measured of it, and what that cannot show."""


def criteria(
    runs: Sequence[Run], results: Sequence[ResultRow], lines: Sequence[LeaderboardRow]
) -> list[Row]:
    """Returns the criteria of the opinion, with what `runs` say to each."""
    attacks, left_out = tried(results), untried(results, runs)
    return [
        _means(attacks, left_out),
        _context(lines),
        _information(lines),
        _cost(runs, attacks),
        _data(runs),
        _design(runs),
        _membership(lines),
        _reconstruction(lines),
        _OTHER_ATTACKS,
        _QUERIES,
        _persons(lines),
        _DOCUMENTATION,
    ]


def _means(attacks: Sequence[Tried], left_out: Sequence[Untried]) -> Row:
    measured = (
        f"{number_of(len(attacks), 'attack')} of published kinds." if attacks else "No attack."
    )
    if left_out:
        measured += f" {number_of(len(left_out), 'installed attack')} not tried."
    return (
        "All means reasonably likely to be used",
        measured,
        "What an attack that was not tried would find. Attacks improve: a later one may find more "
        "in the same recording.",
    )


def _context(lines: Sequence[LeaderboardRow]) -> Row:
    watchers = dict.fromkeys(WATCHERS.get(watcher_of(line.vantage), line.vantage) for line in lines)
    return (
        "The context: who gets to see what",
        f"What is seen by {' and by '.join(watchers)}." if watchers else "Nobody’s view.",
        "What others see: whoever steals a client’s machine, backup or log, and whoever receives "
        "the finished model.",
    )


def _information(lines: Sequence[LeaderboardRow]) -> Row:
    granted = sorted({secret for line in lines for secret in line.knowledge.from_truth()})
    others = sorted({entry for line in lines for entry in line.threat.beyond} - set(granted))
    parts = ["The attacker knows the model, its weights and how clients train."]
    if others:
        among = "" if all(set(others) <= set(line.threat.beyond) for line in lines) else "In part "
        has = "it also has" if among else "It also has"
        parts.append(f"{among}{has} what no honest server has by itself ({', '.join(others)}).")
    if granted:
        parts.append(
            f"In part it is given what only the victim knows ({', '.join(granted)}): an upper "
            "bound."
        )
    return (
        "Additional information that somebody may have",
        " ".join(parts),
        "What somebody knows of a person from elsewhere, such as a photograph of that person.",
    )


def _cost(runs: Sequence[Run], attacks: Sequence[Tried]) -> Row:
    seconds = [attack.seconds for attack in attacks if attack.seconds is not None]
    machine = next(
        (
            str(name)
            for run in runs
            if (
                name := nested(run.record, "environment", "gpu")
                or nested(run.record, "environment", "processor")
            )
        ),
        "a machine that is not recorded",
    )
    measured = (
        f"An attack took {min(seconds):.3g} to {max(seconds):.3g} s on average for one update, on "
        f"{machine}."
        if seconds
        else "The time of attacks was not recorded."
    )
    return (
        "Cost and time",
        measured,
        "What somebody with more time or a larger machine would find.",
    )


def _data(runs: Sequence[Run]) -> Row:
    sources = dict.fromkeys(
        str(name) for run in runs if (name := run.setting("data", "source", "name"))
    )
    return (
        "The training data, the model and the training",
        f"The data source {', '.join(sources)} and the settings of chapter 3."
        if sources
        else "The settings of chapter 3.",
        "Other data, models and settings. Figures of a bundled data set say little of yours.",
    )


def _design(runs: Sequence[Run]) -> Row:
    proven = [
        f"{row.defense}: ε = {format_epsilon(row.epsilon)}"
        + (f" per {row.unit}" if row.unit else "")
        for row in utility(runs)
        if row.epsilon is not None and math.isfinite(row.epsilon)
    ]
    return (
        "Privacy by design: techniques that limit what a model holds of a person",
        f"{'; '.join(proven)} (chapter 7)." if proven else "No defense here has a finite ε.",
        "That the deployment runs what was measured. Minimization and selection of data were not "
        "looked at.",
    )


def _membership(lines: Sequence[LeaderboardRow]) -> Row:
    told = [(area.mean, line.threat) for line in lines if (area := line.metrics["membership_auc"])]
    areas, models = [area for area, _ in told], {threat for _, threat in told}
    over = f", over {number_of(len(models), 'threat model')} (chapter 6)" if len(models) > 1 else ""
    return (
        "Resistance to membership inference",
        f"AUC {min(areas):.2f} to {max(areas):.2f} (a coin: 0.50){over}."
        if areas
        else "Not measured in this run.",
        "Membership in the finished model.",
    )


def _reconstruction(lines: Sequence[LeaderboardRow]) -> Row:
    gained = [line for line in lines if line.gain is not None]
    if not gained:
        return (
            "Resistance to reconstruction",
            "Not measured in this run.",
            "Whether data can be reconstructed.",
        )
    victims = max((line.images or 0 for line in gained), default=0)
    noun = gained[0].main.singular
    return (
        "Resistance to reconstruction",
        f"Measured on up to {number_of(victims, noun)} for each attack and defense (chapter 6).",
        "A low figure is what these attacks could not do, not a proof that none can. A mean over "
        "trials says little of a rare success: see the number of trials and the worst case.",
    )


_OTHER_ATTACKS: Row = (
    "Resistance to attribute inference, exfiltration, regurgitation and model inversion",
    "Not measured.",
    "Anything of them. They are attacks on a trained model, and need a test of their own.",
)
_QUERIES: Row = (
    "Personal data obtained by queries to the model",
    "Not measured. Attacks here read what travels in training, and ask the model nothing.",
    "Anything of it.",
)


def _persons(lines: Sequence[LeaderboardRow]) -> Row:
    trials = sorted({line.n for line in lines})
    count = f"{trials[0]} to {trials[-1]}" if len(trials) > 1 else f"{trials[0] if trials else 0}"
    return (
        "Each person, and not the average one",
        f"Trials for each attack and defense: {count}. The worst case stands beside the mean.",
        "The risk of somebody who was not attacked here. A likeness of pixels in dB is no "
        "probability that a person is recognized.",
    )


_DOCUMENTATION: Row = (
    "Documentation",
    "This dossier, its hashes and its commands (chapters 9 and 10).",
    "That it is enough. A data-protection impact assessment weighs more than measurements.",
)
