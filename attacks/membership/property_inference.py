"""Shares of classes, or of a table's columns, in clients' data, by regression over shadow clients.

Shadow clients start at the observed weights and train on public examples, each with shares of its
own. A ridge regression of the shares on their updates is then applied to the observed one. Where a
sum was observed, shadows are sums, and shares are those of all their clients: a second regression,
on who took part in each of several rounds, takes them apart (PROLIN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, final

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction, Tensors, as_pixels
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._measures import chunk_size, train_shadows

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_PRIORS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.25)
"""Variances of a share among clients that are tried; of shares of 0 or 1 it is 0.25."""


@final
class PropertyInference(DirectAttack):
    """Estimates shares of classes among an update's examples, by regression over shadow clients.

    It can also estimate them, or a table's columns, in all data of each client that took part.
    """

    takes_rows: ClassVar[bool] = True
    needs: ClassVar[Grant] = Grant.least(public="test")
    paper: ClassVar[str] = (
        "Ateniese et al., Hacking Smart Machines with Smarter Ones, IJSN 2015; on updates: Melis, "
        "Song, De Cristofaro and Shmatikov, Exploiting Unintended Feature Leakage, S&P 2019; "
        "through sums: PROLIN, arXiv 2303.03908, 2023"
    )

    shadows: Annotated[int, Field(ge=8, le=4096)] = 128
    """Number of shadow clients, or of shadow sums where a sum was observed."""
    of: Literal["update", "clients"] = "update"
    """`update`: shares of classes in the batches of one update, of all clients of a sum together.
    `clients`: shares in all data of each client of the last update, from all recorded rounds."""
    columns: tuple[str, ...] = ()
    """Columns of a table whose shares of categories, or mean of a quantity, are told instead of
    classes. They need `of: clients`. Empty: classes are told."""

    @model_validator(mode="after")
    def _columns_of_clients(self) -> Self:
        if self.columns and self.of != "clients":
            raise ValueError("columns are told of all data of clients; add `of: clients`")
        return self

    @property
    def joins_rounds(self) -> bool:
        """Whether `of` is `clients`: recordings of all rounds are then read together."""
        return self.of == "clients"

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the shares; the loss is their mean error on shadows that are left out.

        The answer's `more` has one part: `class_shares` (K,), which sum to 1. It is
        `client_class_shares` (n, K) if `of` is `clients`: a row for each of the last update, by
        ascending number. `columns` make it `client_column_shares` (n, D) in [0, 1], means of the D
        entries of an input, and -1 in those of other columns. An AttackFailed says that public
        examples or a column are missing, rounds are too few, or who took part is not recorded.
        """
        images, labels = knowledge.public_images, knowledge.public_labels
        if images is None or labels is None:
            raise AttackFailed("shadows need public examples with their classes (public: test)")
        inputs, kept = as_pixels(images), _entries_of(observation, self.columns)
        values = (
            inputs[:, kept] if self.columns else F.one_hot(labels, observation.model.num_classes)
        )
        public = _Public(inputs, labels.cpu(), values.cpu().double(), bool(self.columns))
        if self.of == "update":
            one = _of_update(observation, public, self.shadows, rng)
            return _answer("class_shares", _as_distribution(one.shares), one.lost)
        # Updates of one client, or sums (their client is -1): the two are not mixed.
        rounds = [seen for seen in knowledge.seen if seen.client == observation.client]
        part, own = _participation(rounds or [observation])
        each = [_of_update(seen, public, self.shadows, rng) for seen in rounds or [observation]]
        shares = _of_clients(part, each, own)
        lost = sum(one.lost for one in each) / len(each)
        if not self.columns:
            mixes = torch.stack([_as_distribution(mix) for mix in shares])
            return _answer("client_class_shares", mixes, lost)
        # Negative shares stand for columns that nobody asked for.
        answer = torch.full((len(own), observation.model.input_shape[0]), -1.0)
        answer[:, kept] = shares.clamp(0, 1).float()
        return _answer("client_column_shares", answer, lost)


