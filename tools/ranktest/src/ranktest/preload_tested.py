"""The last module that the forkserver loads: the modules under test.

One that cannot be imported (its extra is not installed, or it is broken) is left to the test that needs it.
"""

import contextlib
import importlib
import os

from ranktest.server import TESTED_MODULES

for _name in filter(None, os.environ.pop(TESTED_MODULES, "").split(",")):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
