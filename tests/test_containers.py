"""What docker/ says of walls and rights, read from its files; `docker/check.sh` tries it."""

from __future__ import annotations

import re
import subprocess
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
    assert service["mem_limit"] and 0 < service["pids_limit"] <= 1024


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


APT = """\
#!/bin/bash
for word in "$@"; do case $word in Dir::Log=*) log=${word#*=}/history.log ;; esac; done
case " $* " in
    *" install "*)
        echo "Install: docker.io:amd64 (20.10), runc:amd64 (1.1, automatic)" >>"$log"
        echo "Upgrade: libc6:amd64 (1, 2)" >>"$log" ;;
    *" -s purge "*) for word in "${@:4}" $OTHERS; do echo "Purg $word [1]"; done ;;
    *" purge "*) echo "${@: -2}" >"$HERE/purged" ;;
esac
"""


@pytest.mark.parametrize(
    ("others", "purged"), [("", "docker.io:amd64 runc:amd64\n"), ("k8s", None)]
)
def test_the_check_removes_what_it_has_installed(
    others: str, purged: str | None, tmp_path: Path
) -> None:
    (tmp_path / "apt").mkdir()
    (tmp_path / "apt-get").write_text(APT)
    (tmp_path / "apt-get").chmod(0o700)
    script = (ROOT / "docker" / "check.sh").read_text()
    parts = [
        re.search(rf"^{name}\(\) {{\n.*?^}}$", script, re.MULTILINE | re.DOTALL)
        for name in ("apt_get", "installed_here", "remove_packages")
    ]
    functions = "\n".join(part[0] for part in parts if part)
    done = subprocess.run(
        ["bash", "-euc", f"{functions}\nwork=$HERE\napt_get install docker.io\nremove_packages"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path), "OTHERS": others},
        capture_output=True,
        text=True,
        check=True,
    )
    written = tmp_path / "purged"
    assert (written.read_text() if written.exists() else None) == purged, done.stderr
    assert bool(done.stderr) == bool(others)
