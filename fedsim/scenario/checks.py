"""Refuses combinations of sections that cannot work, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from fedsim.contracts.attack import Attack, unreadable
from fedsim.contracts.defense import AggregationDefense, MaskedAggregation
from fedsim.contracts.learner import Learner
from fedsim.contracts.plugins import list_installed
from fedsim.scenario.build import (
    algorithm,
    build_engine,
    build_learner,
    build_stack,
    declared_training,
    plugin_class,
    rate_factor,
)
from fedsim.scenario.document import KeyPath
from fedsim.scenario.model import (
    AttackEntry,
    Data,
    Federation,
    Observe,
    PluginRef,
    Scenario,
    Training,
)
from fedsim.types import FedsimError, Payload
from fedsim.words import number_of

SectionProblem = tuple[KeyPath, str]

_PARTITION_KEYS = {"dirichlet": "alpha", "shards": "shards_per_client", "file": "path"}
_EXAMPLES = {"alpha": "0.5", "shards_per_client": "2", "path": "clients.csv"}


def check(
    sections: Mapping[str, Any], sound: Callable[[KeyPath], bool]
) -> Iterator[SectionProblem]:
    """Yields (key path, message) of each problem that lies in how sections of a scenario combine.

    `sections` maps the name of a top-level key to its validated value, and lacks the invalid ones.
    `sound(path)` returns whether no problem is known yet at the key path `path` or below.
    """
    data, training, observe = (sections.get(name) for name in ("data", "training", "observe"))
    attacks = enumerate(sections.get("attacks") or [])
    usable = [(index, entry) for index, entry in attacks if sound(("attacks", index))]
    # What cannot be built has errors of its own, which are reported elsewhere.
    stacks = {n: r for n, r in sections.get("defenses", {}).items() if sound(("defenses", n))}
    learner = build_learner(sections["learner"]) if sound(("learner",)) else None
    trains = learner is None or learner.trains
    if learner:
        yield from _readable(usable, learner.payload())
        if not trains:
            yield from _closed_form(sections, learner)
        elif "model" not in sections and sound(("model",)):
            yield ("model",), "missing; add `model: ...`"
    faults = list(_algorithm(training)) if training else []
    yield from faults
    if data:
        yield from _partition(data)
    if observe:
        yield from _check_observe(observe, training, data)
        if training:
            yield from _sampling(training, observe, [entry for _, entry in usable])
        yield from _vantages(observe, training, sections.get("federation"), stacks, trains=trains)
        if learner:
            yield from _candidates(observe, usable, trains=trains)
    yield from _engine(sections)
    yield from _results(sections)
    yield from _labels(usable)
    yield from _knowledge(sections, usable, trains=trains)
    # Stacks are checked only against sound training: they would repeat its errors.
    if training and not faults:
        model = sections.get("model") if sound(("model",)) else None
        for name, refs in stacks.items():
            yield from _stack(name, refs, training if trains else None, model)


def _candidates(
    observe: Observe, entries: Sequence[tuple[int, AttackEntry]], *, trains: bool
) -> Iterator[SectionProblem]:
    """Refuses attacks on updates that lack candidates, and candidates that nobody can have."""
    path = ("observe", "candidates")
    if observe.candidates is None:
        for index, entry in entries:
            if trains and _asks_candidates(entry):
                yield (
                    ("attacks", index),
                    f"{entry.name} says of candidates whether they took part; add "
                    "`observe.candidates: N`, or drop it",
                )
    elif not trains:
        yield path, "the learner trains no model, and every row is asked about; remove it"
    elif observe.batch_sizes is not None:
        yield path, "no candidates are in the batches of probes; remove it, or observe.batch_sizes"


def _attack_class(entry: AttackEntry) -> type[Attack[Any]]:
    cls = plugin_class("fedsim.attacks", entry.name)
    assert issubclass(cls, Attack)
    return cls


def _asks_candidates(entry: AttackEntry) -> bool:
    cls = _attack_class(entry)
    return cls.asked_of_candidates and "update" in cls.reads


def _asks_members(entry: AttackEntry) -> bool:
    """Returns whether an attack on updates says which candidates take part."""
    return _asks_candidates(entry) and not _attack_class(entry).asked_of_sources


def _engine(sections: Mapping[str, Any]) -> Iterator[SectionProblem]:
    """Refuses an engine that is none, and what it keeps from a run by leaving data in place."""
    if not (federation := sections.get("federation")):
        return
    name, observe = federation.engine, sections.get("observe")
    try:
        engine = build_engine(name)
    except FedsimError as error:
        yield ("federation", "engine"), str(error)
        return
    if not engine.remote:
        return
    if sections.get("audit") is not None:
        yield (
            ("audit",),
            f"canaries take the place of clients' data, which engine {name} leaves where they are; "
            "audit the scenario on another engine (federation.engine)",
        )
    if observe and observe.candidates is not None:
        yield (
            ("observe", "candidates"),
            f"engine {name} leaves data where they are, so that no copy of a candidate can be "
            "found at other clients; use another engine, or remove it",
        )


def cautions(scenario: Scenario) -> list[str]:
    """Returns warnings about settings that weaken attacks or comparisons; none without attacks."""
    if not scenario.attacks:
        return []
    found = []
    if not declared_training(scenario.training).sums_gradients:
        found.append(
            "training.local: attacks that match updates simulate optimizer and weight_decay; those "
            "that read labels or features off an update take it for SGD"
        )
    asked = scenario.observe.candidates
    # A coin holds half of them out, and k of n others exceed a threshold at the rate k / (n + 1).
    if asked is not None and asked < 2 * 99 and any(map(_asks_members, scenario.attacks)):
        found.append(
            f"observe.candidates: of {asked} of a client about {asked // 2} take no part, and a "
            "share at 1% of false accusations takes 99; ask for 240 or more. In a sum, candidates "
            "of all its clients count"
        )
    if scenario.federation.clips_at_clients:
        found.append(
            f"federation.strategy: {scenario.federation.strategy} has every client clip what it "
            "sends, so that updates without a stack are no undefended ones; compare with FedAvg"
        )
    if any(not stack for stack in scenario.defenses.values()):
        return found
    return [
        *found,
        "defenses: no stack is undefended, so that no table is valid and nothing shows what a "
        "defense gains; add `none: []`",
    ]


def _closed_form(sections: Mapping[str, Any], plugin: Learner) -> Iterator[SectionProblem]:
    """Refuses what has no meaning for a learner that releases once, from all of a client's data."""
    learner = sections["learner"].name
    training, observe = sections.get("training"), sections.get("observe")
    # A learner of features may have a model, which it does not train.
    frozen = plugin.reads_features and "model" in sections
    if "model" in sections and not frozen:
        yield ("model",), f"learner {learner} trains no model; remove it"
    if plugin.payload() is None:
        if observe and observe.batch_sizes is not None:
            yield (
                ("observe", "batch_sizes"),
                f"no attack reads what learner {learner} releases, and nothing is recorded; remove "
                "it",
            )
    elif sections.get("attacks") and observe and observe.batch_sizes is None:
        yield (
            ("observe", "batch_sizes"),
            f"missing: what learner {learner} releases is attacked in probes, of so many of a "
            "client's rows on average; add `observe.batch_sizes: [...]`, or use `attacks: []`",
        )
    if training and training.rounds != 1:
        yield (
            ("training", "rounds"),
            f"learner {learner} releases once what a client's data are, and would do so again in "
            "each round; use `rounds: 1`",
        )
    unused = ("local", "algorithm", "projection_radius", *(() if frozen else ("weights",)))
    # A key that is set to its default cannot be told from one that is not written.
    for key in unused:
        if training and getattr(training, key) != Training.model_fields[key].get_default():
            yield ("training", key), f"learner {learner} does not train; remove it"
    if observe and observe.plant:
        yield ("observe", "plant"), f"learner {learner} has no model to plant in; remove it"
    if observe and observe.releases > 1:
        yield (
            ("observe", "releases"),
            f"what learner {learner} releases again it has drawn anew, so that a mean is not all "
            "that a server has of it; use 1, and more columns in the learner",
        )


