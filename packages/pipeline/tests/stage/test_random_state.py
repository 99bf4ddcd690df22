"""Random numbers' state, read by several threads."""

import subprocess
import sys

import pytest

# A garbage collection amid torch's making of the state's tensor lets another thread run, which asks for the state too.
PROGRAM = """
import faulthandler, gc, random, sys, threading
from sixfold.pipeline.stage.random_state import RandomState

faulthandler.dump_traceback_later(30, exit=True)
sys.setswitchinterval(1e-6)

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        for _ in range(200):
            pass

def work(seed):
    draw = random.Random(seed)
    for _ in range(1500):
        state = RandomState(None)
        for _ in range(draw.randrange(1, 4)):
            Garbage()
        gc.set_threshold(gc.get_count()[0] + draw.randrange(1, 4))
        state._read()
        state.go_on()

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


@pytest.mark.slow
def test_threads_that_read_and_set_the_state_at_once_do_not_block_each_other():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "done\n", done.stderr[-2000:]
