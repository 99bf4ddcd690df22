"""A stream beside compute where no device is: tests derive from it and write down what a device would be told.

collectives/test_reduce_order.py, fp8/test_fp8.py, placement/test_gathered_memory.py --> StandInStream (this file)
"""

from __future__ import annotations

from contextlib import contextmanager


class StandInStream:
    """A SideStream; those who derive from it say what ``inside``, ``mark`` and ``join`` do."""

    @property
    @contextmanager
    def joined(self):
        """Inside the stream; then compute waits for the end of it."""
        with self.inside:
            yield
            event = self.mark()
        self.join(event)
