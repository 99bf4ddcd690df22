"""Where the command ``sixfold`` begins: Ctrl-C while it is imported ends it, without a word.

    argv --> main (this file) --> cli.py

Imports of numpy and of the schedules take a moment, in which Ctrl-C would leave frames of theirs; an exception that is
raised inside an import may also be dropped there. Nothing is half-made then.
"""

from __future__ import annotations

import signal

from sixfold.gpt.launch.interrupt import end_at_once


def main() -> int:
    """Run one verb; see `sixfold.gpt.commands.cli.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    from sixfold.gpt.commands import cli

    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()
