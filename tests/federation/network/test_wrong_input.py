"""What a user of a network gets wrong is refused at once, with the option and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from network_support import write_node_key
from nodes_support import LINK, SMALL, connect, nodes
from typer.testing import CliRunner

from fedsim import pipeline
from fedsim.cli.commands import app
from fedsim.federation.network import flower, link
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy
from fedsim.types import FedsimError


def refused(*words: str) -> str:
    """What a command says that ends with status 2."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.parametrize(
    "given",
    [["--shared-seed"], ["--root-certificates", "ca.crt"], ["--superexec-secret", "secret"]],
)
def test_options_of_a_network_do_not_run_a_scenario_right_here(given: list[str]) -> None:
    said = refused("run", "scenarios/quickstart.yaml", *given)
    assert said.startswith(given[0]) and "--superlink HOST:PORT" in said


@pytest.mark.parametrize("host", ["", "http://server", "server:8443", "two names", "a" * 300])
def test_keys_are_made_for_hosts_alone(host: str, tmp_path: Path) -> None:
    assert "--host: expected a name" in refused("keys", str(tmp_path), "-n", "1", "--host", host)
    assert not list(tmp_path.iterdir())


def test_keys_says_which_folders_to_hand_over(tmp_path: Path) -> None:
    hosts = ["--host", "a-long-name." * 7 + "org", "--host", "::1"]
    done = CliRunner().invoke(app, ["keys", str(tmp_path / "keys"), "-n", "2", *hosts])
    folders = sorted(map(str, (tmp_path / "keys").iterdir()))
    assert sorted(done.output.split()) == folders and len(folders) == 5


def test_a_private_key_is_not_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "check", lambda *_: None)
    write_node_key(tmp_path / "key")
    to = ["--superlink", "127.0.0.1:1"]
    assert "key: no public key" in refused("register", str(tmp_path / "key"), *to)
    assert "check the path" in refused("register", str(tmp_path / "none.pub"), *to)


def test_a_missing_certificate_is_named_before_anybody_is_called() -> None:
    with pytest.raises(FedsimError, match=r"--root-certificates: none\.crt"):
        link.check("127.0.0.1:1", Path("none.crt"))


def test_data_that_are_not_there_are_refused_before_the_node_joins(tmp_path: Path) -> None:
    for data, is_there in (("scenario", True), (str(tmp_path), True), ("/no/such", False)):
        node = NodeApp(0, data, tmp_path / "home", Policy(), shared_seed=False)
        if is_there:
            node.refuse_missing_data()
            continue
        with pytest.raises(FedsimError, match="--data: /no/such"):
            node.refuse_missing_data()


@pytest.mark.usefixtures("attacks_here")
def test_a_folder_that_holds_a_run_is_refused_before_nodes_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, nodes(tmp_path / "homes"))
    deployed = {**SMALL, "federation": {**SMALL.get("federation", {}), "engine": "deployment"}}
    pipeline.run(deployed, out=tmp_path / "out", workers=1, link=LINK)

    def asked(*_: object) -> None:
        raise AssertionError("the nodes were asked")

    monkeypatch.setattr(flower, "server_app", asked)
    with pytest.raises(FedsimError, match="holds a run already"):
        pipeline.run(deployed, out=tmp_path / "out", workers=1, link=LINK)