def _readable(
    entries: Sequence[tuple[int, AttackEntry]], released: Payload | None
) -> Iterator[SectionProblem]:
    """Refuses attacks that read something else than what the learner's clients send."""
    for index, entry in entries:
        if reason := unreadable(entry.name, _attack_class(entry).reads, released):
            fitting = [
                plugin.name
                for plugin in list_installed("fedsim.attacks")
                if plugin.cls and issubclass(plugin.cls, Attack) and released in plugin.cls.reads
            ]
            said = ", ".join(fitting) or "none is installed"
            yield ("attacks", index), f"{reason}; drop it, or use one that does ({said})"


def _sampling(
    training: Training, observe: Observe, entries: Sequence[AttackEntry]
) -> Iterator[SectionProblem]:
    local, path = training.local, ("training", "local", "sampling")
    if local.sampling == "without_replacement":
        return
    if local.batches == "same" and local.steps > 1:
        yield path, f"{local.sampling} {_EACH_STEP}; use batches: different"
    if not declared_training(training).sizes_vary:
        return
    # Who asks about candidates needs no batch's size.
    sized = not entries or not all(map(_asks_candidates, entries))
    if observe.batch_sizes is None and sized:
        yield (
            path,
            f"the size of a batch varies under {local.sampling} and no attacker knows it, so that "
            "updates of training cannot be attacked; add `observe.batch_sizes: [...]`, whose "
            "probes have batches of a size that is declared",
        )
    elif observe.releases > 1:
        yield (
            ("observe", "releases"),
            f"a batch that is drawn by {local.sampling} is never drawn again, and several releases "
            "of one are not accounted; use 1",
        )


