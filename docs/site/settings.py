"""Writes the tables of docs/deployed-settings.md: what settings of three frameworks promise.

    python docs/site/settings.py [--check]

With `--check` nothing is written, and the exit status is 1 where the page differs.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedsim.contracts.defense import Defense
from fedsim.contracts.stack import chain
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.numerics import gaussian
from fedsim.scoring.statistics import Summary, summarize
from fedsim.types import LocalTraining
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.local_dp_mod import LocalDpMod
from fedsim_defenses.percentile_privacy import PercentilePrivacy
from fedsim_defenses.svt_privacy import SvtPrivacy

PAGE = Path(__file__).parents[1] / "deployed-settings.md"
ROUNDS = (1, 100)
ENTRIES = 7_033_300
"""Entries of the network of which FLIP's issue 1145 reports ε = 70,333 in a round."""
EXAMPLES, BATCH = 1_000, 32
"""Examples of a client, and of a batch, for settings whose ε depends on them."""
DELTA = 1e-5
_TRAINING = LocalTraining(algorithm="fedavg", steps=1, batch_size=BATCH, lr=0.1)


@dataclass(frozen=True)
class Setting:
    """A setting as people have it, and what a practitioner needs to know of it."""

    name: str
    claims: str
    unit: str
    defenses: tuple[Defense, ...]
    sentence: str
    halved: bool = False
    """Whether the noise counts half: against any other contribution, and not against none."""
    multiplier: float | None = None
    """Noise over one client's part of a mean, of noise that a server adds; None for a client's."""


def settings() -> list[Setting]:
    """Returns the settings, in the order of the page."""
    app = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=8.0, delta=DELTA)
    hospital = LocalDpMod(clipping_norm=1.0, sensitivity=1e-4, epsilon=10.0, delta=DELTA)
    return [
        Setting(
            "NVFlare `PercentilePrivacy(10, 0.01)`",
            "“apply differential privacy”",
            "client",
            (PercentilePrivacy(),),
            "It adds no noise: it is a compression, and no differential privacy.",
        ),
        Setting(
            "NVFlare `SVTPrivacy()`",
            "0.1 (its ledger: 70,333 a round)",
            "client, any other",
            (SvtPrivacy(),),
            "The 0.1 is for choosing entries; each of the 703,330 released ones costs 0.1 more.",
        ),
        Setting(
            "NVFlare `SVTPrivacy(epsilon_release=1)`",
            "0.1",
            "client, any other",
            (SvtPrivacy(epsilon_release=1.0),),
            "The ε is real, and the noise is 1.4 million times the largest entry.",
        ),
        Setting(
            "Flower `LocalDpMod(1.0, 1.0, 8.0, 1e-5)`",
            "8 (“total privacy budget”)",
            "client, none",
            (app,),
            "The 8 is of one round, by a formula for ε below 1. Rounds add up.",
        ),
        Setting(
            "the same",
            "8",
            "client, any other",
            (app,),
            "Another client's update may point the other way: twice the sensitivity.",
            halved=True,
        ),
        Setting(
            "Flower `LocalDpMod(1.0, 1e-4, 10.0, 1e-5)`",
            "10",
            "client, none",
            (hospital,),
            "The declared sensitivity is a ten thousandth of the clip: there is hardly any noise.",
        ),
        Setting(
            "Flower `LocalDpMod` with `sensitivity` = 2 `clipping_norm`, ε = 1",
            "1",
            "client, any other",
            (LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=1.0, delta=DELTA),),
            "Declare it so. It is the ε of one round: divide your budget among the rounds.",
            halved=True,
        ),
        Setting(
            "Flower `DifferentialPrivacyServerSideFixedClipping`, noise multiplier 1",
            "by its accountant",
            "client, none",
            (),
            "It holds for those who see the model alone. From the server it hides nothing.",
            multiplier=1.0,
        ),
        Setting(
            "the same, for a client with twice the mean number of examples",
            "without accountant: none",
            "client, none",
            (),
            "FedAvg weighs by examples. Only the accountant demands equal weights.",
            multiplier=0.5,
        ),
        Setting(
            "Opacus, noise multiplier 1.1, one step a round",
            "by its accountant",
            "example",
            (DPSGD(norm=1.0, noise_multiplier=1.1),),
            "It hides one example of one client. A patient with several is hidden less.",
        ),
    ]


def find_epsilon(setting: Setting, rounds: int) -> float:
    """Returns the ε of the setting's stack after so many rounds."""
    if setting.multiplier is not None:
        return float(gaussian.epsilon(setting.multiplier / math.sqrt(rounds), DELTA))
    stack = chain(*setting.defenses)
    stack.note_shapes([torch.empty(ENTRIES, device="meta")])
    training = replace(_TRAINING, sampling="poisson") if setting.unit == "example" else _TRAINING
    if setting.halved:
        mechanism = stack.guarantees(training)[-1].mechanism
        multiplier = mechanism.noise_multiplier / 2 / math.sqrt(rounds)  # type: ignore[union-attr]
        return float(gaussian.epsilon(multiplier, DELTA))
    return claim(stack, training, Entry(rounds=rounds, num_examples=EXAMPLES, delta=DELTA)).epsilon


