"""What a node answers, with the installed fedsim, its own data and its owner's policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from pydantic import ValidationError

from fedsim.federation import client_app, refusals, wire
from fedsim.federation.checkpoint import fingerprint
from fedsim.federation.client_app import SumIdentity
from fedsim.federation.delivery import CENSUS, answer_census
from fedsim.federation.network.home import pin_run, run_folder, secret_seed
from fedsim.federation.network.link import SCENARIO
from fedsim.federation.network.policy import Policy, Releases
from fedsim.federation.secure_aggregation.secrets import Identity
from fedsim.rng import digest
from fedsim.scenario import Scenario
from fedsim.scenario.model import PluginRef
from fedsim.scenario.resolve import resolve
from fedsim.system import threads
from fedsim.training.client import Client
from fedsim.training.server import Census
from fedsim.training.source import build_source, load_source, private_statistics
from fedsim.training.workload import IN_LOG, OneClient, Workload
from fedsim.types import Dataset, FedsimError, Table, Unit

_MOST_TEXT = 50_000_000


class NodeApp:
    """Called with a message and its context, answers for one client as the run's settings say."""

    def __init__(
        self,
        client: int,
        data: str,
        home: Path,
        policy: Policy,
        *,
        shared_seed: bool,
        identity: Identity | None = None,
    ) -> None:
        """Prepares an app that loads no data before its first message.

        Args:
            client: Number of the client that the node is, from 0.
            data: File or folder in place of the scenario's source; or `scenario`, for the client's
                share of that source.
            home: The node's own folder, see the module `home`; a damaged count in it is a
                FedsimError.
            policy: Rules of what a server may ask.
            shared_seed: Whether it draws from the scenario's seed, and not from its own secret.
            identity: Signing key for secure sums, and its peers' keys; None refuses secure sums.
        """
        self._number, self._data, self._home = client, data, home
        self._policy, self._shared_seed, self._identity = policy, shared_seed, identity
        self._releases = Releases(home / "releases.json", policy.releases)
        # Messages of one stack follow one another: its app is kept, and the data over all stacks.
        self._app = lru_cache(maxsize=1)(self._build)
        self._dataset = lru_cache(maxsize=1)(self._load)

    def refuse_other_identity(self) -> None:
        """Refuses, by a FedsimError, a signing key that is not this client's in the peers' file."""
        if self._identity and self._identity.peers.get(self._number) != self._identity.public:
            raise FedsimError(
                f"--peers: client {self._number} has another key there than --signing-key, or "
                "none; check --client, and that both files are of this node"
            )

    def refuse_missing_data(self) -> None:
        """Refuses, by a FedsimError, a path `data` that does not exist, before the node joins."""
        if self._data != SCENARIO and not Path(self._data).exists():
            raise FedsimError(
                f"--data: {self._data}: no such file or folder; `{SCENARIO}` takes the client's "
                "share of the scenario's own source"
            )

    def __call__(self, message: Message, context: Context) -> Message:
        """Answers one message in its `context`; what is refused or fails is a FedsimError.

        That is sent to the server: it tells nothing of the data but their number and shape.
        Everything else goes to the node's own log, on stderr.
        """
        try:
            return self._answer(message, context)
        except Exception as error:
            with suppress(OSError):  # a full disk behind it
                sys.stderr.write(f"refused: {_causes(error)}\n")
            if isinstance(error, FedsimError):
                raise
            raise FedsimError(f"{type(error).__name__}: {IN_LOG}") from error

    def _answer(self, message: Message, context: Context) -> Message:
        settings = context.run_config
        if (version := str(settings.get("version", "1"))) != wire.VERSION:
            raise FedsimError(
                f"the run's messages are of version {version[:40]}, and this node's of version "
                f"{wire.VERSION}: install the same fedsim on both sides"
            )
        scenario, stack = _text(settings, "scenario"), _text(settings, "stack")
        run, held = _text(settings, "run"), _text(settings, "held")
        # The node's owner says which client it is, and not what Flower has configured.
        context.node_config["partition-id"] = self._number
        if message.metadata.message_type == f"query.{CENSUS}":
            try:
                return Message(self._count_examples(scenario), reply_to=message)
            except FedsimError as error:  # the server knows no more of who this is
                raise FedsimError(f"client {self._number}: {error}") from error
        return self._app(scenario, stack, run, held)(message, context)

    def _count_examples(self, written: str) -> RecordDict:
        scenario = _scenario(written)
        threads.fix(scenario.threads)
        for stack in scenario.defenses:
            self._check(scenario, stack)
        client = self._make_client(scenario, scenario.seed)
        reasons = self._reasons(scenario, client)
        # A node knows no other's count; with its own alone it can still ask what would refuse it.
        counts = [0] * scenario.data.clients
        counts[self._number] = len(client.own)
        own = Census(held=counts, private_statistics=reasons)
        for stack in scenario.defenses:
            self._workload(scenario, stack, client, own)
        return answer_census(self._number, len(client.own), reasons)

    def _build(self, written: str, stack: str, run: str, held: str) -> ClientApp:
        scenario = _scenario(written)
        threads.fix(scenario.threads)
        if stack not in scenario.defenses:
            raise FedsimError(f"defenses: the scenario has no stack {stack[:40]!r}")
        self._check(scenario, stack)
        folder = run_folder(self._home, run)
        seed = scenario.seed if self._shared_seed else secret_seed(self._home, run)
        client = self._make_client(scenario, seed)
        # All that noise is drawn for is what this node makes of it, and none of the server's words.
        counts = _counts(held, scenario)
        data = {"inputs": client.dataset.inputs, "labels": client.dataset.train_labels}
        pins = fingerprint(scenario, stack), str(counts), digest(data)
        if not self._shared_seed:
            use = json.dumps(["noise", stack, *pins])
            client = replace(client, noise_seed=secret_seed(self._home, run, use))
        # A server's word on the noise is not taken: it follows from the scenario and the counts,
        # of which its own cannot be misstated, and another's only so that there is more noise.
        of_all = Census(held=counts, private_statistics=self._reasons(scenario, client))
        workload = self._workload(scenario, stack, client, of_all)
        # Last of all checks, so that a run that is refused pins nothing.
        pin_run(self._home, run, stack, *pins)
        job = client_app.FederationJob(scenario=written, stack=stack, out=str(folder))
        sum_identity = self._sum_identity(workload, run)
        return client_app.build(job, workload, sum_identity, on_release=self._releases.count)

    def _check(self, scenario: Scenario, stack: str) -> None:
        self._policy.check(scenario, stack)
        # Other stacks and attacks do not run here, and may name what this node has not installed.
        own = {"attacks": [], "defenses": {stack: scenario.defenses[stack]}}
        resolve(scenario.model_copy(update=own))

    def _workload(
        self, scenario: Scenario, stack: str, client: Client, counts: Census
    ) -> OneClient:
        workload = OneClient(scenario, stack, client, counts)
        self._policy.check_release(workload)
        self._sum_identity(workload)
        refusals.check(workload)
        return workload

    def _reasons(self, scenario: Scenario, client: Client) -> Mapping[Unit, tuple[str, ...]]:
        """Returns why nothing can be claimed, by privacy unit, as far as this client's data say."""
        return private_statistics(
            scenario, client.dataset, [client.own], dealt=self._data == SCENARIO
        )

    def _sum_identity(self, workload: Workload, run: str = "") -> SumIdentity | None:
        if workload.protocol is None:
            return None
        if self._identity is None:
            raise FedsimError(
                f"defenses.{workload.stack_name}: secure_aggregation: this node knows no keys of "
                "its peers, so that a server could invent them; start it with --signing-key and "
                "--peers (`fedsim keys` makes both)"
            )
        self.refuse_other_identity()
        peers = self._identity.peers
        if lacking := set(range(workload.scenario.data.clients)) - set(peers):
            raise FedsimError(f"--peers: no key of client {min(lacking)}, who is to take part")
        fresh = not self._shared_seed
        return SumIdentity(identity=self._identity, fresh=fresh, run=run if fresh else "")

    def _make_client(self, scenario: Scenario, seed: int) -> Client:
        if not 0 <= self._number < scenario.data.clients:
            raise FedsimError(
                f"this node is client {self._number}, and the scenario's clients are 0 to "
                f"{scenario.data.clients - 1}"
            )
        dataset = self._dataset(scenario.data.source.model_dump_json())
        if self._data == SCENARIO:
            if scenario.data.partition.path is not None:
                self._policy.check_path(scenario.data.partition.path)
            # Any stack will do: the partition does not depend on it.
            first = next(iter(scenario.defenses))
            return replace(Workload(scenario, first, dataset).client(self._number), seed=seed)
        own = torch.arange(len(dataset.train_labels))
        return Client(number=self._number, dataset=dataset, own=own, seed=seed)

    def _load(self, source: str) -> Dataset | Table:
        wanted = json.loads(source)
        if self._data != SCENARIO:
            if wanted["parameters"].get("path") is None:
                raise FedsimError(
                    f"--data: source {wanted['name']} reads no files; use --data {SCENARIO}"
                )
            wanted["parameters"]["path"] = self._data
        chosen = PluginRef.model_validate(wanted)
        if self._data == SCENARIO and (place := build_source(chosen).place) is not None:
            self._policy.check_path(place)
        try:
            return load_source(chosen)
        except Exception as error:  # it may quote the data
            if self._data == SCENARIO:
                raise
            raise FedsimError(
                f"data.source: the data of client {self._number} cannot be loaded as it says: "
                f"{IN_LOG}"
            ) from error


def _causes(error: BaseException | None) -> str:
    said = []
    while error is not None:
        said.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "; from ".join(said)


def _text(settings: object, key: str) -> str:
    value = settings.get(key) if isinstance(settings, dict) else None
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise FedsimError(f"the run's settings have no {key!r}; it was not started by fedsim")
    return value


@lru_cache(maxsize=1)
def _scenario(written: str) -> Scenario:
    try:
        return Scenario.model_validate_json(written)
    except ValidationError as error:
        raise FedsimError(f"the run's scenario is none: {error.errors()[0]['msg']}") from error


def _counts(held: str, scenario: Scenario) -> list[int]:
    try:
        counts = json.loads(held)
        assert isinstance(counts, list)
        assert len(counts) == scenario.data.clients
        assert all(type(count) is int and count >= 0 for count in counts)
    except (ValueError, AssertionError, RecursionError) as error:
        raise FedsimError("the run's settings count no examples of each client") from error
    return counts