_UNPROJECTED = (
    "the server projects after each of its own steps, and the local steps of fedavg would go "
    "unprojected"
)

_EACH_STEP = "draws a batch for each step"


def _algorithm(training: Training) -> Iterator[SectionProblem]:
    if algorithm(training) == "fedavg" and training.projection_radius is not None:
        yield (
            ("training", "projection_radius"),
            f"{_UNPROJECTED}; use fedsgd (one local step without momentum), or remove it",
        )
    yield from _schedule(training)
    local = training.local
    if local.momentum and local.optimizer != "sgd":
        yield (
            ("training", "local", "momentum"),
            f"{local.optimizer} averages gradients by rates of its own; remove it, or use sgd",
        )
    if training.algorithm != "fedsgd":
        return
    for key, only in (("optimizer", "sgd"), ("weight_decay", 0), ("steps", 1), ("momentum", 0)):
        if (value := getattr(local, key)) != only:
            yield (
                ("training", "algorithm"),
                f"fedsgd takes no local step, but sends a gradient: training.local.{key} is "
                f"{value}; use fedavg, or {key} {only}",
            )


_LEAST_RATE = 1e-30
"""Least learning rate of a round: updates are divided by it."""


def _schedule(training: Training) -> Iterator[SectionProblem]:
    schedule, path = training.local.schedule, ("training", "local", "schedule")
    if schedule is None:
        return
    if schedule.name == "step" and schedule.every is None:
        yield (*path, "every"), "missing: the rounds between two falls of step; add `every: 50`"
    elif schedule.name == "cosine" and schedule.every is not None:
        yield (*path, "every"), "cosine falls in every round; remove it, or use step"
    elif training.local.lr * rate_factor(training, training.rounds) < _LEAST_RATE:
        yield (*path, "factor"), f"the rate falls below {_LEAST_RATE:g}; raise it, or every"


def _partition(data: Data) -> Iterator[SectionProblem]:
    partition = data.partition
    for name, key in _PARTITION_KEYS.items():
        value, path = getattr(partition, key), ("data", "partition", key)
        if partition.name == name and value is None:
            yield path, f"missing: partition {name} needs it; add `{key}: {_EXAMPLES[key]}`"
        if partition.name != name and value is not None:
            yield (
                path,
                f"only partition {name} has it, this is {partition.name}; remove one of them",
            )


