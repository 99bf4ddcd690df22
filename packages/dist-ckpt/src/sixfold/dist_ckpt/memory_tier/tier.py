"""The memory tier: a snapshot of each step in the memory of hosts, and the newest whole one back at any layout.

    save: settle the last one --> agree, copy (savers.py) --> worker (jobs.py) --> files here, copies in other domains
    restore: listings of all domains --> generations.py --> index, store (restoring.py) --> an ordinary load

[Note: two generations] Hosts share no file system, so nobody commits a generation by one act. Instead each call of
``save`` first *settles* the last one: all ranks say how their parts ended. Only if all are there with their copies, the
older generation goes. So a kill at any instant leaves one that is whole. Whether one is whole is never written down for
a load to believe (``whole`` only makes a better error): a load looks at all parts.

[Note: one answer for all] Which generation is loaded, which copies are damaged, what is removed: the first rank decides
of what all domains have reported, and all do the same. A rank that finds a damaged block raises as in any load, on all
ranks; then all domains look at all bytes of their copies, and all choose again without the damaged ones.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from sixfold.dist_ckpt import retention, serialization
from sixfold.dist_ckpt.background.saver import own_tensors
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, ShardingError, StorageError
from sixfold.dist_ckpt.formats.frame import LARGE_ALIGNMENT, template
from sixfold.dist_ckpt.memory_tier import placement
from sixfold.dist_ckpt.memory_tier.domain_folder import DomainFolder, DomainStore, check_run
from sixfold.dist_ckpt.memory_tier.generations import Choice, Copy, Generation, Held, Saved, kept, whole_ones
from sixfold.dist_ckpt.memory_tier.handles import Restored, Snapshot
from sixfold.dist_ckpt.memory_tier.peers import TOKEN_BYTES, Address, Server
from sixfold.dist_ckpt.memory_tier.placement import Place, check_places
from sixfold.dist_ckpt.memory_tier.record import Record
from sixfold.dist_ckpt.memory_tier.restoring import GenerationStore, Index, index_of
from sixfold.dist_ckpt.memory_tier.savers import DrainSaver, SnapshotSaver
from sixfold.dist_ckpt.memory_tier.settling import Report, Verdict, error_of, first_of
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.storage.local import located, resolved, store_at
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

T = TypeVar("T")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_IO_S = 10.0  # the longest that a rank waits for a byte of another, or a quarter of timeout_s


class _Found(NamedTuple):
    """What is loaded next: a generation, or a checkpoint; and the number of the next attempt."""

    attempt: int
    choice: Choice | None = None
    checkpoint: int | None = None
    skipped: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Of either."""
        found = self.checkpoint if self.choice is None else self.choice.generation.step
        assert found is not None, "one of the two was found"
        return found


