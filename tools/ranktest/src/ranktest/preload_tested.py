"""The last module that the forkserver loads: the modules under test.

A name that ends with ``.py`` is a file to run: what tests set in the modules that the ranks are to have.
One that cannot be imported (its extra is not installed, or it is broken) is left to the test that needs it.

What is loaded by then is kept from the garbage collector: a collection in a rank would walk half a million objects of
torch, and so copy their memory from the server, in 0.2 s of CPU time.
"""

import contextlib
import gc
import importlib
import os
import runpy

from ranktest.server import TESTED_MODULES

for _name in filter(None, os.environ.pop(TESTED_MODULES, "").split(",")):
    with contextlib.suppress(Exception):
        runpy.run_path(_name) if _name.endswith(".py") else importlib.import_module(_name)
gc.collect()
gc.freeze()
gc.collect()  # the next ones count from what is left
