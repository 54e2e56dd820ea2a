"""The command that an assessment states repeats it, and a trial leaves an app's model as it was."""

from __future__ import annotations

import shlex
from pathlib import Path

from torch import nn

from fedsim.assessment.assess import AssessSettings, _classes_of, _command_of
from fedsim.contracts.grant import Grant
from fedsim.scenario import grant_of


def test_the_command_grants_what_was_granted(tmp_path: Path) -> None:
    grant = Grant(labels="known", public="test")
    words = shlex.split(_command_of(tmp_path, "app:Net", [], AssessSettings(grant=grant)))
    stated = [words[place + 1] for place, word in enumerate(words) if word == "--grant"]
    assert grant_of(stated) == grant


def test_a_trial_leaves_each_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 5)).train()
    model[1].eval()
    assert _classes_of(model, (3, 2, 2)) == 5
    assert [part.training for part in model] == [True, False, True]
