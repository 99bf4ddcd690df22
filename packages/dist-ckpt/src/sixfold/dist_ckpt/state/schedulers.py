"""Learning rate schedulers: a state that another kind of scheduler saved is refused before anything is loaded.

stateful.py's object and what is stored of it --> check_is_same (this file) --> MismatchError, or the load goes on

torch's own load takes the state of any scheduler: it updates attributes by name. A LambdaLR ends in a bare KeyError, an
ExponentialLR takes the gamma of a StepLR and goes on.
"""

from __future__ import annotations

from typing import Any

import torch

from sixfold.dist_ckpt.errors import MismatchError
from sixfold.dist_ckpt.state import tree

# Arguments that only some of torch's schedulers have in their state, in all versions of torch: they tell the kinds.
_KINDS = {
    "ChainedScheduler": {"_schedulers"},
    "ConstantLR": {"factor", "total_iters"},
    "CosineAnnealingLR": {"T_max", "eta_min"},
    "CosineAnnealingWarmRestarts": {"T_0", "eta_min"},
    "CyclicLR": {"gamma", "total_size"},
    "ExponentialLR": {"gamma"},
    "LambdaLR or a MultiplicativeLR": {"lr_lambdas"},
    "LinearLR": {"start_factor", "total_iters"},
    "MultiStepLR": {"gamma", "milestones"},
    "OneCycleLR": {"total_steps"},
    "PolynomialLR": {"power", "total_iters"},
    "ReduceLROnPlateau": {"factor", "patience"},
    "SWALR": {"anneal_epochs"},
    "SequentialLR": {"_milestones", "_schedulers"},
    "StepLR": {"gamma", "step_size"},
}
_TELLING = set[str]().union(*_KINDS.values())


def check_is_same(owner: Any, own: Any, stored: Any, key: str) -> None:
    """MismatchError where a scheduler would get what another kind of scheduler has saved.

    Of users' classes, which may have gained an argument since, it is so if one is missing and another one too many.
    """
    if not isinstance(owner, torch.optim.lr_scheduler.LRScheduler) or not (tree.is_dict(own) and tree.is_dict(stored)):
        return
    mine, theirs = _TELLING & own.keys(), _TELLING & stored.keys()
    is_torchs = type(owner).__module__.startswith("torch.optim.")
    if mine != theirs if is_torchs else mine - theirs and theirs - mine:
        kind = next((f"a {name}" for name, telling in _KINDS.items() if telling == theirs), "another scheduler")
        raise MismatchError(
            f"{key} is a {type(owner).__name__}, and {kind} was saved, with {', '.join(sorted(theirs)) or 'neither'} "
            f"for {', '.join(sorted(mine)) or 'none'}. Make that one; or leave {key} out, and this one begins anew"
        )
    inside, then = getattr(owner, "_schedulers", None), stored.get("_schedulers")
    if isinstance(inside, (list, tuple)) and isinstance(then, (list, tuple)):
        for at, (one, old) in enumerate(zip(inside, then, strict=False)):
            check_is_same(one, one.state_dict(), old, f"{key}._schedulers.{at}")
