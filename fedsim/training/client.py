"""One client: the examples that it holds, and what it computes from them in a round.

Two global models tell a participant the mean m of n updates that weigh the same; with its own
update u, the others' mean is (n m - u) / (n - 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.learner import Computation, LabelledBatches, Request
from fedsim.contracts.target import HeldExamples, targets
from fedsim.data import batches
from fedsim.rng import digest
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import (
    CANDIDATE_INPUTS,
    CANDIDATE_LABELS,
    CANDIDATE_MEMBERS,
    Dataset,
    FedsimError,
    LocalTraining,
    Observation,
    RowTruth,
    Table,
    Tensors,
    Truth,
    Update,
)
from fedsim.words import number_of


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """Holds what a client computed in a round, on the CPU; `update` and maybe `loss` leave it."""

    update: Update
    truth: Truth | None
    """Batch that the update was computed from; None if the round is not observed, and for a
    closed-form release in training."""
    state: Tensors
    """What the client's defenses and sampling keep for its next round, by name. After a probe it
    is the state that was handed in."""
    loss: float | None
    """Sum of the first batch's losses under the global model, over the declared batch size: the
    mean where sizes are fixed. None for a closed-form release."""
    is_clipped: bool | None = None
    """Whether Flower's adaptive clipping shortened the update; None where that is not used."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Client:
    """Computes as one client of a federation, from its examples."""

    number: int
    """Number of the client in the federation, from 0."""
    dataset: Dataset | Table
    """Data set that holds the client's training examples, perhaps among those of others."""
    own: Tensor
    """(n,) int64 indices of the client's examples in the training split of `dataset`."""
    seed: int
    """Seed of its batches, and of its noise unless `noise_seed` is given."""
    noise_seed: int | None = None
    """Seed of all draws but batches. These then also depend on the weights, buffers and `state`
    that an update is computed from, so that no two models share their noise. None: `seed` gives
    the draws, and they are the same for all models."""
    absent: Tensor | None = None
    """(k,) int64 indices, a part of `own`, that batches draw as usual and then leave out, as in a
    neighbouring database. None: nothing is left out."""

    candidates: CandidateSplit | None = None
    """Examples that membership attacks are asked about; None if there are none."""

    def update(
        self,
        server: Server,
        round: int,
        parameters: Tensors,
        buffers: Tensors,
        state: Tensors,
        *,
        probe: Probe | None = None,
        most_steps: int | None = None,
    ) -> ClientResult:
        """Computes the client's update of a round, and applies the stack's defenses to it.

        Args:
            server: The federation, with its scenario, stack and learner.
            round: Number of the round, from 1.
            parameters: Parameters of the global model, by name, on any device.
            buffers: Its buffers, by name.
            state: `ClientResult.state` of the client's previous round; empty before the first.
            probe: Probe to answer instead of training; None to train.
            most_steps: Bound on local steps, for a trial run; None: as the scenario declares.

        Raises:
            FedsimError: a batch is larger than the client's data, a probe has more trials than
                `check_victims` allows, or the learner or a defense refuses its input.
        """
        declared = server.declared_for(probe)
        if most_steps is not None:
            declared = replace(declared, steps=min(most_steps, declared.steps))
        training = server.scale_rate(server.stack.training(declared), round)
        # Balls in bins deals over all rounds, so the client counts its steps in its state.
        taken = int(state.get(_STEPS, 0))
        path = self._path(round, probe)
        truth: Truth | None = None
        if server.release is None:
            trials = server.scenario.observe.trials
            drawn = self._batches(training, round, probe, taken, trials)
        else:
            rows, truth = self.rows(server.computation, round, probe)
            drawn = [rows]
        secret, at = self._noise(parameters, buffers, state)
        request = Request(
            batches=drawn,
            parameters=parameters,
            buffers=buffers,
            training=training,
            stream=rng.generator(secret, "learner", *path, *at),
            recorded=server.plan(round).is_observed,
        )
        # The first release draws as an only one would: asking for more does not change it.
        again = (probe.release,) if probe and probe.release else ()
        # Defenses draw from a stream of their own, so that batches are the same under every stack.
        stream = rng.generator(secret, "defense", *path, *again, *at)
        with server.stack.memory_of(state) as remembered:
            computed = server.computation.compute(request, stream)
        update = {name: value.cpu() for name, value in computed.update.items()}
        # Before the first round the memory is made in the shapes of the update.
        before = state or server.stack.init(update, declared, server.release)
        defended, after = server.stack.apply(update, before, stream)
        steps: Tensors = {}
        if training.sampling == "balls_in_bins":
            steps = {_STEPS: torch.tensor(taken + training.steps)}
        return ClientResult(
            update=Update(
                tensors=defended,
                num_examples=computed.num_examples,
                buffers={name: value.cpu() for name, value in computed.buffers.items()},
            ),
            truth=self._with_more(truth or computed.truth),
            state={**after, **remembered, **steps} if probe is None else state,
            loss=computed.loss,
        )

    def _with_more(self, truth: Truth | None) -> Truth | None:
        """Adds to `truth` what installed targets ask a client to leave besides its batch."""
        if truth is None:
            return None
        data = self.dataset
        held = HeldExamples(self.held, data.train_labels[self.own], len(data.classes or ()))
        left = {part: target.leave(truth, held) for part, target in targets().items()}
        more = {name: each for name, each in left.items() if each is not None}
        if self.candidates is not None:
            inputs, labels = self.dataset.examples_at(self.candidates.examples)
            more[CANDIDATE_INPUTS], more[CANDIDATE_LABELS] = inputs, labels
            more[CANDIDATE_MEMBERS] = self.candidates.members
        return replace(truth, more={**truth.more, **more})

    def _noise(self, *inputs: Tensors) -> tuple[int, tuple[str, ...]]:
        """Returns the seed of a release's noise, and the ending of the paths of its streams."""
        if self.noise_seed is None:
            return self.seed, ()
        return self.noise_seed, (digest(*inputs),)

    def sum_stream(
        self, round: int, probe: Probe | None, parameters: Tensors, buffers: Tensors
    ) -> rng.Stream:
        """Returns a fresh stream of the roundings and noise of the client's part of a secure sum.

        Args:
            round: Number of the round, from 1.
            probe: Probe that the update answers; None in training.
            parameters: Parameters of the global model that the update was computed from.
            buffers: Its buffers.
        """
        secret, at = self._noise(parameters, buffers)
        again = (probe.release,) if probe else ()
        return rng.generator(secret, "secure sum", *self._path(round, probe), *again, *at)

    def there(self, examples: Tensor) -> Tensor:
        """Returns `examples`, (m,) indices of training examples, without those in `absent`."""
        return examples if self.absent is None else examples[~torch.isin(examples, self.absent)]

    def held(self) -> tuple[Tensor, Tensor]:
        """Returns `examples_at` of `dataset` for all of `own`, also `absent`: (inputs, labels)."""
        return self.dataset.examples_at(self.own)

    def rows(
        self, computation: Computation, round: int, probe: Probe | None
    ) -> tuple[tuple[Tensor, Tensor], RowTruth | None]:
        """Returns ((inputs, labels), truth) that a closed-form release is computed from.

        In training (`probe` None) these are all of `held`, and truth is None. For a probe each of
        its n rows takes part independently, with probability `probe.batch_size` / n; truth has all
        n, and which took part. Then `computation.candidates` has to return rows.
        """
        held = self.held()
        if probe is None:
            return held, None
        truth = computation.candidates(*held)
        assert truth is not None
        stream = rng.generator(self.seed, "batch", *self._path(round, probe))
        chances = torch.rand(len(truth.rows), generator=stream, dtype=torch.float64)
        members = chances < probe.batch_size / len(truth.rows)
        return (held[0][members], held[1][members]), replace(truth, members=members)

    def check_victims(self, training: LocalTraining, trials: int) -> None:
        """Refuses `trials` of a probe for which the client has too few different examples.

        No two trials share an example. `training` is the local training of one trial, after the
        stack's training defenses. A single trial is never refused: if the client holds too few,
        its batches are drawn like those of training. The FedsimError says how many trials there
        can be.
        """
        if trials == 1:
            return
        noun = self.dataset.noun
        needed, held = training.batch_size * training.distinct_batches, len(self._different)
        if trials * needed > held:
            raise FedsimError(
                f"{number_of(trials, 'trial')} of {number_of(needed, noun)} need "
                f"{trials * needed} different ones, and client {self.number} holds {held}: lower "
                f"it to {max(1, held // needed)}, or use smaller batches, "
                "fewer clients or a more even partition"
            )

    def _batches(
        self, training: LocalTraining, round: int, probe: Probe | None, taken: int, trials: int
    ) -> LabelledBatches:
        """Returns inputs and labels of every local step; `taken` counts steps of earlier rounds."""
        found = []
        distinct = training.distinct_batches
        for step in range(distinct):
            if probe and (own := self._victims(training, round, probe, step, trials)) is not None:
                chosen = own
            else:
                chosen = self._choose(training, self._path(round, probe), step, taken)
            # Left out after the draw: all other examples are drawn as without an absence.
            chosen = self.there(chosen)
            found.append(self.dataset.examples_at(chosen))
        # Under `batches: same` the only batch serves every step.
        return found * (training.steps // distinct)

    def _victims(
        self, training: LocalTraining, round: int, probe: Probe, step: int, trials: int
    ) -> Tensor | None:
        """Returns the indices of one step of a probe, apart from other trials'; None: draw anew."""
        own, size = self._different, probe.batch_size
        # Neither trial nor step is in the path: they cut one order into disjoint parts.
        stream = rng.generator(self.seed, "victims", round, self.number, size)
        drawn = batches.of_trial(own, size, probe.trial, trials, step, stream)
        if drawn is None:
            self.check_victims(training, trials)
        return drawn

    @cached_property
    def _different(self) -> Tensor:
        """Indices of the client's examples, one of each content."""
        return batches.distinct(self.own, self.dataset.inputs)

    def _choose(
        self, training: LocalTraining, path: tuple[int, ...], step: int, taken: int
    ) -> Tensor:
        """Returns the indices of the batch of a round's `step`, after `taken` in earlier rounds."""
        own, size = self.own, training.batch_size
        if training.sampling == "balls_in_bins":
            # No step is in the path, so that each step finds the same bins.
            stream = rng.generator(self.seed, "bins", self.number)
            return batches.balls_in_bins(own, training.bins(len(own)), taken + step, stream)
        if training.sampling == "epochs":
            # All steps of an epoch draw the same order, of which each takes its own slice.
            epoch, place = divmod(step, max(1, len(own) // size))
            stream = rng.generator(self.seed, "epoch", *path, epoch)
            return batches.without_replacement(own, size, stream, place)
        draw = batches.poisson if training.sampling == "poisson" else batches.without_replacement
        return draw(own, size, rng.generator(self.seed, "batch", *path, step))

    def _path(self, round: int, probe: Probe | None) -> tuple[int, ...]:
        asked = () if probe is None else (probe.batch_size, probe.trial)
        return (round, self.number, *asked)


_STEPS = "sampling.steps"
"""Name, in a client's state, of how many local steps it has taken over all its rounds."""


@dataclass(frozen=True, kw_only=True)
class CandidateSplit:
    """Names a client's candidates: examples that membership attacks are asked about."""

    examples: Tensor
    """(N,) int64 indices of the candidates in the training split, ascending."""
    members: Tensor
    """(N,) bool: whether the client trains on each candidate, by a fair coin of its own."""

    @property
    def held_out(self) -> Tensor:
        """(k,) int64 indices, in the training split, of candidates that are not trained on."""
        return self.examples[~self.members]


def split_candidates(
    parts: Sequence[Tensor], inputs: Tensor, count: int, seed: int, *, least: int = 1
) -> list[CandidateSplit]:
    """Draws each client's candidates and their coins; returns a split per client, as `parts`.

    An example whose content occurs more than once among all `inputs` is no candidate: a copy could
    be trained on while it is held out.

    Args:
        parts: (n,) indices of each client's examples in `inputs`, in the order of the clients.
        inputs: (N, ...) training inputs of all clients, on the CPU.
        count: Number of candidates of each client.
        seed: Seed of draws and coins.
        least: Least number of examples that each client has to keep for training.

    Raises:
        FedsimError: a client has too few examples without a copy, or would keep too few.
    """
    # Compared by content, since a copy has an index of its own.
    digests = [rng.of_bytes(each.contiguous().numpy().tobytes()) for each in inputs]
    times = Counter(digests)
    single = torch.tensor([times[digest] == 1 for digest in digests])
    splits = []
    for client, own in enumerate(parts):
        fit = own[single[own]]
        if len(fit) < count:
            raise FedsimError(
                f"observe.candidates: client {client} holds {number_of(len(fit), 'example')} "
                f"without a copy, and {count} candidates were asked for; ask for fewer, lower "
                "data.clients or use a larger source"
            )
        # A stream of its own: a client's coins do not depend on how many clients there are.
        stream = rng.generator(seed, "candidates", client)
        drawn = fit[torch.randperm(len(fit), generator=stream)[:count]].sort().values
        members = torch.rand(count, generator=stream) < 0.5
        split = CandidateSplit(examples=drawn, members=members)
        if len(own) - len(split.held_out) < least:
            raise FedsimError(
                f"observe.candidates: without the candidates that its coins hold out, client "
                f"{client} keeps {len(own) - len(split.held_out)} examples, fewer than the {least} "
                "of a batch; ask for fewer candidates or use smaller batches"
            )
        splits.append(split)
    return splits


_PARTS = ("update", "own_buffer", "parameter", "buffer")


def pack_round(update: Update, parameters: Tensors, buffers: Tensors) -> dict[str, Tensor]:
    """Returns, in one mapping for `look`, a participant's `update` and the model it began from.

    Names begin with `update.`, `own_buffer.` (of the update), `parameter.` or `buffer.`.
    """
    parts = zip(_PARTS, (update.tensors, update.buffers, parameters, buffers), strict=True)
    return {f"{kind}.{name}": value for kind, part in parts for name, value in part.items()}


def look(
    server: Server, client: int, round: int, kept: Tensors, parameters: Tensors, buffers: Tensors
) -> Observation:
    """Returns what a participant learns of the others' updates from the next global model.

    The observation's `update` is the mean of the others' updates, and `num_clients` their number.
    It is right only if all participants of the round, two at least, answered with the same weight.

    Args:
        server: The federation.
        client: Number of the participant who looks.
        round: Number of the round, from 1.
        kept: `pack_round` of that client in that round.
        parameters: Parameters of the global model after the round.
        buffers: Its buffers.

    A FedsimError says that two global models do not tell this learner's mean update.
    """
    update, own_buffers, before, old_buffers = (_under(kind, kept) for kind in _PARTS)
    others = len(server.plan(round).participants) - 1

    def without_own(mean: Tensor, own: Tensor) -> Tensor:
        # The model tells the mean over all; n means less one's own are the sum of the others.
        rest = ((others + 1) * mean.double() - own.double()) / others
        return rest.to(own.dtype)

    training = server.scale_rate(server.training, round)
    told = {
        name: server.computation.told_update(before[name], parameters[name], training)
        for name in parameters
    }
    seen = Update(
        tensors={name: without_own(told[name], update[name]) for name in parameters},
        num_examples=0,
        buffers={name: without_own(buffers[name], own) for name, own in own_buffers.items()},
    )
    return server.observation(
        round,
        client,
        seen,
        {name: before[name] for name in parameters},
        {**buffers, **old_buffers},
        num_clients=others,
        watcher="client",
    )


def _under(kind: str, kept: Tensors) -> Mapping[str, Tensor]:
    prefix = f"{kind}."
    return {n.removeprefix(prefix): value for n, value in kept.items() if n.startswith(prefix)}
