"""Memory that NCCL reads and writes without a copy: a pool of torch's, registered with the communicators.

    Communicators --> UserBuffers (this file) --> setup/build.py makes buffers in ``memory()``, then calls ``register``

Three paths, the best that works: *symmetric* (a window that all ranks register together: NVLink and SHARP reduce in
it), *registered* (each rank for itself), *off*. Knows no unit; on anything but CUDA it only says why it is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sixfold.fsdp.errors import FsdpError

_SYMMETRIC_SINCE = (2, 27)  # NCCL's windows


class UserBuffers:
    """The pool of one model.

    Args:
        mode: ``"off"``, ``"auto"`` or ``"require"``.
        device: where buffers lie.
        backends: the NCCL back ends of the communicators that the model made.
        ranks: of the largest group.
        unable: why no back end can register anything, None if they can.
    Raises:
        FsdpError: ``"require"`` and there is a reason why not.
    """

    def __init__(
        self, mode: str, device: torch.device, backends: Sequence[Any], ranks: int, unable: str | None
    ) -> None:
        self.path = "off"
        self._mode = mode
        self._device = device
        self._backends = backends
        self._ranks = ranks
        self._registered: list[Any] = []
        self._pool: Any = None
        self._why = "user_buffers='off'" if mode == "off" else unable or self._unfit()
        if self._why is None:
            self._pool = self._make_pool()
        self._refuse()

    def _unfit(self) -> str | None:
        if self._device.type != "cuda":
            return f"buffers lie on {self._device}, and NCCL registers CUDA memory"
        if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
            return f"torch {torch.__version__} has no torch.cuda.MemPool"
        missing = [name for name in ("mem_allocator", "register_mem_pool") if not _has(self._backends[0], name)]
        return f"the NCCL back end of torch {torch.__version__} has no {' and no '.join(missing)}" if missing else None

    def _make_pool(self) -> Any:
        try:
            return torch.cuda.MemPool(self._backends[0].mem_allocator)
        except RuntimeError as error:
            self._why = f"torch makes no pool of NCCL's memory: {error}"
            return None

    def _refuse(self) -> None:
        if self._mode == "require" and self._why is not None and self.path == "off":
            raise FsdpError(
                f"user_buffers is 'require' on {self._device}, and {self._why}; use 'auto', which works without them"
            )

    def memory(self) -> AbstractContextManager[Any]:
        """Tensors made inside lie in the pool, if there is one."""
        return nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool, self._device)

    def register(self, on_all: Callable[[bool], bool]) -> None:
        """Everything was made: register it on the best path that ``on_all`` ranks can go (asked alike by all)."""
        if self._pool is None:
            return
        better = self._try("symmetric", {"symm": True}, self._no_window(), on_all)
        if better is not None:
            worse = self._try("registered", {}, None, on_all)
            self._why = better if worse is None else f"{worse}; symmetric: {better}"
        self._refuse()

    def _no_window(self) -> str | None:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if self._ranks == 1:
            return "a group of one has no peers to share a window with"
        return None if version >= _SYMMETRIC_SINCE else f"NCCL {'.'.join(map(str, version))} has no windows"

    def _try(
        self, path: str, options: dict[str, Any], unable: str | None, on_all: Callable[[bool], bool]
    ) -> str | None:
        """None if all ranks registered on this path, else why not."""
        if not on_all(unable is None):  # before what is collective
            return unable or "another rank cannot"
        try:
            for backend in self._backends:
                backend.register_mem_pool(self._pool, **options)
                self._registered.append(backend)
        except (RuntimeError, TypeError) as error:
            unable = str(error).partition("\n")[0]
        if on_all(unable is None):
            self.path, self._why = path, None
            return None
        self.close()
        return unable or "another rank could not"

    def close(self) -> None:
        """Take the registrations back, before the communicators end."""
        while self._registered:
            self._registered.pop().deregister_mem_pool(self._pool)

    def report(self) -> str:
        """The path, and why it is no better one."""
        return self.path if self._why is None else f"{self.path}: {self._why}"


def _has(backend: Any, name: str) -> bool:
    try:
        return getattr(backend, name) is not None
    except (AttributeError, RuntimeError):  # a property that says no by raising
        return False
