"""Views of queries and keys by the key head that they share: head h reads key head h // (heads / groups)."""

from torch import Tensor


def split_heads(t: Tensor, groups: int) -> Tensor:
    """(b, s, heads, d) -> view (b, groups, heads / groups, s, d)."""
    b, s, heads, d = t.shape
    return t.view(b, s, groups, heads // groups, d).permute(0, 2, 3, 1, 4)


def repeated(t: Tensor, repeats: int) -> Tensor:
    """Key heads, each ``repeats`` times: (b, s, groups, d) -> (b, s, groups * repeats, d)."""
    return t.repeat_interleave(repeats, 2) if repeats > 1 else t


def by_group(t: Tensor) -> Tensor:
    """(b, s, groups, d) -> (b * groups, s, d), contiguous."""
    return t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3])
