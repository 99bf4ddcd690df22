"""Kill writers and builds with SIGKILL, over and over, and look at what they leave. Run by ranks/test_kills.py:

    python killed_writers.py random KIND KILLS SEED       at random moments
    python killed_writers.py steps KIND                   before each system call that makes, names or removes a file

in an empty folder; KIND is one of WORK. It prints the outcomes as a JSON object. A killed process is a fork of this
one, which has loaded nothing but numpy and the package, so that one kill takes milliseconds. What may lie on the disk
afterwards is worked out by hand, with struct.
"""

import hashlib  # noqa: F401 - a build loads it, and would do so in each fork
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress

import numpy as np
from indexed_data_helpers import idx_bytes, pair_bytes

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder, build, merge, verify

PATIENCE_S = 60
DOCUMENTS = 12
GENERATIONS = 26  # the inputs of so many are prepared, and used in turn
CALLS = ("open", "mkdir", "replace", "unlink", "rmdir", "fsync", "copy_file_range", "ftruncate")


def expected(number):
    """(.idx, .bin) of generation ``number``: DOCUMENTS documents. Two that follow each other share no id."""
    documents = [text(number, i) for i in range(DOCUMENTS)]
    data = np.concatenate([np.frombuffer(t.encode(), np.uint8).astype(np.uint16) for t in documents])
    return idx_bytes("uint16", [len(t) for t in documents], range(DOCUMENTS + 1)), data.tobytes()


def text(number, i):
    """Of one letter. Every generation has the same lengths in another order, so that all take the same steps."""
    letter = number % GENERATIONS
    return chr(ord("a") + letter) * (20 + 7 * ((i + letter) % DOCUMENTS))


def write_with_builder(number):
    with IndexedDatasetBuilder("out.bin", np.uint16) as builder:
        for i in range(DOCUMENTS):
            builder.add_document(np.frombuffer(text(number, i).encode(), np.uint8))


def write_with_build(number):
    build([f"in{number % GENERATIONS}.jsonl"], "out", append_eod=False, overwrite=True, part_bytes=300)


def write_with_merge(number):
    merge([f"part{number % GENERATIONS}-{i}" for i in range(3)], "out", overwrite=True)


WORK = {"builder": write_with_builder, "build": write_with_build, "merge": write_with_merge}


def prepare():
    """The inputs of every generation, and no pair yet. Nothing is flushed to the disk: a kill loses no page."""
    os.fsync = lambda descriptor: None
    for number in range(GENERATIONS):
        with open(f"in{number}.jsonl", "w") as file:
            for i in range(DOCUMENTS):
                file.write(json.dumps({"text": text(number, i)}) + "\n")
        for part in range(3):
            with IndexedDatasetBuilder(f"part{number}-{part}.bin", np.uint16) as builder:
                for i in range(DOCUMENTS * part // 3, DOCUMENTS * (part + 1) // 3):
                    builder.add_document(np.frombuffer(text(number, i).encode(), np.uint8))


def in_child(work, number):
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            work(number)
            status = 0
        os._exit(status)
    return child


def status_of(child):
    """0, 1, or the negative number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def look(old, new):
    """Which generation lies under the final names: "old", "new" or "none"; AssertionError for anything else."""
    if not IndexedDataset.exists("out"):
        assert not os.path.exists("out.idx"), "an .idx without its .bin"
        try:
            IndexedDataset("out")
        except IndexedDataError:
            return "none"
        raise AssertionError("a pair that is not there was opened")
    found = pair_bytes("out")
    assert found in (old, new), f"a pair that is neither the old one nor the new one: {verify('out')}"
    assert verify("out").ok
    return "new" if found == new else "old"


def finish(kind, number):
    """The same work again, undisturbed: it succeeds, and removes what the killed one left."""
    assert status_of(in_child(WORK[kind], number)) == 0, "the work could not be done again"
    assert pair_bytes("out") == expected(number)
    left = [name for name in os.listdir() if name.startswith("out")]
    manifest = ["out.manifest.json"] if kind == "build" else []
    assert sorted(left) == ["out.bin", "out.idx", *manifest], left


def duration(kind):
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert status_of(in_child(WORK[kind], 0)) == 0
        times.append(time.perf_counter() - began)
    return sorted(times)[2]


def kill_at_random(kind, kills, seed):
    rng = random.Random(seed)
    longest = duration(kind)
    old, outcomes, number = expected(0), Counter(), 0
    deadline = time.monotonic() + PATIENCE_S
    while outcomes["killed"] < kills:
        assert time.monotonic() < deadline, f"{dict(outcomes)} after {PATIENCE_S} s"
        number += 1
        new = expected(number)
        child = in_child(WORK[kind], number)
        time.sleep(rng.uniform(0, 1.1 * longest))
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = status_of(child)
        assert status in (0, -signal.SIGKILL), f"the writer failed with {status}"
        state = look(old, new)
        outcomes["killed" if status else "done"] += 1
        outcomes[state] += bool(status)
        if state == "none" or number % 8 == 0:
            finish(kind, number)
            state = "new"
        old = new if state == "new" else old
    return outcomes


def kill_at_steps(kind):
    """Before call 0, 1, 2, ... until the work is done before it is killed."""
    old, outcomes, step = expected(0), Counter(), 0
    write = WORK[kind]
    write(0)
    while True:
        new = expected(step + 1)
        status = status_of(in_child(lambda number, step=step: (die_at(step), write(number)), step + 1))
        state = look(old, new)
        if status == 0:
            assert state == "new"
            return outcomes
        assert status == -signal.SIGKILL, f"step {step} ended with {status}"
        outcomes["killed"] += 1
        outcomes[state] += 1
        finish(kind, step + 1)
        old = new
        step += 1


def die_at(step):
    """Let this process be killed right before its call number ``step`` of CALLS."""
    left = [step]

    def deadly(call):
        def called(*arguments, **options):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments, **options)

        return called

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    __builtins__.open = deadly(open)


if __name__ == "__main__":
    prepare()
    how, kind, *numbers = sys.argv[1:]
    print(json.dumps(kill_at_steps(kind) if how == "steps" else kill_at_random(kind, *map(int, numbers))))
