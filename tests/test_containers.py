"""What docker/ says of walls and rights, read from its files; `docker/check.sh` tries it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILE = yaml.safe_load((ROOT / "docker" / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
NODES = sorted(name for name in SERVICES if name.startswith("node-"))


def mounted(service: str) -> dict[str, str]:
    """Volume -> where it is mounted and how."""
    return dict(volume.split(":", 1) for volume in SERVICES[service]["volumes"])


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "ports", "user", "cap_add", "pid", "ipc"} & set(service)


def test_nodes_reach_the_gate_alone() -> None:
    assert all(network == {"internal": True} for network in FILE["networks"].values())
    on = {name: service.get("networks", []) for name, service in SERVICES.items()}
    assert {name for name in on if "outside" in on[name]} == {"gate", *NODES}
    assert {name for name in on if len(on[name]) == 2} == {"gate"}
    assert all(SERVICES[name]["network_mode"] == "none" for name in on if not on[name])


def test_a_node_is_one_client_with_its_own_key() -> None:
    for number, name in enumerate(NODES):
        words = SERVICES[name]["command"].split()
        assert words[words.index("--client") + 1] == str(number)
        assert set(mounted(name)) == {f"keys-{name}", name}
    words = SERVICES["keys"]["command"][-1].split()
    assert words[words.index("--nodes") + 1] == str(len(NODES))
    assert f"ARG NODES={len(NODES)}" in (ROOT / "docker" / "Dockerfile").read_text()


def test_keys_are_shared_with_those_who_need_them() -> None:
    holders = {
        volume: {name for name in SERVICES if volume in mounted(name)} - {"keys"}
        for volume in FILE["volumes"]
        if volume.startswith("keys-")
    }
    assert holders.pop("keys-runner") == {"register", "runner"}
    assert all(names == {volume.removeprefix("keys-")} for volume, names in holders.items())
    for name in SERVICES:
        if name != "keys":
            assert all(how.endswith(":ro") for v, how in mounted(name).items() if "keys" in v)


def test_only_who_collects_sees_the_truth() -> None:
    for node in NODES:
        assert {name for name in SERVICES if node in mounted(name)} == {node, "collect"}
        assert mounted("collect")[node].endswith(":ro")


def test_what_the_check_reads_is_what_is_said() -> None:
    """`docker/check.sh` takes minutes; the words that it looks for stand in the source."""
    script = (ROOT / "docker" / "check.sh").read_text()
    looked_for = {
        "the SuperLink refuses its key: ": "fedsim/federation/network/node.py",
        "not joined: ": "fedsim/federation/network/node.py",
        "nobody answers": "fedsim/federation/network/link.py",
        "not the Fleet API": "fedsim/federation/network/admission.py",
    }
    for words, path in looked_for.items():
        assert words in script and words in (ROOT / path).read_text(), words
