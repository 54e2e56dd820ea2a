"""The table of docs/secure-aggregation.md: the noise that is left if more collude or drop out."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedsim.contracts.guarantee import Guarantee
from fedsim.federation.network.keys import read_identity
from fedsim_defenses.secure_aggregation import SecureAggregation

PAGE = Path(__file__).parents[2] / "docs" / "secure-aggregation.md"


def test_what_is_left_of_the_noise() -> None:
    defense = SecureAggregation(noise_multiplier=1.0, threshold=0.8, colluding=0.2)
    terms = defense.terms(Guarantee(sensitivity=1.0), 1)
    rows = re.findall(
        r"^\| (10|8) \| (\d\.\d\d \|.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [int(count) for count, _ in rows] == [10, 8]
    for count, cells in rows:
        told = [float(cell) for cell in cells.split(" | ")]
        kept = [terms.client_noise(10) * math.sqrt(int(count) - bad) for bad in range(5)]
        assert told == [round(value, 2) for value in kept]


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("xxd")), reason="needs openssl and xxd"
)
def test_an_owner_makes_keys_as_the_page_says(tmp_path: Path) -> None:
    """The commands of the page make a signing key that a node reads, and its public half."""
    recipe = re.search(r"```text\n(umask 077\n.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert recipe
    done = subprocess.run(
        ["sh", "-ec", recipe[1]], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    peers = tmp_path / "peers.json"
    peers.write_text(f'{{"0": "{done.stdout.strip()}"}}', encoding="utf-8")
    identity = read_identity(tmp_path / "signing.key", peers)
    assert identity and identity.peers[0] == identity.public
