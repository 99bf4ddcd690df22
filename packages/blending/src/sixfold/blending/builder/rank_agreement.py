"""An error on one rank becomes an error on every rank (this file: the only one that imports torch for a group)."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sixfold.blending.errors import BlendingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def _gathered(mine: object, group: "ProcessGroup", what: str) -> list[Any]:
    """``mine`` of every rank, by rank.

    Raises:
        BlendingError: a rank did not come within the group's own timeout, or is gone.
    """
    from torch.distributed import all_gather_object, get_rank, get_world_size

    every: list[Any] = [None] * get_world_size(group)
    try:
        all_gather_object(every, mine, group=group)
    except RuntimeError as error:  # torch's DistError is one
        raise BlendingError(
            f"rank {get_rank(group)} of {len(every)} waited for the others, {what}, and one did not come: {error}"
        ) from error
    return every


def raise_together(error: Exception | None, group: "ProcessGroup") -> None:
    """Every rank of ``group`` calls this with its error or None. All continue, or all raise.

    Args:
        group: any backend; the exchange ends within the group's own timeout.
    Raises:
        BlendingError: a rank had an error: "rank R: ..." of the lowest such R.
    """
    texts = _gathered(None if error is None else _text(error), group, "after a step of the build")
    for rank, text in enumerate(texts):
        if text is not None:
            raise BlendingError(f"rank {rank}: {text}") from error


def _text(error: Exception) -> str:
    """In one line; errors of this package name what they are about, others have it in their notes."""
    text = str(error) or type(error).__name__
    notes = [] if isinstance(error, BlendingError) else getattr(error, "__notes__", [])
    return " ".join([text, *(f"({note})" for note in notes)])


def together(step: Callable[[], T], group: "ProcessGroup") -> T:
    """Call ``step`` on every rank of ``group``. An error of one is raised on all (``raise_together``)."""
    try:
        taken = step()
    except Exception as error:
        raise_together(error, group)
        raise AssertionError("an error of this rank was not raised") from error
    raise_together(None, group)
    return taken


def gather_together(step: Callable[[], T], group: "ProcessGroup") -> list[T]:
    """What ``step`` returns on every rank of ``group``, by rank; an error of one is raised on all."""
    return _gathered(together(step, group), group, "for notes of the files built")


def refuse_differences(facts: Sequence[Mapping[str, Any] | None]) -> None:
    """Every rank has ``facts`` of all ranks, None of those that build nothing; so all raise, or none.

    Raises:
        BlendingError: the first thing that a rank has otherwise than the first that builds.
    """
    first = next((rank for rank, mine in enumerate(facts) if mine is not None), None)
    for rank, mine in enumerate(facts):
        model = None if first is None else facts[first]
        if mine is None or model is None:
            continue
        for name in dict.fromkeys([*model, *mine]):
            if model.get(name) != mine.get(name):
                raise BlendingError(
                    f"{name} differs between ranks: rank {first} has {model.get(name)} and rank {rank} has "
                    f"{mine.get(name)}, so their samples would differ; give all ranks one configuration, and copies "
                    "of the same files"
                )


def builder_number(takes_part: bool, group: "ProcessGroup") -> tuple[int, int]:
    """(number of this rank among those that take part, how many do). A rank that does not comes after the last."""
    from torch.distributed import get_rank

    flags = _gathered(takes_part, group, "to share the building")
    return (sum(flags[: get_rank(group)]) if takes_part else sum(flags)), sum(flags)
