"""Run one function on several ranks from inside a pytest test.

    run_ranks (launch.py) --> forkserver (server.py) --> one process per rank (rank.py) --> results by rank

A job takes about a tenth of a second because torch is already loaded in the process that the ranks are
forked from. It opens no port: the ranks meet in a file of a temporary folder, and gloo binds loopback.
Nothing here knows a package of this repository.
"""

from ranktest.errors import RankFailed, RanksTimeout
from ranktest.launch import run_ranks
from ranktest.messages import store

__all__ = ["RankFailed", "RanksTimeout", "run_ranks", "store"]