class MemoryTier:
    """Snapshots of a run in the memory of its hosts, which outlive its processes.

        tier = MemoryTier("/dev/shm", "llm-7b", replicas=1, drain_to="s3://bucket/run", drain_every=100)
        restored = tier.restore(state)  # None: the run begins
        for step in range(restored.step + 1 if restored else 1, 10_001):
            train_one_step()
            tier.save(step, state)  # returns when the values are copied
        tier.discard()  # the run is over: memory is free again

    All ranks of ``group`` make a tier and call its methods together.

    A *domain* is a set of ranks that fail together: those of a host. Each rank's part of a snapshot lies in its own
    domain, and ``replicas`` copies of it in others. If as many domains are lost, the newest snapshot is still whole.
    Two generations stay, so a kill at any instant leaves one that is whole. It loads at any number of ranks.

    Args:
        folder: in a tmpfs, such as ``/dev/shm``. The tier makes one folder in it, which only this user may read.
        run: the name of the run; a restart gives the same.
        domain: what fails together; None: the name of this host. Domains have folders of their own.
        replicas: copies of each part in other domains. Where there are fewer other domains, there are fewer copies, and
            a warning says so.
        drain_to: folder or URL of checkpoints, ``drain_to/step-%08d``. ``restore`` looks there, too.
        drain_every: each so many snapshots, one becomes a checkpoint there, in the background. One that is due while
            another is on its way comes after that. 0: none does.
        group, timeout_s: as in ``dist_ckpt.async_save``. A rank of another domain that gives nothing for 10 s, or a
            quarter of ``timeout_s`` if that is less, gets no copy.
        address: the name or number by which other hosts reach this one; None: its host name. Where all ranks are of one
            host, they talk over its loopback.
    Attributes:
        unreplicated: why some rank's part of the newest whole snapshot lacks a copy; None if none does, or none of
            this attempt is whole yet. All ranks have the same.
    Raises:
        CheckpointError: an argument that means nothing.
    """

    def __init__(
        self,
        folder: str | Path,
        run: str,
        *,
        domain: str | None = None,
        replicas: int = 1,
        drain_to: Any = None,
        drain_every: int = 0,
        group: Group = "world",
        timeout_s: float = 600.0,
        address: str | None = None,
    ) -> None:
        check_run(run)
        for name, value in (("replicas", replicas), ("drain_every", drain_every)):
            _check_count(name, value)
        if drain_every and drain_to is None:
            raise CheckpointError(f"drain_every is {drain_every}, and drain_to None; name the folder or URL")
        if domain is not None and not (isinstance(domain, str) and domain):
            raise CheckpointError(f"domain is {domain!r}; it is the name of what fails together, or None for this host")
        place = located(folder, "folder")
        if not isinstance(place, Path):
            raise CheckpointError(f"folder is {folder!r}; it is a folder in a tmpfs of this host")
        self.run, self.replicas, self.drain_to = run, replicas, drain_to
        self.domain = socket.gethostname() if domain is None else domain
        self._folder = DomainFolder(resolved(place), run)
        self._group, self._timeout_s, self._io_s = group, timeout_s, min(_IO_S, timeout_s / 4)
        self._drain_every, self._since_drain, self._address = drain_every, 0, address
        self._saver, self._drainer = SnapshotSaver(group, timeout_s=timeout_s), DrainSaver(group, timeout_s=timeout_s)
        self._strategy = TorchDistSaveShardedStrategy()  # keeps the plan
        self._domain_of_R: tuple[str, ...] = ()
        self._addresses: tuple[Address, ...] = ()
        self._server: Server | None = None
        self._token, self._rank, self._is_first, self._is_closed = b"", 0, False, False
        self._attempt: int | None = None
        self._turn, self._last_step = 0, -1
        self._saved: list[Saved] = []
        self._current: Snapshot | None = None
        self.unreplicated: CheckpointError | None = None

    # ---- what a run calls

    def save(self, step: int, state: Mapping[Any, Any], *, lazy: bool = False) -> Snapshot:
        """Take a snapshot of ``state`` as ``step``; it returns when the values are copied; ``lazy``: before that.

        First it waits for the snapshot before it and settles that. See [Note: two generations].

        Raises:
            CheckpointError: the steps of ranks differ, or do not grow; what ``dist_ckpt.save`` says of a state dict. Or
                what made the snapshot before it fail on any rank, if no ``wait`` has told: that one is removed, the
                one before it stays, and the next call goes on. On all ranks.
        """
        started = time.monotonic()
        with errors_to_all(self._group, self._timeout_s):
            if not retention.is_integer(step, 0):
                raise CheckpointError(f"step is {step!r}; it is an integer >= 0")
        self._meet()
        if self._attempt is None:
            self._begin_attempt(self._find(None, frozenset(), frozenset(), with_disk=False))
        self._settle({"call": "save", "step": int(step)})
        assert self._attempt is not None, "an attempt has begun"
        label = f"the snapshot of step {step} of run {self.run}"
        store = DomainStore(self._folder, self._attempt, int(step), self._rank, label)
        if self._server is not None:
            self._server.oldest = (self._attempt, int(step))
        takers = placement.receivers(self._domain_of_R, self._rank, self._turn, self.replicas)
        receivers = [self._addresses[rank] for rank in takers]
        request = SaveRequest(state, store, self._strategy, group=self._group, timeout_s=self._timeout_s, lazy=lazy)
        mates = [rank for rank, name in enumerate(self._domain_of_R) if name == self.domain]
        flight = self._saver.begin(
            request,
            place=mates.index(self._rank),
            count=len(mates),
            goes=tuple(one for one in self._folder.generations() if one not in self._kept()),
            receivers=tuple(receivers),
            token=self._token,
            io_s=self._io_s,
        )
        self._turn, self._last_step = self._turn + 1, int(step)
        self._current = Snapshot(int(step), flight, receivers, time.monotonic() - started)
        return self._current

    def fence(self) -> None:
        """As of ``AsyncSave``, for the last snapshot; at once where there is none."""
        if self._current is not None:
            self._current.fence()

    def fence_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Have each ``optimizer.step()`` call ``fence`` before all else, from now on. See ``AsyncSave``."""
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def fork_worker(self) -> None:
        """Have this rank's worker at once, as a fork of this process: the first ``save`` then waits for no import.

        Raises:
            CheckpointError: this process has other threads or has used CUDA, which a fork cannot take along.
        """
        self._saver.fork_worker()

    def wait(self) -> None:
        """Return when the last snapshot is whole on all ranks. Collective.

        Raises:
            CheckpointError: what made it fail on any rank; or what made a checkpoint of ``drain_to`` fail. On all.
        """
        self._meet()
        self._settle({"call": "wait"})

    def restore(self, state: Any, *, step: int | None = None, **options: Any) -> Restored | None:
        """Load the newest step that is whole, at any number of ranks; None if the run has none yet.

        Memory comes before ``drain_to``, for equal steps. What is damaged is skipped, by all ranks alike: another copy
        is read, else an older generation, else a checkpoint. Never are parts of two steps loaded together.

        Args:
            step: this one, and no other.
            options: further arguments of ``dist_ckpt.load``, such as ``strict`` or ``dtype_policy``.
        Raises:
            CorruptError: there were snapshots or checkpoints, and none is whole now, or not that of ``step``.
            StorageError: the memory of a domain is so full that nothing can be loaded; snapshots stay.
            CheckpointError: what ``dist_ckpt.load`` raises of a whole one.
        """
        with suppress(CheckpointError):
            self._saver.let_go()
        self._current = None
        self._meet()
        banned, refused, told = set[Copy](), set[int](), list[str]()
        while (found := self._find(step, banned, refused)).choice is not None or found.checkpoint is not None:
            try:
                loaded = self._loaded(state, found, options)
            except (CorruptError, StorageError) as error:
                if found.choice is None:
                    assert found.checkpoint is not None, "one of the two"
                    refused.add(found.checkpoint)
                elif self._is_full(error):
                    if self._makes_room(found.choice):
                        continue
                    if self.drain_to is None:
                        raise
                    banned |= found.choice.copies()
                else:
                    banned |= self._damaged(found.choice)
                told.append(f"step {found.step}: {error}")
                continue
            self._begin_attempt(found)
            place, sources = "memory", dict[str, dict[int, str]]()
            if found.choice is None:
                place = str(retention.step_path(self.drain_to, found.step))
            else:
                domains = placement.domains_of(self._domain_of_R)
                sources = {name: found.choice.sources(name) for name in domains}
            return Restored(found.step, loaded, place, sources, (*told, *found.skipped))
        if told or found.skipped or step is not None:
            which = "no snapshot" if step is None else f"no whole snapshot of step {step}"
            reasons = "; ".join((*told, *found.skipped)) or "it was never saved here, or a later one has replaced it"
            raise CorruptError(
                f"run {self.run} has {which} that can be loaded: {reasons}. Bring back the hosts that are missing, or "
                "load a checkpoint; discard() clears what is left"
            )
        return None

    def steps(self) -> list[int]:
        """The steps of snapshots that are whole, ascending. Collective."""
        self._meet()
        return sorted({*self._of_listings(lambda found: [one.generation.step for one in whole_ones(found)[0]])})

    def needed_bytes(self, state: Mapping[Any, Any]) -> dict[str, int]:
        """Memory that snapshots of ``state`` need at most on each domain, besides ``state``. Collective; saves nothing.

        See ``bytes_per_domain``; each frame's head is counted here.
        """
        self._meet()
        exchange = self._exchange()

        def share() -> tuple[None, int]:
            tensors = own_tensors(state, exchange.rank, exchange.ranks)
            return None, sum(template(t.dtype, tuple(t.shape), 0).nbytes + LARGE_ALIGNMENT for t in tensors)

        def stated(shares: list[int]) -> dict[str, int]:
            drains = self._drain_every > 0
            return placement.bytes_per_domain(shares, self._domain_of_R, self.replicas, drains=drains)

        return exchange.all_reduce(share, stated)[1]

    def regroup(self, group: Group, *, replicas: int | None = None) -> None:
        """Go on with the ranks of another group, after one of them was lost. Not collective; ``restore`` comes next.

        Worker and memory of this process stay. What became of the last snapshot is seen by ``restore``. A checkpoint on
        its way to ``drain_to`` ends as it does, and no call raises its error. ``replicas``: from now on.
        """
        if self._is_closed:
            raise CheckpointError("this MemoryTier is closed; make a new one")
        if replicas is not None:
            _check_count("replicas", replicas)
            self.replicas = replicas
        with suppress(CheckpointError):  # of the last snapshot
            self._saver.let_go()
        self._drainer.error_is_known()
        if self._server is not None:
            self._server.close()
        self._folder.unlock()
        self._group = self._saver._group = self._drainer._group = group
        self._server, self._domain_of_R, self._addresses = None, (), ()
        self._strategy = TorchDistSaveShardedStrategy()
        self._attempt, self._current, self._saved, self.unreplicated = None, None, [], None

    def discard(self) -> None:
        """Remove this run's snapshots on all domains, and close. Collective; checkpoints of ``drain_to`` stay."""
        with suppress(CheckpointError):
            self._saver.let_go()
        self._current = None
        self._meet()
        exchange = self._exchange()
        exchange.run_on_all(self._drainer.close)  # no rank reads or sends any more
        exchange.run_on_all(lambda: self._folder.discard() if self._is_first else None)
        self._end()

    def close(self) -> None:
        """Settle the last snapshot, end workers and connections. Snapshots stay. Collective; may be called again.

        Raises: as ``wait``.
        """
        if self._is_closed:
            return
        try:
            if self._domain_of_R:
                self._settle({"call": "close"})
                self._drainer.let_go()
                self._settle({"call": "close"})  # what became of the last checkpoint
                if self._is_first and self._attempt is not None:
                    self._folder.keep(self._kept())
        finally:
            self._end()

    def __enter__(self) -> MemoryTier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not come
            self._end()

    # ---- ranks and domains

    def _exchange(self) -> Exchange:
        return Exchange(self._group, self._timeout_s)

    def _meet(self) -> None:
        """Once: who is in which domain, and where it listens."""
        with errors_to_all(self._group, self._timeout_s):
            if self._is_closed:
                raise CheckpointError("this MemoryTier is closed; make a new one")
        if self._domain_of_R:
            return
        exchange = self._exchange()

        def here() -> tuple[None, Place]:
            options: dict[str, object] = {
                "run": self.run,
                "replicas": self.replicas,
                "drain_to": None if self.drain_to is None else store_at(self.drain_to).name,
                "drain_every": self._drain_every,
            }
            status, host = self._folder.make(), socket.gethostname()
            boot = _BOOT.read_text() if _BOOT.exists() else host
            folder = (boot, status.st_dev, status.st_ino)
            return None, Place(self.domain, host, folder, str(self._folder.root), options)

        def met(places: list[Place]) -> tuple[tuple[str, ...], bool, bytes]:
            check_places(places)
            is_one_host = len({(place.host, place.folder[0]) for place in places}) == 1
            return tuple(place.domain for place in places), is_one_host, secrets.token_bytes(TOKEN_BYTES)

        _, (domain_of_R, is_one_host, token) = exchange.all_reduce(here, met)

        def listening() -> tuple[None, Address]:
            if exchange.rank == domain_of_R.index(self.domain):
                self._folder.lock()
            if len({*domain_of_R}) == 1:
                return None, Address(exchange.rank, self.domain, "", 0)
            self._server = self._server or Server(self._folder, "127.0.0.1" if is_one_host else "", self._io_s)
            self._server.token = token
            host = "127.0.0.1" if is_one_host else self._address or socket.gethostname()
            return None, Address(exchange.rank, self.domain, host, self._server.port)

        _, self._addresses = exchange.all_reduce(listening, tuple)
        self._domain_of_R, self._token, self._rank = domain_of_R, token, exchange.rank
        self._is_first = exchange.rank == domain_of_R.index(self.domain)
        if exchange.rank == 0 and (others := len({*domain_of_R}) - 1) < self.replicas:
            warnings.warn(
                f"replicas is {self.replicas}, and there are {others} other domains than a rank's own: each part gets "
                f"{others} copies, so the loss of {others + 1} domains loses snapshots",
                stacklevel=3,
            )

    def _of_listings(self, judged: Callable[[dict[str, dict[Generation, Held]]], T]) -> T:
        """What the first rank judges of all domains' files, told by the first rank of each. Collective.

        They look when all ranks are here: each has waited for its own part of the last snapshot, and for no other.
        """
        exchange = self._exchange()
        exchange.run_on_all(lambda: None)

        def listed() -> tuple[None, tuple[str, dict[Generation, Held]] | None]:
            return None, (self.domain, self._folder.listing()) if self._is_first else None

        return exchange.all_reduce(listed, lambda found: judged(dict(own for own in found if own is not None)))[1]

    def _end(self) -> None:
        """End what this process has begun."""
        self._is_closed = True
        try:
            self._saver.close()
        finally:
            self._drainer.close()
            self._folder.unlock()
            if self._server is not None:
                self._server.close()

    # ---- one generation after the other

    def _settle(self, call: dict[str, object]) -> None:
        """What became of the last snapshot; see [Note: two generations]. All ranks call this for the same reason."""
        current, generation = self._current, None if self._current is None else self._saver.generation
        self._saver.let_go()
        report = Report(call, generation, None, None, b"", self._drainer.is_busy(), self._drainer.error())
        if current is not None:
            value = current._flight._value
            crcs = None if value is None else value[0]
            report = report._replace(error=current._flight._error, unreplicated=current.unreplicated, crcs=crcs)
        _, verdict = self._exchange().all_reduce(lambda: (None, report), self._judged)
        self._current = None
        if generation is not None:
            if verdict.error is None:
                self._is_whole(generation, verdict)
            else:
                if self._server is not None:
                    self._server.oldest = (generation.attempt, generation.step + 1)
                if self._is_first:
                    self._folder.remove(generation)
                if isinstance(verdict.error, StorageError):  # else the third one may find no room for ever
                    self._saved = self._saved[-1:]
        for error in (verdict.error, verdict.drain_error):
            if error is not None:
                raise error

    def _judged(self, reports: list[Report]) -> Verdict:
        """On the first rank."""
        content = None if self._current is None else self._saver.content
        error = error_of(reports, self._last_step, () if content is None else tuple(content.crcs))
        is_whole = self._current is not None and error is None
        self._since_drain += is_whole
        drains = is_whole and 0 < self._drain_every <= self._since_drain
        drains = drains and not any(report.is_draining for report in reports)
        if drains:
            self._since_drain = 0
        unreplicated = first_of(report.unreplicated for report in reports)
        return Verdict(error, unreplicated, drains, first_of(report.drain_error for report in reports))

    def _is_whole(self, generation: Generation, verdict: Verdict) -> None:
        if self._is_first:
            self._folder.settle(generation)
        self.unreplicated = verdict.unreplicated
        self._saved = kept([*self._saved, Saved(generation, verdict.unreplicated is None)])
        if verdict.drains:
            assert self._saver.content is not None, "a generation was saved"
            place = retention.step_path(self.drain_to, generation.step)
            self._drainer.begin(place, self._saver.content, self._folder, generation)

    def _begin_attempt(self, found: _Found) -> None:
        """The next attempt, from ``found`` on: what is not found goes. See [Note: attempts] (generations.py)."""
        self._attempt, self._saved, self._turn, self._last_step = found.attempt, [], 0, -1
        self.unreplicated = None
        if found.choice is not None:
            wanted = min(self.replicas, len({*self._domain_of_R}) - 1)
            is_replicated = all(len(holders) > wanted for holders in found.choice.holders)
            self._saved = [Saved(found.choice.generation, is_replicated)]
        if self._server is not None:
            self._server.oldest = (self._attempt, 0)
        if self._is_first:
            self._folder.keep(self._kept())

    def _kept(self) -> set[Generation]:
        """What stays in this domain; the next snapshot's workers remove the rest, or ``close`` does."""
        draining = self._drainer.generation()
        return {*(one.generation for one in self._saved), *([] if draining is None else [draining])}

    # ---- a load

    def _find(self, step: int | None, banned: Set[Copy], refused: Set[int], with_disk: bool = True) -> _Found:
        """The newest that is whole. Collective."""

        def chosen(listings: dict[str, dict[Generation, Held]]) -> _Found:
            attempt = max((g.attempt for listing in listings.values() for g in listing), default=0)
            choices, skipped = whole_ones(listings, banned)
            choice = next((one for one in choices if step in (None, one.generation.step)), None)
            disk = None
            if with_disk and self.drain_to is not None:
                steps = [at for at, _ in retention.checkpoints(self.drain_to) if at not in refused]
                disk = max((at for at in steps if step in (None, at)), default=None)
            if choice is not None and disk is not None and disk > choice.generation.step:
                choice = None
            elif choice is not None:
                disk = None
            if choice is None and disk is None:
                told = tuple(str(one) for one in skipped if one.was_whole)
            else:
                told = tuple(str(one) for one in skipped if choice is None or one.generation > choice.generation)
            return _Found(max(attempt + 1, time.time_ns() // 10**6), choice, disk, told)

        return self._of_listings(chosen)

    def _loaded(self, state: Any, found: _Found, options: dict[str, Any]) -> Any:
        """What ``load`` returns of what was found."""
        options = {**options, "group": self._group, "timeout_s": self._timeout_s}
        if found.choice is None:
            assert found.checkpoint is not None, "one of the two"
            return serialization.load(state, retention.step_path(self.drain_to, found.checkpoint), **options)
        choice = found.choice
        store = GenerationStore(
            choice.generation,
            self._index(choice),
            self.domain,
            self._folder.root,
            choice.sources(self.domain),
            self._servers(),
            self._token,
            self._io_s,
        )
        try:
            return serialization.load(state, store, **options)
        finally:
            store.close()

    def _servers(self) -> dict[str, Address]:
        """For each domain the rank of it that this one asks."""
        ranks = {name: [a for a in self._addresses if a.domain == name] for name in self._domain_of_R}
        return {name: own[self._rank % len(own)] for name, own in ranks.items()}

    def _index(self, choice: Choice) -> Index:
        """Made by the first rank of all records. Collective."""

        def own() -> tuple[None, list[Record]]:
            if not self._is_first:
                return None, []
            ranks = [rank for rank, holders in enumerate(choice.holders) if holders[0] == self.domain]
            return None, [self._folder.record(choice.generation, rank) for rank in ranks]

        def made(found: list[list[Record]]) -> Index:
            try:
                return index_of(sorted((one for records in found for one in records), key=lambda one: one.rank))
            except ShardingError as error:  # a snapshot that was never settled, of ranks that held different values
                raise CorruptError(str(error)) from error

        return self._exchange().all_reduce(own, made)[1]

    def _damaged(self, choice: Choice) -> set[Copy]:
        """The copies of a generation that are damaged, each byte of them looked at; all if none is. Collective.

        (A block may have been damaged on its way, or in the page that was read.)
        """

        def own() -> tuple[None, list[Copy]]:
            if not self._is_first:
                return None, []
            ranks = [rank for rank, holders in enumerate(choice.holders) if self.domain in holders]
            bad = [rank for rank in ranks if self._folder.damage(choice.generation, rank)]
            return None, [(choice.generation, rank, self.domain) for rank in bad]

        _, found = self._exchange().all_reduce(own, lambda by_rank: [copy for own in by_rank for copy in own])
        return {*found} or choice.copies()

    def _is_full(self, error: CheckpointError) -> bool:
        """Whether a load failed for want of memory, on any rank. Collective."""
        full = isinstance(error, StorageError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return self._exchange().all_reduce(lambda: (None, full), any)[1]

    def _makes_room(self, choice: Choice) -> bool:
        """Remove generations besides this one, whose parts are all there; whether there were any. Collective."""

        def removed() -> tuple[None, bool]:
            others = {*self._folder.generations()} - {choice.generation} if self._is_first else set()
            for one in others:
                self._folder.remove(one)
            return None, bool(others)

        return self._exchange().all_reduce(removed, any)[1]


def _check_count(name: str, value: object) -> None:
    if not retention.is_integer(value, 0):
        raise CheckpointError(f"{name} is {value!r}; it is an integer >= 0")
