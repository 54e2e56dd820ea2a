"""The `fedsim` command: interrupts are provided for before anything that takes time is imported."""

from __future__ import annotations

from fedsim.system import interrupts


def main() -> None:
    """Runs the `fedsim` command on the words of `sys.argv`; ends by SystemExit with its status."""
    with interrupts.command():
        # Imported only now that an interrupt is provided for, since it takes long.
        from fedsim.cli.commands import app, make_printable

        make_printable()
        app()
