"""Progress: how far a long call is, reported to the caller's own function.

    bytes moved, from any thread --> Meter (this file) --> progress(bytes_done, bytes_total)

[Note: what progress is told] The first call says 0, and each later one more than the one before. The last one says
the total, once: when every byte is where it belongs, and before anything becomes visible. So an exception in it ends
a save like any other error, and the older checkpoint stays. Bytes are those of this rank. Calls come one at a time,
from whichever thread of this process moves the bytes.

[Note: what progress raises] Whatever it raises becomes a CheckpointError. SystemExit and KeyboardInterrupt are for the
thread that made the call, and pass there as they are; on any other thread Python drops them in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock, get_ident

from sixfold.dist_ckpt.errors import CheckpointError

Progress = Callable[[int, int], None]


class Meter:
    """Counts bytes and tells ``progress`` of them; see [Note: what progress is told].

    Args:
        progress: the caller's function, or None for nobody.
        total: makes the bytes in all; called only if somebody listens.
        in_call: this thread is the caller's, not one of the package's. See [Note: what progress raises].
    """

    def __init__(
        self, progress: Progress | None, total: Callable[[], int] = lambda: 0, *, in_call: bool = True
    ) -> None:
        self._progress, self._lock = progress, RLock()
        self._caller = get_ident() if in_call else None
        self.total, self._done = 0 if progress is None else total(), 0
        if self.total:
            self._tell(0)

    def add(self, nbytes: int) -> None:
        """So many bytes more."""
        with self._lock:
            self.reach(self._done + nbytes)

    def reach(self, done: int) -> None:
        """So many bytes so far."""
        with self._lock:
            if self._done < done < self.total:  # the total itself is kept for ``finish``
                self._done = done
                self._tell(done)

    def finish(self) -> None:
        """All is done."""
        with self._lock:
            self._tell(self.total)

    def rest(self) -> Progress:
        """A progress function for a call that does the rest; its end is the end of all."""
        begun = self._done

        def tell(done: int, total: int) -> None:
            if done < total:
                self.reach(begun + (self.total - begun) * done // total)
            else:
                self.finish()

        return tell

    def _tell(self, done: int) -> None:
        if self._progress is None:
            return
        try:
            self._progress(done, self.total)
        except CheckpointError:  # of a meter within
            raise
        except BaseException as error:  # a bar on a terminal that is gone may raise anything
            if not isinstance(error, Exception) and get_ident() == self._caller:
                raise
            raise CheckpointError(
                f"progress({done}, {self.total}) raised {type(error).__name__}: {error}; a function that may fail "
                "catches its errors itself"
            ) from error
