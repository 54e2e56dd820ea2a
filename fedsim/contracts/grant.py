"""Defines what an attacker is granted beside an observation, and the values that it then gets.

Something new takes fields of `Grant` and `Knowledge`, and `fedsim.attacking.knowledge`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedsim.types import Observation, Tensors


class Meaning:
    """Says who can use a field of `Grant`, and what each of its values grants."""

    def __init__(
        self,
        of: Literal["images", "rows"],
        *words: str,
        from_truth: str | None = None,
        honest: str | None = None,
    ) -> None:
        """Stores the meaning of one field.

        Args:
            of: Whether attacks on images or those on rows of a table can use the field.
            words: Wording of what each value grants, in their order; empty if nothing needs saying.
            from_truth: Least value that holds what only the victim knows; None if none does.
            honest: Largest value that an honest server has by itself; None if that is the least.
        """
        self.of, self.words, self.from_truth, self.honest = of, words, from_truth, honest


class Grant(BaseModel):
    """What the attacker is granted beyond the observation.

    `Grant()` lets labels be inferred and grants nothing else; `Grant.least()` grants nothing. The
    values of each field are listed from least to most.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    labels: Annotated[
        Literal["none", "inferred", "known"],
        Meaning(
            "images",
            "nothing of the labels",
            "no labels, but may infer them from the update",
            "the true labels of the attacked batch, which few real attackers have",
            from_truth="known",
            honest="inferred",
        ),
    ] = "inferred"
    bn: Annotated[
        Literal["none", "running", "inferred", "exact"],
        Meaning(
            "images",
            "no batch-norm statistics",
            "the global model’s running batch-norm statistics, which are public",
            "the client’s new batch-norm statistics, which travel with the update",
            "the exact batch-norm statistics of the victim’s batch, which no real attacker "
            "has: read these figures as an upper bound",
            from_truth="exact",
            honest="running",
        ),
    ] = "none"
    features: Annotated[
        Literal["none", "known"],
        Meaning(
            "images",
            "",
            "the true features, for oracles that order by them, which no real attacker has: "
            "read their figures as an upper bound",
            from_truth="known",
        ),
    ] = "none"
    """`known` is for oracles alone: no attacker has the features that it is after."""
    rows: Annotated[
        Literal["none", "others"],
        Meaning(
            "rows",
            "no row",
            "every row that took part but the one that it is after, as the informed adversary "
            "of differential privacy: read these figures as an upper bound",
            from_truth="others",
        ),
    ] = "none"
    """Rows of a closed-form release. `others`: every row that took part but the one asked for."""
    public: Annotated[
        Literal["none", "test"],
        Meaning(
            "images", "", "the test split: images of the same kind, of which no client holds any"
        ),
    ] = "none"
    """Images that no client holds. `test`: the attacker has the test split (of more than 10,000
    images, so many at random); attacks then say how much is seen by whoever has similar data."""

    @classmethod
    def values(cls) -> dict[str, tuple[str, ...]]:
        """Returns each field's name -> its values, from least to most."""
        return {name: get_args(info.annotation) for name, info in Grant.model_fields.items()}

    @classmethod
    def meanings(cls, of: str | None = None) -> dict[str, Meaning]:
        """Returns each field's name -> its meaning, of the fields that attacks on `of` can use.

        `of` is `images` or `rows`; None stands for all fields.
        """
        # Pydantic keeps what `Annotated` adds to a type, here a `Meaning`, as metadata.
        own = {name: info.metadata[0] for name, info in Grant.model_fields.items()}
        return {name: meaning for name, meaning in own.items() if of in (None, meaning.of)}

    @classmethod
    def least(cls, **more: str) -> Grant:
        """Returns the grant of `more` (`labels="known"`), and the least value of every other field.

        It raises pydantic's ValidationError if a field or value is unknown.
        """
        least = {name: values[0] for name, values in cls.values().items()}
        return Grant.model_validate(least | more)

    @classmethod
    def most(cls) -> Grant:
        """Returns the grant of all that can be granted."""
        return Grant.model_validate({name: values[-1] for name, values in cls.values().items()})

    def lacks(self, needs: Grant) -> str | None:
        """Returns advice on the first field that falls short of `needs`; None if none does."""
        for name, values in self.values().items():
            granted, needed = getattr(self, name), getattr(needs, name)
            # Values are listed from least to most, so that more than what is needed is enough, too.
            if values.index(granted) < values.index(needed):
                return (
                    f"needs knowledge.{name}: {needed} (of `fedsim attack`: --grant "
                    f"{name}={needed}), and what is granted is {granted}"
                )
        return None

    def from_truth(self) -> list[str]:
        """Returns granted values that only the victim knows, by field, as `labels=known`."""
        return [
            f"{name}={getattr(self, name)}"
            for name, meaning in self.meanings().items()
            if meaning.from_truth and self._reaches(name, meaning.from_truth)
        ]

    def beyond_honest(self) -> list[str]:
        """Returns granted values that no honest server has, by field, as `public=test`."""
        values = self.values()
        return [
            f"{name}={getattr(self, name)}"
            for name, meaning in self.meanings().items()
            if getattr(self, name) != (most := meaning.honest or values[name][0])
            and self._reaches(name, most)
        ]

    def _reaches(self, name: str, value: str) -> bool:
        values = self.values()[name]
        return values.index(getattr(self, name)) >= values.index(value)


