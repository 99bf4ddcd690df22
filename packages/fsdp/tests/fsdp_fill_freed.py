"""``--fill-freed``: models of the tests fill with NaN what units give up, in ranks of other processes too.

conftest.py, fsdp_helpers.py --> apply (this file) --> BufferConfig's default
"""

from __future__ import annotations

import os

VARIABLE = "SIXFOLD_FSDP_TESTS_FILL_FREED"  # ranks inherit it


def apply() -> None:
    """Where the variable is set, ``fill_freed`` is True unless a test says otherwise."""
    if os.environ.get(VARIABLE):
        from sixfold.fsdp import BufferConfig

        BufferConfig.__init__.__kwdefaults__["fill_freed"] = True
