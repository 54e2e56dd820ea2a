"""Attacks and scores in the process of the test, in the place of a run's workers.

A worker imports torch, which takes a test longer than all else that most runs do. What is asked,
answered and scored is pickled as on its way to a worker. That the work is done by processes of
their own, what these can reach and how they end is proven where nothing stands in their place
(`system/test_processes.py`, `attacking/test_wall.py`, `test_pipeline.py`).
"""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import pytest

from fedsim.attacking import question, running
from fedsim.attacking.knowledge import join_solutions, questions
from fedsim.contracts.attack import Attack, AttackState, Solution
from fedsim.contracts.grant import Grant
from fedsim.system import processes
from fedsim.types import Observation, Truth


def ask(
    attack: Attack[AttackState],
    observation: Observation,
    truth: Truth | None,
    granted: Grant,
    seed: int,
) -> Solution:
    """Asks all questions about `observation`, and joins the answers."""
    asked = questions(attack, observation, truth, granted, seed)
    return join_solutions([each.answer() for each in asked])


class _Here(Executor):
    """Does at once what is submitted, with the surroundings that a worker would have."""

    def __init__(self, context: processes._Context) -> None:
        self._context = context

    def submit(self, work: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        if processes._context is not self._context:
            _surround(self._context)
        done: Future[Any] = Future()
        try:
            args, keywords = _sent((args, keywords))
            done.set_result(_sent(work(*args, **keywords)))
        except Exception as error:
            done.set_exception(error)
        return done


def _sent(value: Any) -> Any:
    """A copy, as from one process to another."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - written here


def _surround(context: processes._Context | None) -> None:
    processes._context = context
    question._surroundings.cache_clear()
    running._shared_setting.cache_clear()


@contextmanager
def _pool(workers: int, shared: object) -> Iterator[tuple[Executor, queue.Queue[Any]]]:
    news: queue.Queue[Any] = queue.Queue()
    context = processes._Context(news, pickle.dumps(shared))  # type: ignore[arg-type]
    try:
        yield _Here(context), news
    finally:
        _surround(None)


@contextmanager
def attacks_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "pool", _pool)
        yield
