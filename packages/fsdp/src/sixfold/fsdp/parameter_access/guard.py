"""A parameter's values between its unit's calls: right, or refused at the moment of use.

    engine/engine.py begins and ends calls --> UnitGuard, Guard (this file) --> FsdpError in the user's line

A parameter's memory is its unit's for the length of a call and may hold another unit's weights after it.
[Note: classes say who may read] Between calls the Parameter objects have a class whose ``__torch_function__`` asks
first. While their unit runs they have one that asks nobody, so a layer pays nothing. Assigning ``__class__`` costs
50 ns, and torch itself does so for lazy parameters. Knows no collective and no hook.

[Note: offsets in a storage] ``as_strided`` counts an explicit offset from the start of the storage, and a parameter
lies anywhere in its unit's. So such a call is refused wherever the parameter lies. The method is refused always. The
function ``torch.as_strided(p, ...)`` is refused between calls, and in units whose classes name it
(setup/parameter_guards.py).

[Note: .data in a call] A write through ``.data`` moves no version. So in its unit's call a parameter knows that its
``.data`` is taken: a digest is kept, and compared when the call ends. Who does not take it pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sixfold.fsdp.buffers.digest import tensor_digest
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.parameter_access.saved_weights import EscapedViews
from sixfold.fsdp.parameter_access.uncompiled import uncompiled

_data: Any = torch._C.TensorBase.data
_set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter
MARK = "_sixfold_fsdp_guard"  # in the Parameter's own __dict__

# What tells of a tensor without reading an element, by name of the method, function or property.
_READS_NOTHING = frozenset({
    "shape", "dtype", "device", "layout", "is_leaf", "grad_fn", "ndim", "names", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_mps", "is_nested", "is_xla", "is_xpu",
    "is_vulkan", "is_ipu", "is_maia", "is_mtia", "retains_grad", "output_nr", "_version", "itemsize", "nbytes",
    "name", "_backward_hooks", "_post_accumulate_grad_hooks", "_is_param", "is_shared", "is_pinned", "size", "dim",
    "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_conj", "is_neg", "is_inference", "data_ptr", "storage_offset", "untyped_storage", "get_device",
    "register_hook", "register_post_accumulate_grad_hook", "is_same_size", "zeros_like", "ones_like", "empty_like",
    "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_tensor", "__len__", "__hash__", "__dir__", "result_type", "can_cast", "is_tensor", "is_storage",
    "get_gradient_edge", "backward", "_is_view", "grad_dtype",
})  # fmt: skip
_STRIDED = frozenset({"as_strided", "as_strided_", "as_strided_copy"})
_MOVES = frozenset({"to", "half", "double", "float", "bfloat16", "type", "cpu", "cuda"})  # what nn.Module._apply calls
_SETS_ITEMS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})


class Guard:
    """Asks for one parameter: may this be done now?

    Args:
        record: the parameter's place in its unit.
        readable: its values are here and stay here for what is about to use them.
        owes_gradient: a gradient of it is summed or reduced, while ``.grad`` is None.
        forget: ``.grad`` is set to None: so is that of its main parameter.
        saved: what ``detach()`` gives while a state dict is made; None: none is.
    """

    __slots__ = ("forget", "gone", "owes_gradient", "own_class", "readable", "record", "saved", "taken")

    def __init__(
        self,
        record: ParamRecord,
        readable: Callable[[], bool],
        owes_gradient: Callable[[ParamRecord], bool],
        forget: Callable[[ParamRecord], None],
        saved: Callable[[ParamRecord], Tensor | None],
    ) -> None:
        self.record = record
        self.forget = forget
        self.saved = saved
        self.readable = readable
        self.owes_gradient = owes_gradient
        self.own_class = type(record.parameter)
        self.gone = False  # the model is no more
        self.taken: tuple[int, int] | None = None  # version and digest of the values when .data was taken in this call

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error("it is copied or pickled", READ)

    def error(self, what: str, remedy: str) -> FsdpError:
        """``what`` was done to the parameter; ``remedy`` says what to do instead."""
        if self.gone:
            remedy = KEEP
        return FsdpError(f"{self.record.name}: {what}; {remedy}", unit=self.record.flat_buffer.unit, op="read")

    def ask(self, name: str, sets: bool, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise unless function or property ``name`` may be used now; ``sets``: the property is assigned."""
        parameter = self.record.parameter
        if name == "requires_grad" or name == "requires_grad_":
            wanted = bool(args[1]) if len(args) > 1 else bool(kwargs.get("requires_grad", True))
            if sets or name == "requires_grad_":
                self._set_wanted(wanted)
        elif name == "grad":
            self._ask_grad(sets, args, parameter)
        elif name == "data":
            raise self.error("its .data is assigned", WRITE) if sets else self.error("its .data is taken", READ)
        elif name in _STRIDED and _offset(args, kwargs) is not None:
            raise self.error(f"{name}() is given a storage_offset", OFFSET)
        elif _writes(name, parameter, args, kwargs):
            raise self.error(f"{name}() writes to it, and the next gather would undo that", WRITE)
        elif self.gone or not self.readable():
            remedy = f"{MOVE}. Else {READ}" if name in _MOVES else READ
            raise self.error(f"{name}() reads its values outside a call of its unit, and they may not be here", remedy)

    def mark(self) -> None:
        """The parameter finds its guard."""
        self.record.parameter.__dict__[MARK] = self

    def refuse_written(self) -> None:
        """Raise if the parameter is another than when its ``.data`` was taken. [Note: .data in a call]"""
        assert self.taken is not None, f"{self.record.name}: nobody took its .data"
        (version, taken), self.taken = self.taken, None
        if _digest(self.record.parameter) != taken:
            _set_versions((self.record.parameter,), (version,))  # told here, and not once more
            raise self.error("it was written to through .data in a call of its unit", IN_CALL)

    def ask_view(self, name: str) -> None:
        """Raise unless a view of the parameter may be read now by ``name``."""
        if self.gone or not self.readable():
            raise self.error(f"{name}() reads a view of it that a call of its unit left behind", VIEW)

    def _set_wanted(self, wanted: bool) -> None:
        if wanted and not self.record.flat_buffer.trainable:
            raise self.error("requires_grad was False when it was wrapped and is set to True", UNFREEZE)
        self.record.wanted = wanted

    def _ask_grad(self, sets: bool, args: Sequence[Any], parameter: Tensor) -> None:
        if sets:
            if len(args) > 1 and args[1] is not None:
                raise self.error(".grad is assigned, and no optimizer would see it", GRAD)
            self.forget(self.record)
            return
        with torch._C.DisableTorchFunctionSubclass():
            here = parameter.grad is not None
        if not here and self.owes_gradient(self.record):
            raise self.error(".grad is read: it is None here although there is a gradient", GRAD)


