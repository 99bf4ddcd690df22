"""The exceptions of the package.

    train_config.py --> ConfigError      (this file)      TrainError, FinalError <-- loop.py, rendezvous.py
    what a pipeline raised --> raised_inside --> what a stage raised in it, which says whose fault it is

A ConfigError of the file alone is raised before a rank is started or a folder made. One that needs the ranks (devices,
data, a checkpoint, a provider) is raised on all of them before the first step. A TrainError ends a run that had begun.
"""

from sixfold.pipeline.errors import ScheduleError


class ConfigError(ValueError):
    """A configuration that cannot work: the text names the key, its value, the rule and what would do."""


class TrainError(RuntimeError):
    """A run that failed: the text names the rank, the step and what was being done."""


class FinalError(TrainError):
    """A run that would fail again at the same place, so that starting it anew does not help."""


def raised_inside(error: BaseException) -> BaseException:
    """What was raised in an action of a pipeline, whose runner makes a ScheduleError of it; else ``error`` itself."""
    while isinstance(error, ScheduleError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class NoTargetsError(FinalError):
    """A global batch whose loss mask leaves nothing.

    Args:
        masked: the value of data.eod_mask_loss.
        where: what stands before the text, as "step 3: ".
    """

    TEXT = "no token of the global batch is a target"

    def __init__(self, masked: bool, where: str = "") -> None:
        super().__init__(
            f"{where}{self.TEXT}; data.eod_mask_loss is {masked}, and loss masks and documents that data.changes drops "
            f"leave nothing: look at the data"
        )


class ReplicasDifferError(TrainError):
    """Ranks that hold copies of a shard have other bits; raised on all ranks alike.

    Args:
        step: after which it was found. tensor: the first that differs.
        ranks: those that are named.
        accused: what to say of each rank that a majority is against; empty where there is none.
    """

    def __init__(self, text: str, *, step: int, tensor: str, ranks: tuple[int, ...], accused: dict[int, str]) -> None:
        super().__init__(text)
        self.step = step
        self.tensor = tensor
        self.ranks = ranks
        self.accused = accused


class ReplicasDifferAgainError(ReplicasDifferError, FinalError):
    """Without a majority, and again after the same steps were done a second time."""
