"""The first module that the forkserver loads, and only it: from here on the server dies with pytest."""

import signal

from ranktest.lifetime import die_with_parent

die_with_parent()
# Ranks inherit this until rank.py lets the signal dump their stacks; by default it would kill them.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
