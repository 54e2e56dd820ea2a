"""Ends a command that fails with a message and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedsim.system import interrupts


@contextmanager
def exits() -> Iterator[None]:
    """Turns an error of its `with` block that a user can act on into a message and exit status.

    The message goes to the standard error.

    Raises:
        typer.Exit: with status 2 for refused input, 1 for failed work, 130 for an interrupt.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        # The message says how to go on; 130 is what shells take for an interrupted command.
        interrupts.say(lambda text: typer.secho(text, err=True, fg="red"))
        raise typer.Exit(interrupts.STATUS) from error
    except BrokenPipeError:
        raise  # whoever read the output has left: typer ends in silence
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        typer.secho(f"{error}{_remedy(error)}", err=True, fg="red")
        raise typer.Exit(status) from error


def _remedy(error: Exception) -> str:
    """Returns the remedy for an error of the system, whose own message has none; else nothing."""
    if not isinstance(error, OSError):
        return ""
    return f"; check the path and the space left, then {interrupts.how_to_go_on()}"


def _status(error: Exception) -> int | None:
    """Returns the exit status for `error`; None if the user cannot act on it."""
    from fedsim.contracts.attack import AttackFailed
    from fedsim.types import FedsimError, RunFailed

    # Asked first, since the two are FedsimErrors as well: work had begun when they were raised.
    if isinstance(error, RunFailed | AttackFailed | OSError):
        return 1
    return 2 if isinstance(error, FedsimError) else None