@dataclass(frozen=True, kw_only=True)
class MembershipCandidates:
    """Holds the examples of which a membership attack on updates says whether they took part.

    A fair coin decided it for each of them. If a mean was seen, they are those of all its clients.
    """

    inputs: Tensor
    """(N, C, H, W) pixels on [0, 1], or (N, D) entries of rows of a table."""
    labels: Tensor
    """(N,) int64."""
    seen: tuple[Observation, ...]
    """Recordings of training, of the attacked stack and vantage and all clients that the watcher
    sees. They go up to the attacked round and with it, ordered by round and client."""

    def of_victim(self, attacked: Observation) -> tuple[Observation, ...]:
        """Returns those of `seen` with the `client` of `attacked` (-1 for a mean), by round."""
        return tuple(each for each in self.seen if each.client == attacked.client)


@dataclass(frozen=True, kw_only=True)
class SourceRecords:
    """Holds the N examples of which a source attack says which of the seen clients holds each."""

    inputs: Tensor
    """(N, C, H, W) pixels on [0, 1], or (N, D) entries of rows of a table."""
    labels: Tensor
    """(N,) int64."""
    seen: tuple[Observation, ...]
    """Recordings as in `MembershipCandidates.seen`."""
    participants: tuple[tuple[int, ...], ...]
    """Clients whose update, or mean update, each recording is, in the order of `seen`."""

    @property
    def clients(self) -> tuple[int, ...]:
        """Numbers of all clients that may hold a record, ascending."""
        return tuple(sorted({client for each in self.participants for client in each}))


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Holds what an attack is handed beside the observation: a grant, and its values.

    Tensors are on the observation's device, but `other_rows` and `candidate` on the CPU.
    """

    grant: Grant = field(default_factory=Grant.least)
    true_labels: Tensor | None = None
    """(N,) int64, set only if `labels` are known."""
    exact_bn: Tensors | None = None
    """Mean and biased variance of each channel of every batch-norm layer's input, over the victim
    batch: (channels,), named `<module>.mean` and `<module>.var`. Only if `bn` is exact."""
    true_features: Tensor | None = None
    """(N, d) inputs of the head, set only if `features` are known."""
    other_rows: tuple[Tensor, ...] = ()
    """(n, d + 1) float64 of each client that the release is of: the rows that took part (as in
    `RowTruth.rows`) but for the target. Of a `counted` release, another one is left out for a
    target that did not. Set only if `rows` are those of the others."""
    target_client: int = 0
    """Client whose row the target is: its index in `other_rows`."""
    public_images: Tensor | None = None
    """(P, C, H, W) uint8, or (P, D) float32 of rows: images of the kind that clients hold, of which
    none holds any. Set only if `public` is the test split."""
    public_labels: Tensor | None = None
    """(P,) int64: classes of the public images; None if these are, or if not recorded."""
    candidates: MembershipCandidates | None = None
    """Examples that are asked about where an update of a model is attacked; None if none are."""
    seen: tuple[Observation, ...] = ()
    """Recordings as in `MembershipCandidates.seen`. Set only for attacks that join rounds."""
    records: SourceRecords | None = None
    """Examples whose client is asked for; None if none are."""
    candidate: Tensor | None = None
    """(d + 1,) float64: the row of which is asked whether it took part; None if the question is
    what the missing row is, or an update of a model is attacked."""
