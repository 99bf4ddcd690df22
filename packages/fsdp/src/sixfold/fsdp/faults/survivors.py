"""Survivors of a fault meet in the model's store, and one of them says for all who is to blame.

    deadlines.py --> Meeting.judge (this file) --> model_store.py, heartbeat.py, local_processes.py

Each signs with the place where it waits. A rank that gives neither a sign nor a beat is lost. One that gives beats and
no sign lives and did not come. Where all have signed, the rank that waits elsewhere than most is at fault. What the
first to know says is in the store, and the others take it from there, so that all ranks name the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence

from sixfold.fsdp.faults.disagreement import DRAWN_ALIKE, odd_ranks
from sixfold.fsdp.faults.heartbeat import Cause, Place, beats
from sixfold.fsdp.faults.local_processes import LocalProcesses
from sixfold.fsdp.faults.model_store import PatientStore

_ANSWER_S = 1.5  # in which every rank that lives gives a beat, and every rank that waits its sign
_GRACE_S = 10.0  # for signs, where a back end failed and all ranks live: some may still compute
_PAUSE_S = 0.02
_IN_STEP = ("gather ", "reduce ", "check ")  # what a rank waits for that runs other units than the others
_FEW = 16  # missing ranks of which a fault tells whether they live

Verdict = tuple[str, tuple[int, ...]]  # what to say of the others, and the ranks at fault


class Meeting:
    """See above.

    Args:
        rank, size: position in the main mesh.
        store: the model's store.
        timeout_s: of the model: nobody waits longer for the others.
    """

    def __init__(self, rank: int, size: int, store: PatientStore, timeout_s: float) -> None:
        self._rank = rank
        self._size = size
        self._store = store
        self._grace_s = min(timeout_s, _GRACE_S)

    def judge(self, place: Place, cause: Cause, local_processes: LocalProcesses, silent: Collection[int]) -> Verdict:
        """Sign, and learn who is at fault; ``silent`` ranks were found so before.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._store.set(f"alive/{self._rank}", str(place))
        self._store.set("fault", str(self._rank))
        if cause is Cause.TOLD:
            until = time.monotonic() + 2 * _ANSWER_S
            while time.monotonic() < until:
                if (told := self._told()) is not None:
                    return told
                time.sleep(_PAUSE_S)
        verdict = self._decide(cause, local_processes, silent)
        told = self._told()
        if told is None:
            self._store.set("verdict", json.dumps(verdict))
        return told or verdict

    def _told(self) -> Verdict | None:
        if not self._store.check(["verdict"]):
            return None
        text, ranks = json.loads(self._store.get("verdict"))
        return text, tuple(ranks)

    def _decide(self, cause: Cause, local_processes: LocalProcesses, silent: Collection[int]) -> Verdict:
        missing = [rank for rank in range(self._size) if rank != self._rank]
        first: dict[int, int | None] = {}  # beats that were there before
        alive: dict[int, Place | None] = {}
        began = time.monotonic()
        while missing := _without_sign(self._store, missing):
            ended, stopped = local_processes.ended(), local_processes.stopped()
            lost = [one for one in missing if one in ended or one in stopped or (one in silent and one not in alive)]
            waited_s = time.monotonic() - began
            if len(lost) == len(missing):
                return say_lost(lost, ended, stopped)
            if waited_s >= _ANSWER_S:
                lost = [one for one in missing[:_FEW] if one not in alive or one in lost]
                if lost:
                    return say_lost(lost, ended, stopped)
                if cause is Cause.APART:
                    break
                if cause is not Cause.BROKEN or waited_s >= self._grace_s:
                    return _say_stuck(missing, alive)
            self._store.set("ask", f"{self._rank} meets at {time.monotonic()}")
            for one, beat in beats(self._store, missing[:_FEW]).items():
                if first.setdefault(one, beat.count) != beat.count:
                    alive[one] = beat.place
            for one in missing[:_FEW]:
                first.setdefault(one, None)
            time.sleep(_PAUSE_S)
        return self._compare([rank for rank in range(self._size) if rank not in missing])

    def _compare(self, signed: Sequence[int]) -> Verdict:
        """Of those that have signed: who waits elsewhere than most."""
        places = [self._store.get(f"alive/{rank}").decode() for rank in signed]
        ids = {text: at for at, text in enumerate(dict.fromkeys(places))}
        common, at_odds = odd_ranks([[ids[text]] for text in places])
        if not at_odds:
            return "all ranks are alive and wait for the same", ()
        usual = next(text for text in places if ids[text] == common[0])
        there = "; ".join(f"rank {signed[at]} waits for {places[at]}" for at in at_odds)
        said = f"all ranks are alive and disagree: most wait for {usual}, {there}"
        if all(text.startswith(_IN_STEP) for text in ids):
            said += f". {DRAWN_ALIKE}"
        return said, tuple(signed[at] for at in at_odds)


def say_lost(lost: Sequence[int], ended: Collection[int], stopped: Collection[int]) -> Verdict:
    """``ended`` and ``stopped`` are known to be so."""
    parts = [f"the process of rank {rank} has ended" for rank in lost if rank in ended]
    parts += [f"the process of rank {rank} is stopped" for rank in lost if rank in stopped]
    return "; ".join([*parts, "no sign of life from rank " + ", ".join(map(str, lost))]), tuple(lost)


def _say_stuck(missing: Sequence[int], alive: dict[int, Place | None]) -> Verdict:
    known = [rank for rank in missing if rank in alive]
    texts = [f"rank {rank} lives but did not come; it was last at {alive[rank] or 'no collective'}" for rank in known]
    return "; ".join(texts), tuple(missing)


def _without_sign(store: PatientStore, ranks: list[int]) -> list[int]:
    """Those of ``ranks`` that have not signed: few questions where few are missing."""
    if not ranks or store.check([f"alive/{rank}" for rank in ranks]):
        return []
    half = len(ranks) // 2
    return ranks if not half else _without_sign(store, ranks[:half]) + _without_sign(store, ranks[half:])