READ = (
    "read weights from model.full_state_dict() or model.state_records(). A module whose forward uses another module's "
    "weight needs both in one unit, or the parameter registered in both (it then belongs to the root unit); where no "
    "fsdp_unit_modules entry named the unit, root_units=False leaves it with the root unit. A part of the model alone "
    "is run by model.entry(child)(x)"
)
MOVE = "if it is to convert or move the module, convert before wrapping; buffers that came first are converted by now"
WRITE = "set weights before wrapping, or copy into model.state_records() and call model.refresh()"
VIEW = "after the call its memory may hold other weights. Keep a clone() of the view, or let one unit hold both modules"
IN_CALL = (
    "the next gather undoes that. Set it between calls, on all ranks: "
    "model.load_full_state_dict({name: value}, strict=False)"
)
GRAD = (
    "gradients lie on model.main_parameters(). Clear them with optimizer.zero_grad() or model.zero_grad(), clip them "
    "with model.clip_grad_norm_()"
)
MAX_NORM = (
    "the next gather undoes that. Set max_norm to None and renormalise between steps, on all ranks: "
    "model.load_full_state_dict({name: model.full_state_dict()[name].renorm(2, 0, max_norm)}, strict=False). Or look "
    "up a copy in a forward of your own: F.embedding(x, self.weight.clone(), max_norm=self.max_norm)"
)
OFFSET = (
    "torch counts it from the start of the storage, which holds other weights too. Leave it out and say where to begin "
    "by a slice: p.flatten()[offset:].as_strided(size, stride)"
)
UNFREEZE = "wrap it with requires_grad=True and freeze it afterwards: that is honoured, and can be undone"
KEEP = "its FullyShardedDataParallel object was deleted before; keep that object for as long as the module is used"


