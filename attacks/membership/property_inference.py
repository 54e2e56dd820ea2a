"""Shares of classes in a client's data, by regression over shadow clients.

Shadow clients start at the observed weights and train on public examples, each with shares of
classes of its own. A ridge regression of the shares on their updates is then applied to the
observed one. Where a sum was observed, shadows are sums, and shares are those of all their clients.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize
from fedsim.models.batched import local_updates
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction, Tensors, as_pixels
from fedsim_attacks._attack_kinds import DirectAttack

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_ENTRIES = 1 << 25
"""Maximum number of weights that are trained at once."""


@final
class PropertyInference(DirectAttack):
    """Answers the shares of classes among all examples that an update was computed from."""

    takes_rows: ClassVar[bool] = True
    needs: ClassVar[Grant] = Grant.least(public="test")
    paper: ClassVar[str] = (
        "Ateniese et al., Hacking Smart Machines with Smarter Ones, IJSN 2015; on updates: Melis, "
        "Song, De Cristofaro and Shmatikov, Exploiting Unintended Feature Leakage, S&P 2019"
    )

    shadows: Annotated[int, Field(ge=8, le=4096)] = 128
    """Number of shadow clients, or of shadow sums where a sum was observed."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the shares; the loss is the mean error of shares on shadows that are left out.

        The shares (K,) of the K classes are non-negative, sum to 1, and are `class_shares` of the
        answer's `more`.

        Raises:
            AttackFailed: public examples are without classes.
            FedsimError: the clients' network cannot be trained at once.
        """
        images, labels = knowledge.public_images, knowledge.public_labels
        if images is None or labels is None:
            raise AttackFailed("shadows need public examples with their classes (public: test)")
        classes = observation.model.num_classes
        inputs = normalize(as_pixels(images), observation.model)
        shares = _draw_shares(labels, classes, self.shadows * observation.num_clients, rng)
        updates, shown = _train(observation, inputs, labels, shares, rng)
        lost, answer = _regress(updates, shown, _direction(observation.update)[0])
        # A regression knows no bounds. Where no positive share is left, all classes count alike.
        answer = answer.clamp(min=0)
        answer = answer / answer.sum() if bool(answer.sum()) else torch.ones(classes) / classes
        return Reconstruction(more={"class_shares": answer.float()}, loss=lost, iterations=0)


def _draw_shares(labels: Tensor, classes: int, count: int, rng: torch.Generator) -> Tensor:
    """Returns shares (count, K), uniform over all distributions on classes that are public."""
    # Exponential variables over their sum are Dirichlet(1, ..., 1).
    drawn = -torch.rand(count, classes, generator=rng, dtype=torch.float64).clamp(min=1e-12).log()
    # No shadow can train on a class without public examples.
    drawn = drawn * (torch.bincount(labels.cpu(), minlength=classes) > 0)
    return drawn / drawn.sum(1, keepdim=True)


def _train(
    seen: Observation, inputs: Tensor, labels: Tensor, shares: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns unit updates (S, P) of shadows, and the shares (S, K) of what they trained on.

    `shares` (S n, K) are drawn for each of the n clients whose mean a shadow is.
    """
    training, model, clients = seen.training, rebuild(seen), seen.num_clients
    distinct = training.steps if training.batches == "different" else 1
    chances = shares / torch.bincount(labels.cpu(), minlength=shares.shape[1]).clamp(min=1)
    # Class k gets share k in all, whatever number of public examples it has.
    chances = chances[:, labels.cpu()]
    size = sum(value.numel() for value in seen.parameters.values())
    found, shown = [], []
    # A part is a multiple of the clients, so that those of one sum stay together.
    for part in torch.split(chances, max(1, _ENTRIES // (size * clients)) * clients):
        batches, drawn = [], []
        for _ in range(distinct):
            chosen = torch.multinomial(part, training.batch_size, True, generator=rng)
            batches.append((inputs[chosen], labels[chosen]))
            drawn.append(labels[chosen])
        start = {n: value.expand(len(part), *value.shape) for n, value in seen.parameters.items()}
        made = local_updates(
            model, start, seen.buffers, batches * (training.steps // distinct), training
        )
        # The first axis is (shadow, client), and a shadow is the mean of its clients.
        sums = {n: torch.unflatten(u.detach(), 0, (-1, clients)).mean(1) for n, u in made.items()}
        found.append(_direction({n: sums[n] for n in seen.update}, len(part) // clients))
        # Shares of what was drawn and not of what it was drawn from: batches are small, and the
        # update depends on the former.
        all_drawn = torch.cat(drawn, 1).view(len(part) // clients, -1)
        shown.append(torch.nn.functional.one_hot(all_drawn, shares.shape[1]).double().mean(1))
    return torch.cat(found), torch.cat(shown)


def _direction(update: Tensors, count: int = 1) -> Tensor:
    """Returns updates (count, P) of unit length, since clipping changes lengths."""
    flat = torch.cat([value.reshape(count, -1) for value in update.values()], 1).double()
    directions: Tensor = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return directions


def _regress(updates: Tensor, shares: Tensor, observed: Tensor) -> tuple[float, Tensor]:
    """Returns the least error on shadows left out, and the shares of the observed update."""
    mean, center = updates.mean(0), shares.mean(0)
    centered = updates - mean
    # In the dual form: the matrix to invert has the size of the shadows, not of the entries.
    gram, target = centered @ centered.T, shares - center
    inner = centered @ (observed - mean)
    best: tuple[float, Tensor] | None = None
    for ridge in _RIDGES:
        inverse = torch.linalg.inv(
            gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        )
        weights = inverse @ target
        # Leaving one out changes its residual to α_i / (A^-1)_ii, as in any ridge regression.
        lost = float((weights / inverse.diagonal()[:, None]).abs().mean())
        if best is None or lost < best[0]:
            best = lost, center + inner @ weights
    assert best is not None
    return best
