"""``state_dict()`` and ``load_state_dict()`` of the wrapped module itself: right where they can be, else refused.

    module.state_dict(), module.load_state_dict() --> install (this file) --> engine/engine.py

The wrapper's own state is in state/.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sixfold.fsdp.buffers.weights import whole_main
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.hooks.forward_backward import Hook

STATE = (
    "use the wrapper's full_state_dict() (collective) or state_records() (live aliases, no communication); "
    "save_pretrained takes it: net.save_pretrained(folder, state_dict=model.full_state_dict()). "
    "sixfold.fsdp.torch_state has DTensors for torch's tools"
)
LOAD = "use the wrapper's load_full_state_dict(), or copy into its state_records() and call its refresh()"


class StateDict(Hook):
    """``module.state_dict()`` of the wrapped module or a part of it: whole in one process, else refused.

    With ``keep_vars=True`` it holds module buffers and the Parameter objects themselves, whose guards see each read.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._keeps = False

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raise where half a dict could be taken for a whole one."""
        engine = self.engine
        self._keeps = keep_vars
        if keep_vars or engine.state_dict_asked == "names":
            return
        if engine.ranks.size > 1:
            raise FsdpError(
                f"state_dict() of {type(module).__name__} inside a FullyShardedDataParallel of {engine.ranks.size} "
                f"ranks would hold whatever lies in gathered memory; {STATE}"
            )
        engine.state_dict_asked = "values"

    def after(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Main weights take the place of gathered ones, where the module's own code has not made something else."""
        if self._keeps or self.engine.state_dict_asked == "names":
            return
        self.engine.state_dict_asked = ""
        for name, parameter in module._parameters.items():
            record = self.engine.records.get(parameter) if parameter is not None else None
            value = state_dict.get(prefix + name)
            if record is not None and type(value) is Tensor and value.data_ptr() == record.compute.data_ptr():
                state_dict[prefix + name] = whole_main(record)  # in a call of its unit


class LoadStateDict(Hook):
    """``module.load_state_dict()`` would fill gathered copies and be lost."""

    def before(self, module: nn.Module, *_: Any) -> None:
        """Raise before the first value is copied."""
        raise FsdpError(
            f"load_state_dict() of {type(module).__name__} inside a FullyShardedDataParallel would be undone by the "
            f"next gather; {LOAD}"
        )


def install(engine: Engine, root: nn.Module) -> list[Any]:
    """Hooks on all modules; returns their handles."""
    saving, loading = StateDict(engine), LoadStateDict(engine)

    def saved(*args: Any) -> None:  # torch marks the function that it gets, and a method takes no mark
        saving.after(*args)

    own: list[Any] = []
    for module in root.modules():
        own.append(module.register_state_dict_pre_hook(saving.before))  # type: ignore[no-untyped-call]
        own.append(module.register_state_dict_post_hook(saved))  # type: ignore[no-untyped-call]
        own.append(module.register_load_state_dict_pre_hook(loading.before))  # type: ignore[no-untyped-call]
    return own
