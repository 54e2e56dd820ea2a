"""The threat model enforced: what an attack is asked and handed, and what is withheld."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim import rng, types
from fedsim.attacking.question import Public, Question
from fedsim.contracts.attack import (
    Attack,
    AttackFailed,
    AttackState,
    Solution,
    images_alone,
    remove_truncated,
    unreadable,
)
from fedsim.contracts.grant import Grant, Knowledge, MembershipCandidates, SourceRecords
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.recording.files import load_beside, load_public, load_public_labels
from fedsim.types import FedsimError, Observation, Reconstruction, RowTruth, Truth


def load_granted(root: Path | None, granted: Grant) -> Public:
    """Loads the public data that are `granted` from the run in `root`; nothing if none are.

    A FedsimError says that the run has none, that they are damaged, or that `root` is None.
    """
    if granted.public == "none":
        return Public()
    if root is None:
        raise FedsimError(
            "public images lie in a run's folder, and none was found: name it (--truth)"
        )
    return Public(images=load_public(root), labels=load_public_labels(root))


def load_earlier(
    attack: Attack[AttackState], path: Path, observation: Observation
) -> tuple[Observation, ...]:
    """Loads what the watcher of the recording at `path` saw of training up to its round.

    Recordings are on the CPU, by round and client, this one included. Empty for an attack that does
    not join rounds, and for a release of rows. A damaged recording is a FedsimError.
    """
    if not attack.joins_rounds or observation.payload != "update":
        return ()
    return load_beside(path, observation)


def hand_over(
    observation: Observation, truth: Truth | None, granted: Grant, public: Public | None = None
) -> tuple[Observation, Knowledge]:
    """Returns the observation as the threat model shows it, and what is handed over beside it.

    The client's new batch-norm buffers are withheld below `bn: inferred`. Candidates, records and
    earlier rounds are not among the knowledge: `questions` adds them. A ValueError says that what
    is granted takes the truth or public images, which are not there.

    Args:
        observation: The recording.
        truth: What clients really used; None if it is not known.
        granted: What the threat model grants.
        public: Public data of the recording's run; None: none.
    """
    if truth is None and (secrets := granted.from_truth()):
        raise ValueError(f"{' and '.join(secrets)} can only be granted with the truth")
    images = public.images if public and granted.public == "test" else None
    classes = public.labels if public and images is not None else None
    if images is None and granted.public == "test":
        raise ValueError("public=test can only be granted with public images")
    observation = _withhold(observation, granted)
    device = observation.device
    secret = truth.tensors() if truth else {}
    labels = secret.get("labels") if granted.labels == "known" else None
    features = secret.get("features") if granted.features == "known" else None
    return observation, Knowledge(
        grant=granted,
        true_labels=None if labels is None else labels.to(device, copy=True),
        exact_bn=_batch_statistics(observation, truth) if truth and granted.bn == "exact" else None,
        true_features=None if features is None else features.to(device, copy=True),
        public_images=None if images is None else images.to(device),
        public_labels=None if classes is None else classes.to(device),
    )


def _withhold(observation: Observation, granted: Grant) -> Observation:
    if granted.bn in ("none", "running"):
        # new = (1 - m) old + m batch with public momentum m: new buffers give the batch's away.
        return replace(observation, buffers_update={})
    return observation


def hand_over_candidates(
    truth: Truth | None, seen: tuple[Observation, ...]
) -> MembershipCandidates | None:
    """Returns the examples that a membership attack is asked about; None if `truth` has none.

    They are copies on the device of `seen`, at least one recording, which are handed over, too.
    """
    secret = truth.tensors() if truth else {}
    if types.CANDIDATE_MEMBERS not in secret:
        return None
    device = seen[0].device
    return MembershipCandidates(
        # Copies, so that no attack can write into the truth that it is scored by.
        inputs=secret[types.CANDIDATE_INPUTS].to(device, copy=True),
        labels=secret[types.CANDIDATE_LABELS].to(device, copy=True),
        seen=seen,
    )


def _hand_over_records(truth: Truth | None, seen: tuple[Observation, ...]) -> SourceRecords | None:
    secret = truth.tensors() if truth else {}
    if types.SOURCE_INPUTS not in secret:
        return None
    device = seen[0].device
    clients, took_part = secret[types.SOURCE_CLIENTS], secret[types.SOURCE_PARTICIPANTS]
    return SourceRecords(
        inputs=secret[types.SOURCE_INPUTS].to(device, copy=True),
        labels=secret[types.SOURCE_LABELS].to(device, copy=True),
        seen=seen,
        # Whoever adds up updates, or takes part, knows who else does.
        participants=tuple(tuple(clients[row].tolist()) for row in took_part),
    )


def hand_over_row(
    truth: RowTruth,
    target: int,
    granted: Grant,
    asked: bool,
    exchanged: torch.Generator | None = None,
) -> Knowledge:
    """Returns the knowledge for a question about one row.

    Args:
        truth: Rows of all clients, and which took part.
        target: Index of the row, from 0.
        granted: What the threat model grants.
        asked: Whether the attack is asked if the row took part, and not to recover it.
        exchanged: Stream for a row that is `asked` about and did not take part: it draws another
            one of its client to withhold, so that their number tells nothing. None withholds none.
            Without granted rows it is not used.
    """
    others: tuple[Tensor, ...] = ()
    if granted.rows == "others":
        kept = truth.members.clone()
        kept[target] = False
        # The release shows its count n: n others would tell that the target did not take part.
        if asked and exchanged and not bool(truth.members[target]):
            own = (kept & (truth.clients == truth.clients[target])).nonzero().flatten()
            if len(own):
                kept[own[torch.randint(len(own), (), generator=exchanged)]] = False
        clients = range(int(truth.clients.max()) + 1)
        others = tuple(truth.rows[kept & (truth.clients == client)] for client in clients)
    return Knowledge(
        grant=granted,
        other_rows=others,
        target_client=int(truth.clients[target]),
        candidate=truth.rows[target].clone() if asked else None,
    )


def _batch_statistics(observation: Observation, truth: Truth) -> dict[str, Tensor]:
    """Returns `Knowledge.exact_bn`: statistics under the global weights, in train mode."""
    model = rebuild(observation).train()
    found: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[f"{name}.mean"] = inputs[0].mean(dim=(0, 2, 3))
            found[f"{name}.var"] = inputs[0].var(dim=(0, 2, 3), unbiased=False)

        model.get_submodule(name).register_forward_pre_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            watch(name)
    device = observation.device
    scratch = {name: value.clone() for name, value in observation.buffers.items()}
    with torch.no_grad():
        images = normalize(truth.tensors()["images"].to(device), observation.model)
        functional_call(model, {**observation.parameters, **scratch}, (images,))
    return found


def questions(
    attack: Attack[AttackState],
    observation: Observation,
    truth: Truth | None,
    granted: Grant,
    seed: int,
    *,
    public: Public | None = None,
    restarts: int = 1,
    seen: Sequence[Observation] = (),
) -> Iterator[Question]:
    """Yields the questions to `attack` about `observation`, with the knowledge that is granted.

    An update is one question. Rows of a release are a question each, in their order: every row that
    took part or, for an attack that is asked of candidates, every row that could have.

    Args:
        attack: The attack.
        observation: The recording.
        truth: What clients really used; None if it is not known, which rows do not allow.
        granted: What the threat model grants.
        seed: Seed of the attack.
        public: Public data of the observation's run; None: none. Not used for rows.
        restarts: Number of starting points of each question, at least 1.
        seen: Recordings of the same watcher up to this round; empty: it saw this one alone.

    Raises:
        AttackFailed: at the first question, if `unanswerable` tells a reason.
        ValueError: at the first question, too, as of `hand_over`.
    """
    if reason := unanswerable(attack, observation, truth):
        raise AttackFailed(reason)
    if isinstance(truth, RowTruth):
        yield from _of_rows(attack, observation, truth, granted, seed, restarts)
        return
    shown, known = hand_over(observation, truth, granted, public)
    rounds = tuple(_withhold(each, granted) for each in seen or (observation,))
    if not attack.reads_truncated:
        shown, rounds = remove_truncated(shown), tuple(map(remove_truncated, rounds))
    if attack.asked_of_sources:
        known = replace(known, records=_hand_over_records(truth, rounds))
    elif attack.asked_of_candidates:
        known = replace(known, candidates=hand_over_candidates(truth, rounds))
    if attack.joins_rounds:
        known = replace(known, seen=rounds)
    yield Question(attack=attack, observation=shown, knowledge=known, seed=seed, restarts=restarts)


def join_solutions(found: Sequence[Solution]) -> Solution:
    """Joins the answers to all `questions`, in their order, into one; AttackFailed if none.

    A single answer is returned itself. Of several, parts that all have are concatenated. The loss
    is the mean of theirs, iterations and seconds are sums, and memory is the largest. `restart` and
    `losses` are the first one's. Certificates, `features_by` and `stages` are left out.
    """
    if not found:
        raise AttackFailed("no row took part in this release, so that there is none to recover")
    if len(found) == 1:
        return found[0]
    answers = [solution.reconstruction for solution in found]
    parts = [answer.parts() for answer in answers]
    common = [name for name in parts[0] if all(name in part for part in parts)]
    joined = Reconstruction(
        loss=math.fsum(answer.loss for answer in answers) / len(answers),
        iterations=sum(answer.iterations for answer in answers),
    )
    return Solution(
        reconstruction=joined.with_parts(
            {name: torch.cat([part[name] for part in parts]) for name in common}
        ),
        restart=found[0].restart,
        losses=found[0].losses,
        seconds=math.fsum(solution.seconds for solution in found),
        iterations=sum(solution.iterations for solution in found),
        peak_memory_bytes=max(solution.peak_memory_bytes for solution in found),
    )


def unanswerable(
    attack: Attack[AttackState], observation: Observation, truth: Truth | None
) -> str | None:
    """Returns why `attack` cannot be asked about `observation`; None if it can.

    `truth` is what clients really used; None (not known) rules out rows and candidates.
    """
    if reason := unreadable(type(attack).__name__, attack.reads, observation.payload):
        return reason
    if observation.payload == "update" and observation.model.columns and not attack.takes_rows:
        return images_alone(type(attack).__name__)
    if (
        observation.payload == "update"
        and attack.asked_of_candidates
        and (truth is None or types.CANDIDATE_MEMBERS not in truth.tensors())
    ):
        return "membership is asked of candidates, and none were set aside (observe.candidates)"
    if observation.payload != "update" and not (truth and truth.asked_singly):
        return "rows are asked for one at a time, which takes the run's truth/ folder"
    return None


def _of_rows(
    attack: Attack[AttackState],
    observation: Observation,
    truth: RowTruth,
    granted: Grant,
    seed: int,
    restarts: int,
) -> Iterator[Question]:
    asked = attack.asked_of_candidates
    taking_part: list[int] = truth.members.nonzero().flatten().tolist()
    # Of the truth, so that nothing that an attack is handed tells which row is withheld.
    secret = rng.of_bytes(truth.rows.numpy().tobytes() + truth.members.numpy().tobytes())
    # One by one: of several questions at once, one would give away the answer to the next.
    for target in range(len(truth.rows)) if asked else taking_part:
        exchanged = (
            rng.generator(secret, "exchanged", target) if observation.release.counted else None
        )
        yield Question(
            attack=attack,
            observation=observation,
            knowledge=hand_over_row(truth, target, granted, asked, exchanged),
            seed=rng.derive(seed, "target", target),
            restarts=restarts,
        )
