"""Every runner of the process is one with ``debug_memory``, as ``--debug-memory`` asks; ranks run this file."""

from sixfold.pipeline import PipelineRunner

PipelineRunner.__init__.__wrapped__.__kwdefaults__["debug_memory"] = True