def _check_observe(
    observe: Observe, training: Training | None, data: Data | None
) -> Iterator[SectionProblem]:
    for index, number in enumerate(observe.rounds):
        if training and number != "last" and number > training.rounds:
            yield (
                ("observe", "rounds", index),
                f"round {number} is beyond training.rounds ({training.rounds}); observe an earlier "
                "one, or train longer",
            )
    for index, client in enumerate(observe.clients if observe.clients != "all" else []):
        if data and client >= data.clients:
            yield (
                ("observe", "clients", index),
                f"client {client} does not exist: data.clients is {data.clients}, numbered from 0; "
                f"use 0 to {data.clients - 1}",
            )
    for key in ("rounds", "vantages", "clients", "batch_sizes"):
        values = getattr(observe, key)
        for index in _find_repeated(values if isinstance(values, list) else []):
            yield ("observe", key, index), f"{values[index]} is listed twice; remove one"
    for key in ("trials", "releases"):
        count = getattr(observe, key)
        if count > 1 and observe.batch_sizes is None:
            yield (
                ("observe", key),
                f"{count} {key} need probes, since a training update happens once; add "
                f"`observe.batch_sizes: [...]`, or use 1",
            )


def _vantages(
    observe: Observe,
    training: Training | None,
    federation: Federation | None,
    stacks: Mapping[str, Sequence[PluginRef]],
    *,
    trains: bool,
) -> Iterator[SectionProblem]:
    """Yields every problem with `observe.vantages`; sections that are not valid are None."""
    combined = {name: found for name, refs in stacks.items() if (found := _aggregation(refs))}
    if "client" in observe.vantages:
        yield from _lookers(observe, training, federation, trains=trains)
        for name, aggregation in combined.items():
            if not aggregation.averages:
                yield (
                    ("defenses", name),
                    f"{stacks[name][-1].name} does not say that its combination is a mean, from "
                    "which a participant could take its own update off; drop it, or client from "
                    "observe.vantages",
                )
    if "eavesdropper" in observe.vantages and federation and not federation.tls:
        for name, aggregation in combined.items():
            # Masked updates may be read on the wire; an ideal sum sends plain ones, which may not.
            if not isinstance(aggregation, MaskedAggregation):
                yield (
                    ("defenses", name),
                    f"{stacks[name][-1].name} is an ideal, which says what the server sees and not "
                    "what crosses a wire in plaintext; drop it, or eavesdropper from "
                    "observe.vantages, or use federation.tls: true",
                )


def _lookers(
    observe: Observe, training: Training | None, federation: Federation | None, *, trains: bool
) -> Iterator[SectionProblem]:
    path = ("observe", "vantages", observe.vantages.index("client"))
    if not trains:
        yield path, "the learner trains no global model that a participant could see; drop client"
    if observe.batch_sizes is not None:
        yield (
            path,
            "no probe goes into the global model that a participant sees; drop client, or remove "
            "observe.batch_sizes, so that the training itself is observed",
        )
    if federation and federation.strategy != "FedAvg":
        yield (
            path,
            f"the global model of {federation.strategy} does not tell the clients' mean; drop "
            "client, or use federation.strategy: FedAvg",
        )
    for index, number in enumerate(observe.rounds):
        if training and number in ("last", training.rounds):
            yield (
                ("observe", "rounds", index),
                f"no participant receives the global model after the last round ({training.rounds})"
                ", by which it would see that round (observe.vantages: client); observe an earlier "
                "one, or train a round longer",
            )


def _aggregation(refs: Sequence[PluginRef]) -> AggregationDefense | None:
    """Returns the aggregation of a stack; None if it has none or cannot be built."""
    try:
        return build_stack(refs).aggregation
    except FedsimError:
        return None


_MAX_RESULTS = 500_000
"""Maximum number of lines of results.jsonl that a run may write."""