class _Public:
    """Holds public examples, and the values of which shadows' shares are the means."""

    def __init__(self, inputs: Tensor, labels: Tensor, values: Tensor, tilted: bool) -> None:
        self.inputs, self.labels, self.values, self._tilted = inputs, labels, values, tilted

    def draw_chances(self, count: int, rng: torch.Generator) -> Tensor:
        """Returns chances (count, N) to be drawn of all examples, of as many shadow clients."""
        if self._tilted:
            spread = self.values.std(0).clamp(min=1e-9)
            standard = (self.values - self.values.mean(0)) / spread
            drawn = torch.randn(count, standard.shape[1], generator=rng, dtype=torch.float64)
            # Exponential tilting moves the mean of each entry, up or down.
            return torch.softmax(drawn @ standard.T, dim=1)
        held = torch.bincount(self.labels, minlength=self.values.shape[1])
        # Exponential variables over their sum are Dirichlet(1, ..., 1).
        drawn = torch.rand(count, len(held), generator=rng, dtype=torch.float64)
        # No shadow can train on a class without public examples.
        drawn = -drawn.clamp(min=1e-12).log() * (held > 0)
        chances = drawn / drawn.sum(1, keepdim=True) / held.clamp(min=1)
        # Class k gets share k in all, whatever number of public examples it has.
        return chances[:, self.labels]


def _answer(part: str, shares: Tensor, lost: float) -> Reconstruction:
    return Reconstruction(more={part: shares.float()}, loss=lost, iterations=0)


def _as_distribution(shares: Tensor) -> Tensor:
    # A regression knows no bounds. Where no positive share is left, all classes count alike.
    shares = shares.clamp(min=0)
    return shares / shares.sum() if bool(shares.sum()) else torch.ones_like(shares) / len(shares)


def _entries_of(seen: Observation, names: tuple[str, ...]) -> Tensor:
    columns = [column.name for column in seen.model.columns]
    if unknown := [name for name in names if name not in columns]:
        raise AttackFailed(f"columns: there is no column {unknown[0]!r} ({', '.join(columns)})")
    entries = [column.name for column in seen.model.columns for _ in range(column.width)]
    kept = [place for place, name in enumerate(entries) if name in names]
    return torch.tensor(kept, dtype=torch.int64)


def _participation(rounds: list[Observation]) -> tuple[Tensor, list[int]]:
    """Returns each client's weight in each round (R, C), and the last round's clients."""
    taking_part = [seen.participants or (seen.client,) for seen in rounds]
    if any(len(who) != seen.num_clients for who, seen in zip(taking_part, rounds, strict=True)):
        raise AttackFailed(
            "who took part in a sum is not recorded; observe the server of a stack that shows sums"
        )
    clients = sorted({client for who in taking_part for client in who})
    part = torch.tensor(
        [[(client in who) / len(who) for client in clients] for who in taking_part],
        dtype=torch.float64,
    )
    rank = int(torch.linalg.matrix_rank(part).item())
    if rank < len(clients):
        raise AttackFailed(
            f"{len(rounds)} sums of {len(clients)} clients tell {rank} of them apart: who takes "
            "part changes too little; observe more rounds (observe.rounds), or have fewer clients "
            "take part in each (federation.participation)"
        )
    return part, [clients.index(client) for client in sorted(taking_part[-1])]


@dataclass(frozen=True)
class _Estimate:
    """Holds shares that were read from one update, and how well such are read from shadows."""

    shares: Tensor  # (E,) shares by ridge regression, which draws them towards the shadows' mean
    unbiased: Tensor  # (E,) the same with that undone, which makes them noisier
    variance: float  # mean variance of the latter
    lost: float  # mean error of the former on shadows that are left out


