"""Bodies of ranks for the tests of spawn.py, and a small launcher program. Imports no torch by itself."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

from sixfold.gpt.errors import ConfigError, TrainError


def note(folder, text):
    """Leave a file named ``text`` in ``folder``."""
    (Path(folder) / text).touch()


def rank_of():
    return int(os.environ["SIXFOLD_RANK"])


def succeed(folder):
    note(folder, f"rank-{rank_of()}-of-{os.environ['SIXFOLD_RANKS']}-threads-{os.environ['OMP_NUM_THREADS']}")
    return 0


def fail_on_rank_one(kind):
    failed = Path(os.environ["SIXFOLD_STORE"]).with_name("rank-1-failed")
    if rank_of() == 1:
        failed.touch()
        raise {"typed": TrainError, "config": ConfigError, "untyped": KeyError}[kind]("the cause")
    if kind == "config":
        while not failed.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        raise TrainError("what follows from it")
    time.sleep(60)
    return 0


def warn(folder):
    warnings.warn("a thing of\n  two lines", UserWarning, stacklevel=2)
    return 0


def die_on_rank_one(number):
    if rank_of() == 1:
        os.kill(os.getpid(), number)
    time.sleep(0.02)
    raise TrainError("connection closed by peer")


def read_what_is_cut_on_rank_one(prefix):
    from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder

    if rank_of() == 1:
        with IndexedDatasetBuilder(f"{prefix}.bin") as builder:
            builder.add_document(range(5000))
        pair = IndexedDataset(prefix)
        os.truncate(f"{prefix}.bin", 0)
        print(pair[0].sum())
    time.sleep(30)
    return 0


def leave_without_a_word():
    os._exit(7)


def hang_while_rank_one_fails():
    if rank_of() == 1:
        time.sleep(0.3)
        raise TrainError("the cause")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0


def save_on_sigterm(folder):
    """What a train loop does: finish the step, save, report 143."""
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    note(folder, f"ready-{rank_of()}-{os.getpid()}")
    while not asked:
        time.sleep(0.01)
    note(folder, f"saved-{rank_of()}")
    return 143


def save_slowly_on_sigterm(folder):
    """As ``save_on_sigterm``; the step at hand takes half a second."""
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    note(folder, f"ready-{rank_of()}-{os.getpid()}")
    while not asked:
        time.sleep(0.01)
    time.sleep(0.5)
    note(folder, f"saved-{rank_of()}")
    return 143


def die_after_sigterm(folder):
    """The save that a signal asks for goes wrong: the kernel kills its rank."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    note(folder, f"ready-{rank_of()}-{os.getpid()}")
    time.sleep(60)
    return 0


def ignore_sigterm(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder, f"ready-{rank_of()}-{os.getpid()}")
    time.sleep(60)
    return 0


def sleep_unprepared(folder):
    note(folder, f"ready-{rank_of()}-{os.getpid()}")
    time.sleep(60)
    return 0


def train_and_die_once(folder, number, config):
    """A rank of ``sixfold train``; rank 1 sends itself signal ``number`` in its fourth step, the first time."""
    from sixfold.gpt.commands import train as train_verb
    from sixfold.gpt.training import loop

    died, step = Path(folder) / "died", loop.train_step

    def stepping(rank, *args, **options):
        steps.append(1)
        if rank.mesh.rank == 1 and len(steps) == 4 and not died.exists():
            died.touch()
            os.kill(os.getpid(), number)
        return step(rank, *args, **options)

    steps = []
    loop.train_step = stepping
    return train_verb.train_rank(config)


def main():
    """``python gpt_launch_helpers.py TARGET RANKS FOLDER SAME_S``: a launcher of its own process, as ``sixfold``."""
    from sixfold.gpt.launch import spawn as processes
    from sixfold.gpt.launch import stop_signals

    processes.PRELOAD = ()
    stop_signals.SAME_S = float(sys.argv[4])
    try:
        sys.exit(processes.start_ranks(globals()[sys.argv[1]], int(sys.argv[2]), (sys.argv[3],)))
    except processes.RankError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
