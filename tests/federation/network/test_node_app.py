"""What a node and the commands of a network answer and refuse, and how a SuperLink is looked at."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from network_support import make_authority
from nodes_support import LINK, SMALL, TINY, connect, nodes
from typer.testing import CliRunner

from fedsim import pipeline
from fedsim.cli import commands
from fedsim.federation import wire
from fedsim.federation.local import identity
from fedsim.federation.network import flower, link
from fedsim.federation.network.home import secret_seed
from fedsim.federation.network.keys import _make_node_key
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy, Releases
from fedsim.scenario import Scenario, expand
from fedsim.types import FedsimError

RUN = "0123456789abcdef"


def resolved(**changes: Any) -> Scenario:
    (variant,) = expand({**TINY, **changes})
    return variant.scenario


def settings(scenario: Scenario, stack: str = "none", **changes: str) -> dict[str, str]:
    plain = {"version": wire.VERSION, "scenario": scenario.model_dump_json(), "stack": stack}
    return {**plain, "run": RUN, "held": str([599] * scenario.data.clients), **changes}


def ask(app: NodeApp, kind: str, config: dict[str, str], content: RecordDict) -> Message:
    context = Context(1, 2, {}, RecordDict(), dict(config))
    with identity():
        return app(Message(content, 2, kind), context)


def counted(app: NodeApp, scenario: Scenario) -> int:
    reply = ask(app, "query.census", settings(scenario, "", run="", held=""), RecordDict())
    return int(reply.content[wire.CONFIG]["held"])  # type: ignore[index, call-overload, arg-type]


def test_a_node_has_its_own_folder_in_place_of_the_source(tmp_path: Path) -> None:
    import torch
    from torchvision.utils import save_image

    for split, count in (("train", 6), ("test", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "mine" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                save_image(torch.rand(3, 8, 8), folder / f"{number}.png")
    source = {
        "name": "image_folder",
        "path": str(tmp_path / "elsewhere"),
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
    }
    scenario = resolved(data={"source": source, "clients": 3})
    (own, *_) = nodes(tmp_path / "homes", data=str(tmp_path / "mine"))
    assert counted(own, scenario) == 12
    (shared, *_) = nodes(tmp_path / "homes")
    with pytest.raises(FedsimError, match=r"elsewhere: this node's policy lets no scenario name"):
        counted(shared, scenario)


@pytest.mark.parametrize(
    ("policy", "changes", "said"),
    [
        ({"stacks": []}, {}, r"defenses\.none: .*\(stacks\)"),
        ({"plugins": ["sgd"]}, {}, r"mlp: .*\(plugins\)"),
        ({}, {"weights": "/etc/passwd"}, r"/etc/passwd: .*\(paths\)"),
        ({"minimum_clients": 4}, {}, r"data\.clients: .*4 clients or more, got 3"),
    ],
)
def test_a_policy_refuses_by_its_key(
    policy: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    plain = resolved().model_dump()
    scenario = Scenario.model_validate({**plain, "training": plain["training"] | changes})
    (app, *_) = nodes(tmp_path, policy=Policy.model_validate(policy))
    for kind, config in (
        ("query.census", settings(scenario, "", run="", held="")),
        ("train", settings(scenario)),
    ):
        with pytest.raises(FedsimError, match=said):
            ask(app, kind, config, RecordDict())


def test_a_stack_of_a_policy_has_to_agree_in_all_that_it_states() -> None:
    scenario = resolved()
    clip = {"name": "clip", "norm": 1.0}
    noise = {"name": "gaussian_noise", "multiplier": 1.0}
    Policy(stacks=[[clip, noise]]).check(scenario, "noise")
    for other in ([clip], [clip, {**noise, "multiplier": 2.0}], [noise, clip]):
        with pytest.raises(FedsimError, match="stacks"):
            Policy(stacks=[other]).check(scenario, "noise")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stack: []", "stack"),
        ("releases: 0", "releases"),
        ("plugins: [sgd, lenett]", "plugins: nothing installed .*'lenett'; did you mean 'lenet'"),
        ("stacks: [[{name: clipp}]]", "stacks: .*'clipp' in defenses; did you mean 'clip'"),
        ("stacks: [[{norm: 1.0}]]", "stacks: .*a defense has no name"),
        ("stacks: [[{name: clip}]]", "stacks: .*Clip: norm: Field required"),
        ("stacks: [[{name: dp_sgd, norm: 1.0, epsilon: 4.0}]]", "stacks: .*epsilon without delta"),
        ("[", "no YAML"),
        ("- 1", "the file"),
        ("a: &a [" + "x, " * 999 + "]\nb: [" + "*a, " * 999 + "]", "no YAML"),
    ],
)
def test_a_policy_that_is_none_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(FedsimError, match=f"--policy: .*{said}"):
        Policy.read(tmp_path / "policy.yaml")
    with pytest.raises(FedsimError, match=r"--policy: .*check the path"):
        Policy.read(tmp_path / "none.yaml")


def test_a_policy_reads_numbers_as_a_scenario_does(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("stacks: [[{name: dp_sgd, epsilon: 1e0, delta: 1e-5, norm: 1.0}]]")
    ((stack,),) = Policy.read(path).stacks or []
    assert (stack["epsilon"], stack["delta"]) == (1.0, 1e-5)
    for empty in ("", "# all is allowed\n\n"):
        path.write_text(empty)
        assert Policy.read(path) == Policy()


def test_releases_are_counted_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "releases.json"
    Releases(path, 2).count()
    Releases(path, 2).count()
    with pytest.raises(FedsimError, match="answered 2 times"):
        Releases(path, 2).count()
    path.write_text("{}")
    with pytest.raises(FedsimError, match="damaged"):
        Releases(path, None)


def test_the_last_release_that_is_allowed_is_the_last(tmp_path: Path) -> None:
    scenario = resolved()
    (app, *_) = nodes(tmp_path, policy=Policy(releases=1))
    config = settings(scenario, held=json.dumps([counted(app, scenario), 0, 0]))
    order = wire.order(1, *[wire.encode(part) for part in _start(scenario)], None)
    assert ask(app, "train", config, order).has_content()
    with pytest.raises(FedsimError, match="which is all that its policy allows"):
        ask(app, "train", config, order)


def _start(scenario: Scenario) -> Any:
    from fedsim.training.workload import Workload

    parameters, buffers = Workload(scenario, "none").initial()
    return parameters, wire.floating(buffers)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("scenario", "{}", "the run's scenario is none"),
        ("scenario", "[", "the run's scenario is none"),
        ("stack", "other", "no stack 'other'"),
        ("held", "[1, 2]", "count no examples"),
        ("held", "{", "count no examples"),
        ("held", "[1, 1, 1]", r"client 0 holds \d+ examples, and the server counts 1"),
        *(("run", run, "hexadecimal") for run in ("", "..", "../../etc", "ABC", "0" * 65)),
    ],
)
def test_settings_of_a_run_that_are_none(key: str, value: str, said: str, tmp_path: Path) -> None:
    (app, *_) = nodes(tmp_path)
    with pytest.raises(FedsimError, match=said):
        ask(app, "train", {**settings(resolved()), key: value}, RecordDict())


def test_a_secret_is_made_once_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    first = secret_seed(tmp_path / "home", RUN)
    assert first == secret_seed(tmp_path / "home", RUN) > 2**128
    assert first != secret_seed(tmp_path / "home", RUN[::-1])
    assert first != secret_seed(tmp_path / "other", RUN)
    path = tmp_path / "home" / "secret"
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o644)
    with pytest.raises(FedsimError, match="chmod 600"):
        secret_seed(tmp_path / "home", RUN)
    path.write_bytes(b"short")
    with pytest.raises(FedsimError, match="expected 32 bytes"):
        secret_seed(tmp_path / "home", RUN)


@contextmanager
def listening(context: ssl.SSLContext | None) -> Iterator[str]:
    """A server that answers HTTP, over TLS with `context`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                try:
                    if context:
                        connection = context.wrap_socket(connection, server_side=True)
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.0 404 Not Found\r\n\r\n")
                except OSError:
                    pass
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_superlink_is_refused_with_the_reason(tmp_path: Path) -> None:
    own = make_authority(tmp_path / "own", ["127.0.0.1"])
    with listening(None) as plain:
        link.check(plain, None)
        with pytest.raises(FedsimError, match="does not speak TLS"):
            link.check(plain, own.certificate)
    foreign = make_authority(tmp_path / "foreign", ["127.0.0.1"])
    elsewhere = make_authority(tmp_path / "elsewhere", ["10.0.0.1"])
    expired = make_authority(tmp_path / "expired", ["127.0.0.1"], days=0)
    for server, roots, said in (
        (own, own, None),
        (foreign, own, "not accepted"),
        (elsewhere, elsewhere, "not accepted"),
        (expired, expired, "expired"),
    ):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server.server_certificate, server.server_key)
        with listening(context) as address:
            with pytest.raises(FedsimError, match="speaks TLS; give"):
                link.check(address, None)
            if said is None:
                link.check(address, roots.certificate)
                continue
            with pytest.raises(FedsimError, match=said):
                link.check(address, roots.certificate)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("example.org:8000", "another machine, and without TLS"),
        ("192.168.1.7:8000", "another machine, and without TLS"),
        ("127.0.0.1", "expected HOST:PORT"),
        ("127.0.0.1:0", "expected HOST:PORT"),
        ("127.0.0.1:70000", "expected HOST:PORT"),
        ("127.0.0.1:1", "nobody answers"),
        ("[::1]:1", "nobody answers"),
    ],
)
def test_an_address_that_will_not_do(address: str, said: str) -> None:
    with pytest.raises(FedsimError, match=f"--superlink: .*{said}"):
        link.check(address, None)


def refused(*words: str) -> str:
    """What a command says that ends with status 2."""
    done = CliRunner().invoke(commands.app, list(words))
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
    done = CliRunner().invoke(commands.app, ["keys", str(tmp_path / "keys"), "-n", "2", *hosts])
    folders = sorted(map(str, (tmp_path / "keys").iterdir()))
    assert sorted(done.output.split()) == folders and len(folders) == 5


def test_a_private_key_is_not_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "check", lambda *_: None)
    (tmp_path / "key").write_bytes(_make_node_key()[0])
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
