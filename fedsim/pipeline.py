"""The pipeline, top to bottom: prepare, refuse, federate, attack, score, report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedsim import acceptance, federation, progress, scoring, stages
from fedsim.acceptance import Accepted
from fedsim.attacking.jobs import Job, Result, Setting, asked_about, result_without_attack
from fedsim.attacking.running import Workers
from fedsim.contracts.attack import create
from fedsim.data.images import public_examples
from fedsim.federation.deployed import run_name
from fedsim.federation.network.link import Link
from fedsim.federation.records import RoundRecord
from fedsim.recording import files, truth
from fedsim.report import describe_variant, save_overview, write_report
from fedsim.report.loggers import chosen, log_run
from fedsim.results import controls, record, rows
from fedsim.results.record import Plan, Run
from fedsim.scenario import Scenario, cautions, dump, expand, open_document
from fedsim.scenario.model import AttackEntry
from fedsim.system import paths
from fedsim.system.device import resolve_device
from fedsim.system.lock import is_locked, lock_folder
from fedsim.system.threads import fix_within
from fedsim.training import spending
from fedsim.training.server import Server
from fedsim.training.source import digest_of_inputs
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError, Observation, RunFailed, Table
from fedsim.words import number_of


def run(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    workers: int | None = None,
    log: Sequence[str] = (),
    quiet: bool = True,
    link: Link | None = None,
) -> Run:
    """Runs a scenario: trains the federations, records, attacks, scores, reports.

    Args:
        scenario: Path of a scenario file, its content as plain values, or a `Scenario`.
        out: The folder to fill, which the returned `Run` reads; None: `runs/<name>` of the working
            directory. A sweep gives each variant a folder in it.
        overrides: `a.b=value` assignments to a file's keys; only a path takes them.
        resume: Whether to continue what an interrupted run of the same scenario left in `out`.
        workers: Number of processes that attack; None: cores / threads of the scenario (one on a
            GPU). Results do not depend on it.
        log: Tools with a local store that figures and pictures are copied to at the end, such as
            `mlflow` or `tensorboard=DIR`. A copy that fails is a warning on the standard error.
        quiet: Whether to show neither progress nor warnings on scenario and data.
        link: Way to the SuperLink, for an engine whose nodes are elsewhere; None for all others.

    Raises:
        FedsimError: the scenario is refused, another run is at work in `out`, or `out` holds one
            that `resume` does not continue; before any work.
        RunFailed: the run could not go on; what had finished is kept for `resume`.
    """
    stores = chosen(log)
    document = acceptance.open_scenario(scenario, overrides)
    variants = expand(document)
    root = Path(out) if out else Path("runs") / variants[0].scenario.name
    paths.writable_folder(root, "--out")
    with ExitStack() as until_the_end:
        with acceptance.locate_errors(document):
            # All variants are accepted before any is run: none must be refused after hours.
            executions = []
            for number, variant in enumerate(variants):
                folder = root / variant.label if variant.label else root
                # Before anybody is waited for.
                record.refuse_other_run(folder, dump(variant.scenario), resume)
                place = acceptance.place_of(number, variants)
                accepted = acceptance.accept(variant, place, quiet=quiet, out=folder, link=link)
                executions.append(_Execution(accepted, folder, resume, workers, link))
            until_the_end.enter_context(lock_folder(root))
            for execution in executions:  # another run may have been there in the meantime
                execution.refuse_other_run()
        with _failing(), progress.display(quiet) as display:
            for execution in executions:
                # Where somebody runs a variant by itself, its plan is theirs to write.
                if execution.out != root and not is_locked(execution.out):
                    execution.announce()
            # Variants share most warnings: each is shown once, where it came first.
            for line in dict.fromkeys(w for each in variants for w in cautions(each.scenario)):
                display.note(f"WARNING: {line}")
            for execution in executions:
                # Somebody may run a variant by itself, in its folder.
                with lock_folder(execution.out) if execution.out != root else nullcontext():
                    execution.execute(display)
        with _failing():
            if len(executions) > 1:
                save_overview(root)
            write_report(root)
            for line in log_run(root, stores) if stores else []:
                print(line, file=sys.stderr)
    return Run(root)


def collect(
    folder: str | Path,
    *,
    homes: Sequence[str | Path] = (),
    workers: int | None = None,
    quiet: bool = True,
) -> Run:
    """Copies the truth that nodes kept into a deployed run, then attacks and scores what waited.

    A recording waits as long as the truth of one of its clients is missing.

    Args:
        folder: Folder of a run whose clients were nodes, which the returned `Run` reads.
        homes: Folders of nodes, or copies; if empty, those that `fedsim up` keeps below `folder`.
        workers: Number of processes that attack; None: as in `run`.
        quiet: Whether to show no progress.

    Raises:
        FedsimError: `folder` is no deployed run, another run works in it, or a home is unreadable.
        RunFailed: the work failed; another call continues it.
    """
    root = Path(folder)
    paths.writable_folder(root, str(root))
    # The scenario in a run's folder is resolved, so that it is one variant.
    (variant,) = expand(open_document(root / "scenario.yaml", ()))
    with lock_folder(root):
        engine = federation.build_engine(variant.scenario)
        engine.join(root, [Path(home) for home in homes])
        files.remove_torn(root)
        accepted = acceptance.accept(variant, "", quiet=quiet, out=root)
        execution = _Execution(accepted, root, True, workers, None)
        execution.refuse_other_run()
        with _failing(), progress.display(quiet) as display:
            execution.announce()
            execution.attack(display)
            write_report(root)
    return Run(root)


@contextmanager
def _failing() -> Iterator[None]:
    """Turns an error inside the block into `RunFailed`, whose message says how to go on."""
    try:
        yield
    # It is a FedsimError as well, and would be wrapped twice.
    except RunFailed:
        raise
    except FedsimError as error:
        raise RunFailed(str(error)) from error
    except OSError as error:
        raise RunFailed(record.how_to_go_on(error)) from error


_NOISE = (
    "noise: drawn under a key that follows from the scenario's seed; who knows the seed draws it "
    "again, and outside of this simulation it protects nobody"
)
_NODES = "noise: drawn by each node under a secret of its own, which never leaves it; batches, too"
_UNDECLARED = (
    "defenses.{}: a defense does not declare its effect; attacks take it for noise of a size that "
    "nobody knows, and it looks safer than it is: override `effect`"
)


class _Execution:
    """Does the work on one accepted scenario, in the order of its stages."""

    def __init__(
        self, accepted: Accepted, out: Path, resume: bool, workers: int | None, link: Link | None
    ) -> None:
        self.accepted = accepted
        self.scenario, self.servers = accepted.scenario, accepted.servers
        self.deployed, self.place = accepted.deployed, accepted.place
        self.out, self.resume, self.link = out, resume, link
        self.resolved = dump(self.scenario)
        self.device = resolve_device(self.scenario.device)
        cores = os.cpu_count() or 1
        fitting = 1 if self.device.startswith("cuda") else max(1, cores // self.scenario.threads)
        self.workers = workers or fitting

    def announce(self) -> None:
        rounds = self.scenario.training.rounds * len(self.servers)
        name, variant = self.scenario.name, self.accepted.variant
        first = next(iter(self.servers.values()))
        if isinstance(first, Workload):
            origin = f"data:{digest_of_inputs(self.scenario, first.dataset)}"
        else:
            origin = f"run:{run_name(self.out)}"  # nodes keep their data to themselves
        Plan.of(name, variant, rounds, self._planned, origin=origin).save(self.out)

    def execute(self, display: progress.Display) -> None:
        started = time.perf_counter()
        # Asked again, now under the folder's own lock: earlier variants may have taken hours.
        self.refuse_other_run()
        if self.place:
            variant = describe_variant(self.accepted.variant)
            display.note(f"variant {self.place}in {self.out}: {variant}")
        files.remove_torn(self.out)
        self.announce()
        files.write_text(self.out / "scenario.yaml", self.resolved)
        if self.deployed:
            self.deployed.save(self.out)
        for line in acceptance.describe_left_out(self.described):
            display.note(f"{self.place}{line}")
        for line in acceptance.describe_near_copies(next(iter(self.servers.values()))):
            display.note(f"WARNING: {self.place}{line}")
        for name, server in self.servers.items():
            if spending.asked_epsilons(server.stack):
                display.note(
                    f"{self.place}{acceptance.describe_claim(server, self.accepted.claims[name])}"
                )
        with fix_within(self.scenario.threads):
            self._federate(display)
        self.attack(display, started)

    def attack(self, display: progress.Display, started: float | None = None) -> None:
        """Attacks and scores every recording whose truth is there, then reports."""
        started = time.perf_counter() if started is None else started
        # Both kinds of updates, the clients' and those of public images, have the same attackers.
        with Workers(self.workers) as workers:
            with fix_within(self.scenario.threads):
                self._attack(display, workers)
            public = partial(self._attack_public, workers, display)
            order = rows.order(self.scenario)
            seconds = time.perf_counter() - started
            stages.finish(self.out, self._facts(seconds), order, attack_public=public)

    def _federate(self, display: progress.Display) -> None:
        path = self.out / "rounds.jsonl"
        record.drop_torn_line(path)
        for stack, server in self.servers.items():
            # These rounds only fill the bar: where to go on is said by the engine's checkpoint.
            done = {row["round"] for row in record.read_lines(path) if row["defense"] == stack}
            display.stage(f"{self.place}train {stack}", self.scenario.training.rounds, len(done))
            federation.federate(
                self.scenario,
                stack,
                self.out,
                resume=self.resume,
                on_round=self._on_round(path, server, display),
                server=server,
                link=self.link,
            )
        # A kill between a line and its checkpoint repeats the round: the last line of each counts.
        latest = {(row["defense"], row["round"]): row for row in record.read_lines(path)}
        stacks, rounds = list(self.servers), range(1, self.scenario.training.rounds + 1)
        for stack in stacks:
            if lost := [round for round in rounds if (stack, round) not in latest]:
                raise RunFailed(
                    f"{path}: the line of round {lost[0]} of {stack} is lost; remove "
                    f"{self.out / 'checkpoints' / stack}.safetensors to train again"
                )
        record.write_lines(
            path,
            # In canonical order, so that an interrupted run leaves the same file as any other.
            sorted(latest.values(), key=lambda row: (stacks.index(row["defense"]), row["round"])),
        )

    def _attack(self, display: progress.Display, workers: Workers) -> None:
        path = self.out / "results.jsonl"
        record.drop_torn_line(path)
        # Rows that wait for truth are written anew by each collection; all others are settled.
        settled = [row for row in record.read_lines(path) if row["status"] != "unscored"]
        record.write_lines(path, settled)
        done = {rows.key(row) for row in settled}
        pending = [(job, seen) for job, seen in self._planned if job.key not in done]
        waiting = [job for job, _ in pending if self._awaits_truth(job)]
        every = len(self._planned)
        # Attacks that wait for truth are no part of the total, which could not be reached.
        if len(pending) > len(waiting) or not waiting:
            display.stage(f"{self.place}attack", every - len(waiting), every - len(pending))
        if waiting:
            count = number_of(len(waiting), "attack run")
            display.note(f"{self.place}attack: the truth of {count} is still with the nodes")
        context = rows.Context(
            self.scenario,
            self.accepted.variant,
            self.servers,
            record.read_lines(self.out / "rounds.jsonl"),
            self._audit(display),
        )
        on_result = stages.writer_of(path, context.row, display)
        for job, seen in pending:
            # Training is over: a recording that is not there will not come, and the row says why.
            if job.observation.exists():
                continue
            on_result(job, self._without_recording(seen))
        for job in waiting:
            seen = files.load_observation(job.observation)
            record.append_line(path, context.row(job, _result_without_truth(seen)).dump())
        jobs = [job for job, _ in pending if job.observation.exists() and job not in waiting]
        if jobs:
            self._publish(self.out)
            stages.attack(jobs, self._setting(), on_result, display, workers=workers)

    def _without_recording(self, seen: Observation) -> Result:
        """Returns the result of every attack on what was to be recorded, and was not."""
        if seen.vantage == "eavesdropper" and self.scenario.federation.tls:
            hidden = "the wire is encrypted (federation.tls): it shows sizes and times, no update"
            return result_without_attack(seen, "unseen", hidden)
        if seen.vantage == "client" and self.deployed:
            return _result_without_truth(seen)  # the node that looked keeps what it saw
        lost = "the server received no usable update (see failures in rounds.jsonl)"
        return result_without_attack(seen, "failed", lost)

    def _awaits_truth(self, job: Job) -> bool:
        """Returns whether a recording is here while its truth is still with a node."""
        if not self.deployed or not job.observation.exists():
            return False
        seen = files.load_observation(job.observation)
        # An aggregate needs the truth of all its clients, of which some may be there already.
        return truth.count(self.out, seen.id) != seen.num_clients

    def _publish(self, folder: Path) -> None:
        """Writes the public images that the threat model grants every attack, if it grants any."""
        if self.scenario.knowledge.public != "none" and isinstance(self.described, Dataset):
            images, labels = public_examples(self.described, self.scenario.seed)
            files.save_public(images, folder, labels)

    @cached_property
    def _planned(self) -> list[tuple[Job, Observation]]:
        """All attacks of the run, each with the recording that it is to attack, without tensors."""
        return [
            (_job(entry, files.path_of(self.out, seen.id)), seen)
            for entry in self.scenario.attacks
            for server in self.servers.values()
            for seen in asked_about(create(entry.name, entry.parameters), server.recordings())
        ]

    def _audit(self, display: progress.Display) -> dict[str, float]:
        if self.scenario.audit is None:
            return {}
        path = self.out / "audit.jsonl"
        record.drop_torn_line(path)
        done = {row["defense"]: row for row in record.read_lines(path)}
        display.stage(f"{self.place}audit", len(self.servers), len(done))
        for name in [name for name in self.servers if name not in done]:
            # `name` is bound now: the closure would see the loop's last one.
            def on_progress(at: int, total: int, name: str = name) -> None:
                display.detail(name, f"{name} {at}/{total}")

            workload = self.servers[name]
            assert isinstance(workload, Workload)  # no deployment is audited
            row = rows.audit_row(workload, on_progress)
            if row is not None:
                record.append_line(path, row)
                done[name] = row
            display.advance(f"{name}: {_describe_audit(row)}")
        return {name: row["audited_epsilon"] for name, row in done.items()}

    def _facts(self, seconds: float) -> record.Row:
        rounds = record.read_lines(self.out / "rounds.jsonl")
        is_secret = bool(self.deployed and self.deployed.secret)
        return {
            "scenario": self.scenario.name,
            "variant": self.accepted.variant,
            "seed": self.scenario.seed,
            "device": self.device,
            "workers": self.workers,
            "knowledge": self.scenario.knowledge.model_dump(),
            "seconds": seconds,
            "bytes_on_wire": sum(row["bytes_up"] + row["bytes_down"] for row in rounds),
            "noise_key": "node" if is_secret else "scenario",
            "notes": {
                "lpips": self._lpips_note(),
                "noise": _NODES if is_secret else _NOISE,
                # There is one such line or none; with none, `zip` leaves the key out.
                **dict(zip(["data"], acceptance.describe_left_out(self.described), strict=False)),
                **{
                    f"effect.{name}": _UNDECLARED.format(name)
                    for name, server in self.servers.items()
                    if not server.effect().known
                },
            },
        }

    def _attack_public(
        self, workers: Workers, display: progress.Display, found: Sequence[record.Row]
    ) -> None:
        """Runs attacks again, on updates of public images, where no other client is recorded."""
        folder = controls.folder_of(self.out)
        entries = {entry.label or entry.name: entry for entry in self.scenario.attacks}
        asked = controls.record_public(found, self.out, self.servers)
        if not asked:
            return
        self._publish(folder)
        display.stage(f"{self.place}control", len(asked))
        stages.attack(
            [_job(entries[label], path) for label, path in asked],
            replace(self._setting(), root=folder),
            # These attacks have no rows: controls are scored from what they reconstruct.
            lambda job, result: display.advance(job.title),
            display,
            workers=workers,
        )

    @property
    def described(self) -> Dataset | Table:
        return next(iter(self.servers.values())).described

    def refuse_other_run(self) -> None:
        """Refuses a folder with results that this run could not go on from."""
        record.refuse_other_run(self.out, self.resolved, self.resume)
        keys = {job.key for job, _ in self._planned}
        last = self.scenario.training.rounds
        rows.refuse_foreign_rows(self.out, keys, list(self.servers), last)

    def _on_round(
        self, path: Path, server: Server, display: progress.Display
    ) -> Callable[[RoundRecord], None]:
        def on_round(result: RoundRecord) -> None:
            row = rows.round_row(server, result)
            record.append_line(path, row)
            share, chance = row["test_accuracy"], row["test_chance"]
            beside = f" (chance {chance:.1%})" if chance else ""
            display.advance("" if share is None else f"test accuracy {share:.1%}{beside}")

        return on_round

    def _setting(self) -> Setting:
        guesser: scoring.Guesser | scoring.RowGuesser | None = None
        if isinstance(self.described, Dataset):
            guess: type[scoring.Guesser | scoring.RowGuesser] = (
                scoring.RowGuesser if self.described.columns else scoring.Guesser
            )
            # The guess is learned from the test split, of which no client holds an image.
            guesser = guess(self.described.test_images, self.described.test_labels)
        return Setting(
            root=self.out,
            device=self.device,
            granted=self.scenario.knowledge,
            guesser=guesser,
            lpips_backbone=self.scenario.scoring.lpips_backbone,
            lpips_weights=self.scenario.scoring.lpips_weights,
            threads=self.scenario.threads,
        )

    def _lpips_note(self) -> str:
        if not isinstance(self.described, Dataset) or self.described.columns:
            return "the data are no images"
        wanted = self.scenario.scoring
        lpips = scoring.load_lpips(wanted.lpips_backbone, wanted.lpips_weights)
        if isinstance(lpips, scoring.Unavailable):
            return lpips.reason
        return lpips.describe(*self.described.input_spec.input_shape[1:])


def _job(entry: AttackEntry, observation: Path) -> Job:
    return Job(
        observation=observation,
        attack=entry.name,
        label=entry.label or entry.name,
        parameters=entry.parameters,
        restarts=entry.restarts,
        blind=entry.blind,
    )


def _result_without_truth(seen: Observation) -> Result:
    reason = "the truth is with the clients: join it with fedsim collect"
    return result_without_attack(seen, "unscored", reason)


def _describe_audit(row: record.Row | None) -> str:
    if row is None:
        return "claims nothing"
    verdict = "holds" if row["holds"] else "REFUTED"
    return f"ε of at least {row['audited_epsilon']:.3g} of {row['epsilon']} claimed, {verdict}"