def _of_update(seen: Observation, public: _Public, shadows: int, rng: torch.Generator) -> _Estimate:
    updates, shown = _train(seen, public, shadows, rng)
    mean, center = updates.mean(0), shown.mean(0)
    target = shown - center
    observed, missed = _ridge(updates - mean, target, _direction(seen.update)[0] - mean)
    told = target - missed
    # Shares of shadows that are left out are told too near to the mean, by this factor.
    slope = ((told * target).sum(0) / target.square().sum(0).clamp(min=1e-30)).clamp(min=0.05)
    spread = (told / slope - target).square().mean()
    return _Estimate(
        shares=center + observed,
        unbiased=center + observed / slope,
        variance=max(float(spread), 1e-12),
        lost=float(missed.abs().mean()),
    )


def _of_clients(part: Tensor, each: list[_Estimate], own: list[int]) -> Tensor:
    """Returns the mean shares (n, E) of the clients `own`, given the sums and who took part."""
    # Clients' shares are normal around a common mean, with the variance that suits sums best.
    sums = torch.stack([one.unbiased for one in each])
    variances = torch.tensor([one.variance for one in each], dtype=part.dtype)
    # Rounds are weighted by precision; the mean is that of all clients, near enough.
    center = (sums / variances[:, None]).sum(0) / (1 / variances).sum()
    # In units of each round's noise, so that rounds that tell little count little.
    spread = variances.sqrt()[:, None]
    rows, target = part / spread, (sums - center) / spread
    gram = rows @ rows.T
    best: tuple[float, Tensor] | None = None
    for prior in _PRIORS:
        whole = torch.eye(len(gram), dtype=gram.dtype) + prior * gram
        factor = torch.linalg.cholesky(whole)
        solved = torch.cholesky_solve(target, factor)
        # The log-likelihood, up to a constant; the determinant is that of each of E entries.
        misfit = float((target * solved).sum()) / 2
        fit = -misfit - target.shape[1] * float(factor.diagonal().log().sum())
        if best is None or fit > best[0]:
            best = fit, prior * rows.T @ solved
    assert best is not None
    return center + best[1][own]


def _train(
    seen: Observation, public: _Public, shadows: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns unit updates (S, P) of shadows, and the shares (S, E) of what they trained on."""
    training, model, clients = seen.training, rebuild(seen), seen.num_clients
    distinct = training.steps if training.batches == "different" else 1
    inputs = normalize(public.inputs, seen.model)
    chances = public.draw_chances(shadows * clients, rng)
    found, shown = [], []
    # A part is a multiple of the clients, so that those of one sum stay together.
    for part in torch.split(chances, chunk_size(seen) * clients):
        drawn = [
            torch.multinomial(part, training.batch_size, True, generator=rng)
            for _ in range(distinct)
        ]
        batches = [(inputs[chosen], public.labels[chosen]) for chosen in drawn]
        sums = train_shadows(model, seen, batches)
        count = len(part) // clients
        found.append(_direction({n: sums[n] for n in seen.update}, count))
        # Shares of what was drawn and not of what it was drawn from: batches are small, and the
        # update depends on the former.
        shown.append(public.values[torch.cat(drawn, 1).view(count, -1)].mean(1))
    return torch.cat(found), torch.cat(shown)


def _direction(update: Tensors, count: int = 1) -> Tensor:
    """Returns updates (count, P) of unit length, since clipping changes lengths."""
    flat = torch.cat([value.reshape(count, -1) for value in update.values()], 1).double()
    directions: Tensor = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return directions


def _ridge(rows: Tensor, target: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what a ridge regression says of `observed`, and what it misses of rows left out."""
    # In the dual form: the matrix to invert has the size of the shadows, not of the entries.
    gram, inner = rows @ rows.T, rows @ observed
    # Rows of 0 would not be inverted.
    size = gram.diagonal().mean().clamp(min=1e-30)
    best: tuple[float, Tensor, Tensor] | None = None
    for ridge in _RIDGES:
        inverse = torch.linalg.inv(gram + ridge * size * torch.eye(len(gram), dtype=gram.dtype))
        weights = inverse @ target
        # Leaving one out changes its residual to α_i / (A^-1)_ii, as in any ridge regression.
        missed = weights / inverse.diagonal()[:, None]
        lost = float(missed.abs().mean())
        if best is None or lost < best[0]:
            best = lost, inner @ weights, missed
    assert best is not None
    return best[1], best[2]
