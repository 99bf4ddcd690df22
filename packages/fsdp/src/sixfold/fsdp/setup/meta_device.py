"""Modules on the meta device made real, each with the values that its constructor would have drawn.

    start_values.py --> Meta (this file) --> start_values.py keeps each rank's part

One module is made real at a time, in the order of ``named_modules``; attention comes together with its output
projection. So with the seed of ``Net()`` the generator gives every module the numbers that it gave there. Knows no
rank and no flat buffer.

[Note: what a tied layer drew] ``head.weight = embedding.weight`` comes after the head drew a weight of its own, and
what was drawn after it depends on that. So a module that shares a parameter with an earlier one draws it too, into
scratch memory. (Tied the other way round, the first module's draw is kept and the second's should be: give init_fn.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.errors import FsdpError

InitFn = Callable[[str, nn.Module], None]
_OTHERWISE = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)  # not filled layer by layer
_GIVE = "give init_fn=(name, module) -> None"


class Meta:
    """Makes the meta parameters and module buffers of one model real.

    Args:
        init_fn: fills a module that had any; None: its ``reset_parameters``.
    """

    def __init__(self, device: torch.device, init_fn: InitFn | None) -> None:
        self._device = device
        self._init_fn = init_fn
        self._made: set[nn.Parameter] = set()  # by this object
        self._kept: set[nn.Parameter] = set()  # of these, those of earlier groups: their values lie elsewhere now
        self._module_buffers: dict[Tensor, Tensor] = {}
        self._unsaved: list[tuple[str, nn.Module, str]] = []  # module buffers that no state dict brings

    def groups(self, module: nn.Module) -> Iterator[list[nn.Module]]:
        """Modules in order, made real and filled: what the caller is to keep before it asks for the next.

        Raises:
            FsdpError: a module on the meta device that cannot be filled as its constructor would.
        """
        apart: set[nn.Module] = set()
        for name, part in module.named_modules():
            if part in apart:
                continue
            if isinstance(part, _OTHERWISE) and self._init_fn is None and any(one.is_meta for one in part.parameters()):
                raise FsdpError(
                    f"module {name or '(root)'} ({type(part).__name__}) is on the meta device. Its constructor "
                    "copies one layer or draws all weights again; reset_parameters() of its layers does "
                    f"not. To fill it, {_GIVE}"
                )
            group = {name: part}
            if isinstance(part, nn.MultiheadAttention):  # its own method sets the projection's bias
                group[f"{name}.out_proj" if name else "out_proj"] = part.out_proj
                apart.add(part.out_proj)
            self._make(group)
            yield list(group.values())
            self._kept |= self._made
        for name, part, key in self._unsaved:
            module_buffer = part._buffers.get(key)
            if module_buffer is not None and _is_unset(module_buffer):
                who = "init_fn" if self._init_fn else "reset_parameters()"
                raise FsdpError(
                    f"{_full(name, key)} was on the meta device, {who} left it as it was, and no state dict holds it "
                    f"(persistent=False); fill it there as the constructor of {type(part).__name__} does"
                )

    def _make(self, group: dict[str, nn.Module]) -> None:
        real = {name: part for name, part in group.items() if self._materialize(name, part)}
        # A constructor makes its children before it fills what is its own.
        for name, part in real.items() if self._init_fn is not None else reversed(real.items()):
            with torch.no_grad():
                self._fill(name, part)
        for part in group.values():
            if part not in real.values():
                self._draw_in_vain(part)

    def _materialize(self, name: str, part: nn.Module) -> bool:
        """Memory for ``part``'s own meta parameters and module buffers; True if any. Parameters keep their identity."""
        found = False
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = []
        for key, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                found = True
                attributes = dict(parameter.__dict__)
                real = nn.Parameter(_unset(parameter, self._device), requires_grad=parameter.requires_grad)
                if weakref.getweakrefcount(parameter):
                    raise FsdpError(
                        f"{_full(name, key)} is on the meta device and something holds a weak reference to it, so it "
                        "cannot be made real; make the module on a real device"
                    )
                torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
                parameter.__dict__.update(attributes)
                self._made.add(parameter)
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = [None if one is None else weakref.ref(one) for one in part._flat_weights]
        for key, module_buffer in part.named_buffers(recurse=False):
            if module_buffer in self._module_buffers:
                setattr(part, key, self._module_buffers[module_buffer])
            elif module_buffer.is_meta:
                found = True
                self._module_buffers[module_buffer] = _unset(module_buffer, self._device)
                setattr(part, key, self._module_buffers[module_buffer])
                if key in part._non_persistent_buffers_set:
                    self._unsaved.append((name, part, key))
        return found

    def _fill(self, name: str, part: nn.Module) -> None:
        if self._init_fn is not None:
            self._init_fn(name, part)
            return
        reset = _reset_of(part)
        if reset is None:
            raise FsdpError(
                f"module {name or '(root)'} ({type(part).__name__}) is on the meta device and has no "
                f"reset_parameters(); {_GIVE}"
            )
        self._with_scratch(part, reset)

    def _draw_in_vain(self, part: nn.Module) -> None:
        """[Note: what a tied layer drew]"""
        reset = _reset_of(part)
        tied = any(one in self._kept for one in part.parameters(recurse=False))
        if self._init_fn is None and reset is not None and tied:
            with torch.no_grad():
                self._with_scratch(part, reset)

    def _with_scratch(self, part: nn.Module, reset: Callable[[], Any]) -> None:
        """``reset()`` with scratch memory in the place of parameters that another module made and kept."""
        kept = {key: one for key, one in part._parameters.items() if one is not None and one in self._kept}
        try:
            for key, one in kept.items():
                part._parameters[key] = nn.Parameter(torch.empty_like(one, device=self._device), requires_grad=False)
            reset()
        finally:
            part._parameters.update(kept)


def _unset(like: Tensor, device: torch.device) -> Tensor:
    """Memory like ``like``: NaN, or the least integer, until somebody fills it. Nobody takes that for a value."""
    made = torch.empty_like(like, device=device, requires_grad=False)
    if made.dtype.is_floating_point:
        return made.detach().fill_(torch.nan)
    return made if made.dtype is torch.bool or made.dtype.is_complex else made.fill_(torch.iinfo(made.dtype).min)


def _is_unset(value: Tensor) -> bool:
    if not value.numel() or value.dtype is torch.bool or value.dtype.is_complex or value.dtype is torch.uint8:
        return False
    if value.dtype.is_floating_point:
        return bool(value.isnan().all())
    return bool((value == torch.iinfo(value.dtype).min).all())


def _reset_of(part: nn.Module) -> Callable[[], Any] | None:
    name = "_reset_parameters" if isinstance(part, nn.MultiheadAttention) else "reset_parameters"
    reset = getattr(part, name, None)
    return reset if callable(reset) else None


def _full(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