def _writes(name: str, parameter: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if name in _SETS_ITEMS or (name.endswith("_") and not name.endswith("__")):
        target = args[0] if args else next((kwargs[k] for k in ("tensor", "input", "self") if k in kwargs), None)
        return any(one is parameter for one in (target if isinstance(target, (list, tuple)) else [target]))
    return any(one is parameter for one in pytree.tree_leaves(kwargs.get("out")))


def _offset(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The ``storage_offset`` that a call of ``as_strided`` gives, tensor included in ``args``."""
    return args[3] if len(args) > 3 else kwargs.get("storage_offset")


def _named(func: Any) -> tuple[str, bool]:
    """Name of a function, method or property, and whether the property is assigned."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__, name != "__get__"
    return name, False


def _guards(values: Any) -> Iterator[Guard]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, GuardedParameter):
            yield leaf.__dict__[MARK]


class GuardedParameter(nn.Parameter):
    """A parameter between the calls of its unit. [Note: classes say who may read]"""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, sets = _named(func)
        if name == "detach" and args and type(args[0]) is cls:
            guard = args[0].__dict__[MARK]
            value = None if guard.gone else guard.saved(guard.record)
            if value is not None:
                return value
        if (sets or name not in _READS_NOTHING) and func is not torch.autograd.grad:
            for guard in _guards((args, kwargs)):
                guard.ask(name, sets, args, kwargs)
        if LentView in types:
            return LentView.__torch_function__(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # its own class's

    def as_subclass(self, cls: type) -> Any:  # torch asks no class for it
        self.__dict__[MARK].ask("as_subclass", False, (self,), {})
        with torch._C.DisableTorchFunctionSubclass():
            return super().as_subclass(cls)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        record = self.__dict__[MARK].record
        return f"Parameter {record.name} {tuple(self.shape)} {self.dtype} of unit {record.flat_buffer.unit or '(root)'}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class LentView(Tensor):
    """A view of a parameter that a call of its unit left behind: read while the unit's weights are here."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, sets = _named(func)
        if name not in _READS_NOTHING and name not in ("grad", "requires_grad"):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, LentView):
                    leaf.__dict__[MARK].ask_view(name)
                elif isinstance(leaf, GuardedParameter):
                    leaf.__dict__[MARK].ask(name, sets, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@uncompiled
def lend(tensors: Sequence[Tensor], guards: Sequence[Guard]) -> None:
    """``tensors`` show one of the ``guards``' parameters each, and ask from now on."""
    for tensor in tensors:
        at = tensor.data_ptr()
        for guard in guards:
            with torch._C.DisableTorchFunctionSubclass():
                low = guard.record.parameter.data_ptr()
            if low <= at < low + guard.record.parameter.nbytes:
                tensor.__class__ = LentView  # as torch's lazy parameters do
                tensor.__dict__[MARK] = guard
                break


class PlacedParameter(nn.Parameter):
    """A parameter in a call of its unit. [Note: offsets in a storage]"""

    def as_strided(self, *args: Any, **kwargs: Any) -> Tensor:
        """A view of it, that begins where it does."""
        if _offset((self, *args), kwargs) is not None:
            raise self.__dict__[MARK].error("as_strided() is given a storage_offset", OFFSET)
        return super().as_strided(*args, **kwargs)


class ShownParameter(PlacedParameter):
    """A parameter in a call of its unit, where main weights lie elsewhere. [Note: .data in a call]"""

    @property
    def data(self) -> Tensor:
        """The value without a graph."""
        if not torch.compiler.is_compiling():  # a graph's writes to this move the version
            _note_taken(self)
        if type(self).__torch_function__ is not nn.Parameter.__torch_function__:
            value: Tensor = _data.__get__(self)  # by that class's own rule, as it refuses a read of fp8
            return value
        return self.detach()  # shares the version, by which views of it are known  [Note: views left behind]

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value)


@uncompiled
def _note_taken(parameter: Tensor) -> None:
    guard = parameter.__dict__[MARK]
    if guard.taken is None:
        guard.taken = parameter._version, _digest(parameter)


@uncompiled  # torch's compiler takes .data itself, and then runs hooks that look at it
def _digest(parameter: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor_digest(_data.__get__(parameter))


class _Asking:
    """In a unit whose code names ``as_strided``. [Note: offsets in a storage]"""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        strided = getattr(func, "__name__", "") in _STRIDED and _offset(args, kwargs) is not None
        if strided and args and isinstance(args[0], cls):
            raise args[0].__dict__[MARK].error(f"{func.__name__}() is given a storage_offset", OFFSET)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@cache
def shown_class(own: type, *, placed: bool, strides: bool) -> type:
    """What a parameter of class ``own`` is while layers read it.

    Args:
        placed: they read its main weight.
        strides: it asks, unless a class of the user's or of fp8 has its own rule. [Note: offsets in a storage]
    """
    base: type[nn.Parameter] = PlacedParameter if placed else ShownParameter
    shown: type[nn.Parameter] = base if own is nn.Parameter else type(own.__name__, (base, own), {})
    asks = strides and shown.__torch_function__ is nn.Parameter.__torch_function__
    return type(shown.__name__, (_Asking, shown), {}) if asks else shown


@cache
def guarded_class(own: type) -> type:
    """What it is between calls."""
    return GuardedParameter if own is nn.Parameter else type(own.__name__, (GuardedParameter, own), {})


class UnitGuard:
    """The parameters of one unit, shown to its layers and hidden from everyone else."""

    def __init__(
        self, guards: Sequence[Guard], views: EscapedViews, *, as_sharded: bool = False, strides: bool = False
    ) -> None:
        self.guards = tuple(guards)
        self._views = views
        self._swaps = []
        for one in guards:
            whole = one.record.flat_buffer.weights.whole_here and not as_sharded
            shown = shown_class(one.own_class, placed=whole, strides=strides)
            self._swaps.append((one.record.parameter, shown, guarded_class(one.own_class)))
            one.mark()
        self.hide()

    def begin_call(self, *, learns: bool) -> None:
        """The unit's call begins, gathered; ``learns``: it is of the first step."""
        self.reveal()
        if learns or self._views.began or not torch.is_grad_enabled():
            self._views.begin(learns)

    def end_call(self) -> None:
        """Its call that began last is over."""
        self.hide()
        left = self._views.end() if self._views.began else ()
        if left:
            lend(left, self.guards)

    def interrupted(self) -> None:
        """Calls that began are over, and nobody told of their ends."""
        self.hide()
        self._views.clear()

    def reveal(self) -> None:
        """Layers read its parameters: in a call, and in a recompute."""
        for parameter, shown, _ in self._swaps:
            parameter.__class__ = shown

    def hide(self) -> None:
        """They do no more."""
        for parameter, _, guarded in self._swaps:
            parameter.__class__ = guarded

    def refuse_written(self) -> None:
        """The unit's call is over, without an error.

        Raises:
            FsdpError: a parameter was written to through ``.data``. [Note: .data in a call]
        """
        for guard in self.guards:
            if guard.taken is not None:
                guard.refuse_written()

    def close(self) -> None:
        """The model is gone: its parameters hold nothing any more."""
        for guard in self.guards:
            guard.gone = True
        self.hide()


def guard_of(parameter: Tensor) -> Guard | None:
    """The guard of a parameter that is wrapped (or was), else None."""
    return parameter.__dict__.get(MARK)


def written_in_place(guard: Guard, model: nn.Module) -> FsdpError:
    """The error for a parameter of ``model`` that was written to in place in a call of its unit."""
    parameter = guard.record.parameter
    for part in model.modules():
        limit = getattr(part, "max_norm", None)
        if limit is not None and any(one is parameter for one in part._parameters.values()):
            what = f"it was written to in place, as {type(part).__name__} does with max_norm={limit}"
            return guard.error(what, MAX_NORM)
    return guard.error("it was written to in place", IN_CALL)
