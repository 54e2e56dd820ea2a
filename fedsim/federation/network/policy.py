"""What a node lets a server ask of its data: decided by whoever owns them, before any answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedsim.contracts import plugins
from fedsim.contracts.stack import Stack
from fedsim.federation.secure_aggregation import plan
from fedsim.recording.files import write_bytes
from fedsim.scenario import Scenario
from fedsim.scenario.build import build_stack
from fedsim.scenario.document import ScenarioError
from fedsim.scenario.model import PluginRef
from fedsim.scenario.reader import MAX_BYTES, parse_yaml
from fedsim.system import paths
from fedsim.training.spending import asked_epsilons
from fedsim.training.workload import Workload
from fedsim.types import FedsimError
from fedsim.words import nearest, number_of

_Stacks = list[list[dict[str, Any]]]
# Groups of plugins that a node runs.
_GROUPS = ["fedsim.learners", "fedsim.models", "fedsim.defenses"]


class Policy(BaseModel):
    """A node owner's rules for what a server may ask; all else is refused untouched."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stacks: _Stacks | None = None
    """Stacks of defenses behind which the node answers, written as in a scenario; None: any.

    Parameters that are left out have their defaults. Behind a listed stack that is not empty, no
    batch-norm statistics are released, since they bypass all defenses. An ε that a stack asks for
    covers everything released behind it in a run, probes included. Each run may spend it again, and
    so may each name that a scenario gives the stack.
    """
    plugins: list[str] | None = None
    """Names of the installed learners, models and defenses that the node runs; None: any."""
    paths: list[str] = []
    """The node's own files or folders that a scenario may name; none by default."""
    releases: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of answers over all runs, of training and of probes; None: any number."""
    minimum_clients: Annotated[int, Field(ge=1)] = 1
    """Least number of clients of a federation that the node joins."""
    minimum_cohort: Annotated[int, Field(ge=1)] = 1
    """Least number of clients in a secure sum that can open with the node's update in it. With 2 or
    more, the node releases nothing behind a stack without secure sums."""

    @field_validator("stacks")
    @classmethod
    def _check_stacks(cls, stacks: _Stacks | None) -> _Stacks | None:
        for stack in stacks or []:
            try:
                if any(one.delta is None for one in asked_epsilons(_stack(stack))):
                    raise ValueError(
                        "epsilon without delta: the server would choose what it means; add "
                        "`delta: 1e-5`, and the scenario has to say the same"
                    )
            except KeyError as error:
                raise ValueError("a defense has no name") from error
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join(map(str, first["loc"]))
                raise ValueError(f"{error.title}: {key}: {first['msg']}") from error
            except FedsimError as error:
                raise ValueError(str(error)) from error
        return stacks

    @classmethod
    def read(cls, path: Path | None) -> Policy:
        """Reads the YAML file at `path`; one that cannot be read or is no policy is a FedsimError.

        None, and an empty file, allow all but naming files.
        """
        if path is None:
            return cls()
        try:
            text = paths.read_named(path, "--policy", MAX_BYTES).decode("utf-8-sig")
            is_empty = all(line.lstrip()[:1] in ("", "#") for line in text.splitlines())
            written = {} if is_empty else parse_yaml(text, "").value
        except (UnicodeDecodeError, ScenarioError) as error:
            raise FedsimError(f"--policy: {path}: no YAML: {error}") from error
        try:
            policy = cls.model_validate(written if written is not None else {})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise FedsimError(f"--policy: {path}: {key}: {first['msg']}") from error
        # A rule that names what nothing installed has would allow nothing.
        known = [name for group in _GROUPS for name in plugins.names(group)]
        for name in policy.plugins or []:
            if name not in known:
                raise FedsimError(
                    f"--policy: {path}: plugins: nothing installed is called {name!r}"
                    f"{nearest(name, known) or ' (see fedsim list)'}"
                )
        return policy

    def check(self, scenario: Scenario, stack: str) -> None:
        """Refuses, by a FedsimError, what the policy forbids of `stack` in `scenario.defenses`."""
        wanted = build_stack(scenario.defenses[stack])
        # Compared once built, so that neither spelling nor defaults matter.
        if self.stacks is not None and wanted not in map(_stack, self.stacks):
            raise FedsimError(
                f"defenses.{stack}: this node's policy does not allow this stack (stacks)"
            )
        outside = scenario.observe.batch_sizes and scenario.privacy.probes != "included"
        if self.stacks is not None and outside and asked_epsilons(wanted):
            raise FedsimError(
                f"privacy.probes: this node's policy lets defenses.{stack} spend the ε that it "
                "asks for, and probes would be outside of it (stacks); use `included`"
            )
        model = [scenario.model.name] if scenario.model else []
        named = [scenario.learner.name, *model, *(ref.name for ref in scenario.defenses[stack])]
        for name in named:
            if self.plugins is not None and name not in self.plugins:
                raise FedsimError(f"{name}: this node's policy does not allow it (plugins)")
        if scenario.training.weights:
            self.check_path(scenario.training.weights)
        if scenario.data.clients < self.minimum_clients:
            raise FedsimError(
                "data.clients: this node takes part with "
                f"{number_of(self.minimum_clients, 'client')} or more, got {scenario.data.clients} "
                "(minimum_clients)"
            )

    def check_release(self, workload: Workload) -> None:
        """Raises a FedsimError if batch-norm statistics would bypass a listed stack.

        Above a `minimum_cohort` of 1, so do no secure sums, and sums that open with fewer clients.
        """
        if not workload.protocol and self.minimum_cohort > 1:
            raise FedsimError(
                f"defenses.{workload.stack_name}: this node adds its update to others' and releases"
                " none as it is (minimum_cohort); end the stack with secure_aggregation"
            )
        if workload.protocol and self.minimum_cohort > 1:
            terms = plan.terms(workload, 1)
            if terms.quorum < self.minimum_cohort:
                raise FedsimError(
                    f"defenses.{workload.stack_name}: this node is in a sum of "
                    f"{number_of(self.minimum_cohort, 'client')} or more, and one opens with "
                    f"{terms.quorum} of the {number_of(len(terms.participants), 'participant')} "
                    "(minimum_cohort); raise secure_aggregation's threshold, or "
                    "federation.participation"
                )
        listed = self.stacks is not None and workload.scenario.defenses[workload.stack_name]
        if listed and workload.releases_statistics and not workload.protocol:
            raise FedsimError(
                f"defenses.{workload.stack_name}: batch-norm statistics pass by this stack, and "
                "this node's policy lets nothing pass (stacks); use group norm, or training.local."
                "mode: eval"
            )

    def check_path(self, path: str) -> None:
        """Raises a FedsimError unless the policy lists the file at `path` or a folder around it."""
        # Resolved, so that neither links nor `..` lead out of an allowed folder.
        own = paths.from_home(path).resolve()
        allowed = [paths.from_home(folder).resolve() for folder in self.paths]
        if not any(own == folder or folder in own.parents for folder in allowed):
            raise FedsimError(f"{path}: this node's policy lets no scenario name this file (paths)")


class Releases:
    """Counts on disk how often the node has answered."""

    def __init__(self, path: Path, most: int | None) -> None:
        """Continues the count at `path`, up to `most` (None: any); a FedsimError if damaged."""
        self._path, self._most = path, most
        self._count = 0
        if path.exists():
            try:
                self._count = int(json.loads(paths.text(path, paths.TEXT))["releases"])
            except (ValueError, KeyError, TypeError) as error:
                raise FedsimError(
                    f"{path}: damaged, so that nobody knows how much was released; restore it"
                ) from error

    def count(self) -> None:
        """Counts one more answer, before it is computed; one too many is a FedsimError."""
        if self._most is not None and self._count >= self._most:
            raise FedsimError(
                f"this node has answered {self._count} times, which is all that its policy allows "
                "(releases)"
            )
        # On disk before the answer is computed: a kill in between counts one answer too many, never
        # too few.
        self._count += 1
        write_bytes(self._path, json.dumps({"releases": self._count}).encode())


def _stack(written: Sequence[Mapping[str, Any]]) -> Stack:
    return build_stack(
        [
            PluginRef(
                name=entry["name"],
                parameters={key: value for key, value in entry.items() if key != "name"},
            )
            for entry in written
        ]
    )