def write_table() -> str:
    """Returns the table, a line a setting."""
    head = ["setting", "claims ε", "holds for", *(f"ε, {n} rounds" for n in ROUNDS), "so"]
    head[3] = "ε, 1 round"
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for each in settings():
        found = [_show(find_epsilon(each, rounds)) for rounds in ROUNDS]
        cells = [each.name, each.claims, each.unit, *found, each.sentence]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


ATTACKS = ("factored-blind", "factored-adaptive", "adaptive", "blind")
SHOWN = ATTACKS[:3]


@dataclass(frozen=True)
class Stack:
    """What attacks got behind one stack of board-small.yaml: a figure for each network."""

    name: str
    gains: dict[str, list[float]]
    """Attack -> mean gain over the guess, in dB, by network."""
    accuracies: list[float]
    failed: dict[str, int]
    """Attack -> its trials without an answer, which count as guesses."""

    @property
    def best(self) -> float:
        """The largest mean gain, which is what a defense is worth."""
        return max(map(statistics.fmean, self.gains.values()))

    @property
    def accuracy(self) -> float:
        """The mean test accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def learns(self) -> bool:
        """Whether the accuracy is certainly above chance, which is 50%."""
        low = summarize_sample(self.accuracies).low
        return (min(self.accuracies) if low is None else low) > 0.5

    def is_told(self, compared: int) -> bool:
        """Says whether the adaptive attack certainly gains more, here and in `compared` stacks."""
        pairs = zip(self.gains["adaptive"], self.gains["blind"], strict=True)
        found = summarize_sample([adaptive - blind for adaptive, blind in pairs])
        low = found.best_of(compared).low
        return low is not None and low > 0


def read_stacks() -> list[Stack]:
    """Returns the stacks of board-small.csv, those that leak most first."""
    with (PAGE.parent / "results" / "board-small.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for name in dict.fromkeys(row["defense"] for row in rows):
        own = [row for row in rows if row["defense"] == name]
        each = {attack: [row for row in own if row["attack"] == attack] for attack in ATTACKS}
        gains = {attack: _mean_by_network(trials, "gain") for attack, trials in each.items()}
        failed = {
            attack: [t["ok"] for t in trials].count("False") for attack, trials in each.items()
        }
        accuracies = _mean_by_network(own, "test_accuracy")
        found.append(Stack(name=name, gains=gains, accuracies=accuracies, failed=failed))
    return sorted(found, key=lambda stack: -stack.best)


def _mean_by_network(trials: list[dict[str, str]], column: str) -> list[float]:
    """Returns the mean of a column for each seed: trials of one network are not independent."""
    seeds = dict.fromkeys(trial["seed"] for trial in trials)
    return [
        statistics.fmean(float(trial[column]) for trial in trials if trial["seed"] == seed)
        for seed in seeds
    ]


def write_leaks() -> str:
    """Returns what leaked behind each stack, most first, and what follows; the guess is 0 dB."""
    stacks = read_stacks()
    lines = [f"| stack | {' | '.join(SHOWN)} | accuracy |", "| --- " * 5 + "|"]
    for stack in stacks:
        cells = [_show_gain(stack.gains[a]) + "*" * bool(stack.failed[a]) for a in SHOWN]
        lines.append(f"| {stack.name} | {' | '.join(cells)} | {stack.accuracy:.0%} |")
    if any(any(stack.failed.values()) for stack in stacks):
        lines += ["", "\\*: some trials have no answer and count as guesses."]
    return "\n".join([*lines, "", *_write_groups(stacks)])


def _write_groups(stacks: list[Stack]) -> list[str]:
    """Returns which stacks do nothing, and behind which no attack gains on average."""
    none = next(stack for stack in stacks if stack.name == "none")
    others = [stack for stack in stacks if stack is not none]
    safe = [stack for stack in others if stack.best <= 0]
    groups = {
        "the best attack keeps over half of its mean gain, and models are as accurate": [
            each
            for each in others
            if each.best > none.best / 2 and each.accuracy > none.accuracy - 0.03
        ],
        "no attack gains on average, but no model is certainly better than chance": [
            each for each in safe if not each.learns
        ],
        "no attack gains on average, and the models learn": [each for each in safe if each.learns],
        "knowing the defense helps `inverting_gradients` for certain": [
            each for each in others if each.is_told(len(others))
        ],
    }
    return [
        f"- **{', '.join(f'`{each.name}`' for each in group)}**: {sentence}."
        for sentence, group in groups.items()
        if group
    ]


def _show_gain(gains: list[float]) -> str:
    found = summarize_sample(gains)
    ends = f" [{found.low:.1f}, {found.high:.1f}]" if found.low is not None else ""
    return f"{found.mean:+.1f}{ends}"


def summarize_sample(values: list[float]) -> Summary:
    """Returns mean and Student's interval of at least one value."""
    summary = summarize(values)
    assert summary is not None
    return summary


def _show(epsilon: float) -> str:
    if math.isinf(epsilon):
        return "∞"
    return f"{epsilon:,.0f}" if epsilon >= 100 else f"{epsilon:.3g}"


def main() -> int:
    """Writes the page, or checks it."""
    text = made = PAGE.read_text(encoding="utf-8")
    for name, table in (("settings", write_table()), ("leaks", write_leaks())):
        block = re.compile(f"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        made = block.sub(rf"\g<1>{table}\n\g<2>", made)
    if "--check" in sys.argv:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
