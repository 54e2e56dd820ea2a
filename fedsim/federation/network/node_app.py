"""What a node answers, with the installed fedsim, its own data and its owner's policy."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from pydantic import ValidationError

from fedsim.federation import client_app
from fedsim.federation.network import census
from fedsim.federation.network.home import run_folder, secret_seed
from fedsim.federation.network.link import SCENARIO
from fedsim.federation.network.policy import Policy, Releases
from fedsim.scenario import Scenario
from fedsim.scenario.model import PluginRef
from fedsim.system import threads
from fedsim.training import refusals
from fedsim.training.census import Census
from fedsim.training.client import Client
from fedsim.training.source import load_source, private_statistics
from fedsim.training.workload import OneClient, Workload
from fedsim.types import Dataset, FedsimError, Table

_MOST_TEXT = 50_000_000


class NodeApp:
    """Answers Flower's messages for one client. What it is asked follows from a run's settings."""

    def __init__(
        self, client: int, data: str, home: Path, policy: Policy, *, shared_seed: bool
    ) -> None:
        """An app that has computed nothing.

        Args:
            client: Its number in every federation.
            data: A file or folder that takes the place of the scenario's source, or `scenario`.
            home: Its folder (`home`).
            policy: What it agrees to.
            shared_seed: Whether it draws batches and noise from the scenario's seed.
        """
        self._number, self._data, self._home = client, data, home
        self._policy, self._shared_seed = policy, shared_seed
        self._releases = Releases(home / "releases.json", policy.releases)
        self._app = lru_cache(maxsize=1)(self._build)
        self._dataset = lru_cache(maxsize=1)(self._load)

    def refuse_missing_data(self) -> None:
        """Refuse data that are not there: the node would join, and fail once it is asked.

        Raises:
            FedsimError: there is no such file or folder.
        """
        if self._data != SCENARIO and not Path(self._data).exists():
            raise FedsimError(
                f"--data: {self._data}: no such file or folder; `{SCENARIO}` takes the client's "
                "share of the scenario's own source"
            )

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message.

        Raises:
            FedsimError: the policy does not allow it, or it is no message of fedsim.
        """
        settings = context.run_config
        scenario, stack = _text(settings, "scenario"), _text(settings, "stack")
        run, held = _text(settings, "run"), _text(settings, "held")
        context.node_config["partition-id"] = self._number
        if message.metadata.message_type == f"query.{census.ACTION}":
            try:
                return Message(self._counted(scenario), reply_to=message)
            except FedsimError as error:  # the server knows no more of who this is
                raise FedsimError(f"client {self._number}: {error}") from error
        app = self._app(scenario, stack, run, held)
        if message.metadata.message_type.startswith("train"):
            self._releases.count()
        return app(message, context)

    def _counted(self, written: str) -> RecordDict:
        """How much the client holds, once every stack of the scenario is allowed and can work."""
        scenario = _scenario(written)
        threads.fix(scenario.threads)
        for stack in scenario.defenses:
            self._policy.check(scenario, stack)
        client = self._client(scenario, scenario.seed)
        for stack in scenario.defenses:
            refusals.check(OneClient(scenario, stack, client))
        reasons = private_statistics(scenario, client.dataset, dealt=self._data == SCENARIO)
        return census.answer(self._number, len(client.own), reasons)

    def _build(self, written: str, stack: str, run: str, held: str) -> ClientApp:
        scenario = _scenario(written)
        threads.fix(scenario.threads)
        if stack not in scenario.defenses:
            raise FedsimError(f"defenses: the scenario has no stack {stack[:40]!r}")
        self._policy.check(scenario, stack)
        folder = run_folder(self._home, run)
        seed = scenario.seed if self._shared_seed else secret_seed(self._home, run)
        counts = Census(held=_counts(held, scenario), private_statistics={})
        workload = OneClient(scenario, stack, self._client(scenario, seed), counts)
        job = client_app.Job(
            scenario=written, stack=stack, out=str(folder), threads=scenario.threads
        )
        return client_app.build(job, workload)

    def _client(self, scenario: Scenario, seed: int) -> Client:
        if not 0 <= self._number < scenario.data.clients:
            raise FedsimError(
                f"this node is client {self._number}, and the scenario's clients are 0 to "
                f"{scenario.data.clients - 1}"
            )
        dataset = self._dataset(scenario.data.source.model_dump_json())
        if self._data == SCENARIO:
            first = next(iter(scenario.defenses))
            return replace(Workload(scenario, first, dataset).client(self._number), seed=seed)
        own = torch.arange(len(dataset.train_labels))
        return Client(number=self._number, dataset=dataset, own=own, seed=seed)

    def _load(self, source: str) -> Dataset | Table:
        wanted = json.loads(source)
        named = wanted["parameters"].get("path")
        if self._data != SCENARIO:
            if named is None:
                raise FedsimError(
                    f"--data: source {wanted['name']} reads no files; use --data {SCENARIO}"
                )
            wanted["parameters"]["path"] = self._data
        elif named is not None:
            self._policy.check_path(named)
        return load_source(PluginRef.model_validate(wanted))


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
        assert all(isinstance(count, int) and count >= 0 for count in counts)
    except (ValueError, AssertionError) as error:
        raise FedsimError("the run's settings count no examples of each client") from error
    return counts