def _results(sections: Mapping[str, Any]) -> Iterator[SectionProblem]:
    observe, data = sections.get("observe"), sections.get("data")
    if not observe or not data:
        return
    clients = data.clients if observe.clients == "all" else len(observe.clients)
    recordings = len(observe.rounds) * len(observe.vantages) * clients
    # Without probes each training update is recorded once.
    recordings *= observe.trials * len(observe.batch_sizes or [0])
    count = recordings * len(sections.get("attacks") or []) * len(sections.get("defenses", {}))
    if count > _MAX_RESULTS:
        yield (
            ("observe",),
            f"{number_of(count, 'attack')} on recorded updates, and a run has at most "
            f"{_MAX_RESULTS:,}; use "
            "fewer trials, batch_sizes, clients, rounds, attacks or defenses",
        )


def _labels(entries: Sequence[tuple[int, AttackEntry]]) -> Iterator[SectionProblem]:
    labels = [entry.label or entry.name for _, entry in entries]
    for position in _find_repeated(labels):
        yield (
            ("attacks", entries[position][0]),
            f"a second attack is called {labels[position]!r}; give each a `label: ...` of its own",
        )


def _find_repeated(values: Sequence[Hashable]) -> Iterator[int]:
    """Yields the position of the second occurrence of each value that is repeated."""
    times: Counter[Hashable] = Counter()
    for index, value in enumerate(values):
        times[value] += 1
        # A third occurrence says nothing new.
        if times[value] == 2:
            yield index


def _knowledge(
    sections: Mapping[str, Any], entries: Sequence[tuple[int, AttackEntry]], *, trains: bool
) -> Iterator[SectionProblem]:
    """Refuses attacks that lack what they need, and a grant of what is not there."""
    if not (knowledge := sections.get("knowledge")):
        return
    for index, entry in entries:
        # What an attack needs may depend on its parameters.
        required = _attack_class(entry).model_validate(dict(entry.parameters)).required()
        if missing := knowledge.lacks(required):
            yield ("attacks", index), f"{entry.name} {missing}; grant it, or drop the attack"
    if not trains and knowledge.public != "none":
        yield (
            ("knowledge", "public"),
            "only attacks on the updates of a model use public images; remove it",
        )
    training = sections.get("training")
    if knowledge.bn == "inferred" and training and training.local.mode == "eval":
        yield (
            ("knowledge", "bn"),
            "nothing can be inferred: with training.local.mode eval, clients send no new "
            "batch-norm statistics; use none, running or exact, or mode train",
        )


def _stack(
    name: str, refs: Sequence[PluginRef], training: Training | None, model: PluginRef | None
) -> Iterator[SectionProblem]:
    """Refuses defenses that do not fit each other, the training (None: none) or the model."""
    path: KeyPath = ("defenses", name)
    try:
        stack = build_stack(refs)
    except FedsimError as error:
        yield path, str(error)
        return
    if training is None:
        return
    # The shortest beginning of the stack that fails ends with the defense to blame.
    for end in range(1, len(refs) + 1):
        try:
            build_stack(refs[:end]).guarantees(declared_training(training))
        except FedsimError as error:
            yield (*path, end - 1), str(error)
            return
        except Exception as error:  # a third party's defense may raise anything
            cause = f"{type(error).__name__}: {error}"
            yield (*path, end - 1), f"its plugin failed: {cause}; drop it, or tell its author"
            return
    trained = stack.training(declared_training(training))
    # Both comparisons below are chained: they are true where a defense changed what was declared.
    sampled = trained.sampling != "without_replacement" and trained.steps > 1
    if sampled and trained.batches == "same" != training.local.batches:
        yield (
            path,
            f"training.local.sampling: {trained.sampling} {_EACH_STEP}; use batches: different",
        )
    if trained.algorithm == "fedavg" != algorithm(training) and training.projection_radius:
        yield path, f"training.projection_radius: {_UNPROJECTED}; drop it, or local_aggregation"
    if model and trained.dropout and not model.parameters.get("head"):
        yield (
            path,
            "dropout acts on the hidden neurons of a two-layer head, which the model lacks; add "
            "`head: {width: ...}` to it",
        )
