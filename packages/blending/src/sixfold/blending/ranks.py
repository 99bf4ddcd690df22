"""An error on one rank becomes an error on every rank (this file: the only one that imports torch for a group)."""

from typing import TYPE_CHECKING

from sixfold.blending.errors import BlendingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def raise_together(error: Exception | None, group: "ProcessGroup") -> None:
    """Every rank of ``group`` calls this with its error or None; all go on, or all raise.

    Args:
        group: any backend; the exchange ends within the group's own timeout.
    Raises:
        BlendingError: a rank had an error: "rank R: ..." of the lowest such R.
    """
    from torch.distributed import all_gather_object, get_world_size

    texts: list[str | None] = [None] * get_world_size(group)
    all_gather_object(texts, None if error is None else str(error) or type(error).__name__, group=group)
    for rank, text in enumerate(texts):
        if text is not None:
            raise BlendingError(f"rank {rank}: {text}") from error
