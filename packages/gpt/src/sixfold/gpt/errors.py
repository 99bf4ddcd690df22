"""The exceptions of the package.

    config.py --> ConfigError      (this file)      TrainError, FinalError <-- loop.py, launch.py

A ConfigError is raised before a rank is started or a folder made; a TrainError ends a run that had begun.
"""


class ConfigError(ValueError):
    """A configuration that cannot work: the text names the key, its value, the rule and what would do."""


class TrainError(RuntimeError):
    """A run that failed: the text names the rank, the step and what was being done."""


class FinalError(TrainError):
    """A run that would fail again at the same place, so that starting it anew does not help."""
