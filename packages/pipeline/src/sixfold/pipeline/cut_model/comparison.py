"""A cut that proves itself: the model and its stages, one behind the other, on sixteen tokens.

    model, its stages' modules --> logits of both, or the place where they part (this file) --> stages_of_causal_lm

[Note: a cut proves itself] A model's forward may do anything between embedding, layers and logits, and no list of what
models do is complete. So both are run once where the whole model is held. They run the same operations, so that
logits differ by a device's rounding at most. Nothing stays of it: modes, buffers, attributes and generators are
put back.

[Note: arguments] Logits alone say too little: under bfloat16's rounding the layers of a new model change them little
(Zamba's get the embeddings beside the hidden states). So what each layer is called with is compared too. What is equal
for all layers was not made of hidden states, and no rounding excuses a difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.pipeline.cut_model.original import base_of
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.random_state import RandomState
from sixfold.pipeline.stage.side_effects import OF_ALL_MODULES, access, process_generators, same_values

__all__ = ["prove"]

_ROWS, _LENGTH, _PADS = 2, 8, 3
_ROUNDING = 8  # in units of the last place of the largest logit
_NOT_HERE = ("DTensor", "FlatParameter", "FakeTensor")  # a forward is a collective, or has no values


def prove(model: Any, layers: Sequence[nn.Module], parts: Sequence[nn.Module], mine: Sequence[range]) -> None:
    """``parts`` give the logits of ``model``; mine: the places of their layers.

    Raises:
        ScheduleError: they give others, or fail where the model does not.
    """
    weight: Any = model.get_input_embeddings().weight
    if not _can_run(model, weight):
        return
    ids, mask = _batch(model, weight)
    failed: list[Exception] = []
    compared = False
    with _as_before([model, *parts], weight.device) as start:
        for kwargs in ({"attention_mask": mask}, {}):
            whole = _Run(start, layers, partial(_logits, model, ids, kwargs))
            if whole.error is not None:  # the model's own
                continue
            stages = _Run(start, layers, partial(_chained, parts, ids, kwargs))
            if stages.error is not None:
                failed.append(stages.error)
                continue
            compared = True
            kept = mask.bool() if kwargs else torch.ones_like(mask, dtype=torch.bool)
            _compare(model, whole, stages, kept, mine)
            _compare_arguments(model, whole, stages, kept)
    if compared:
        return
    if failed:
        if isinstance(failed[0], ScheduleError):
            raise failed[0]
        raise ScheduleError(
            f"the stages of a {type(model).__name__} fail where the model does not: {_told(failed[0])}; "
            "write stages of this model as modules of your own"
        ) from failed[0]
    warnings.warn(
        f"the stages of a {type(model).__name__} were not compared with it, since it failed alone on token ids and a "
        f"mask: {_told(whole.error)}; compare their logits, or give check=False",
        stacklevel=4,
    )


def _told(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _can_run(model: Any, weight: Any) -> bool:
    """All values are here, and kernels that this device has are asked for."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "meta" or type(tensor).__name__ in _NOT_HERE:
            return False
    kind = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    if kind == "flex_attention" or ("flash" in kind and weight.device.type == "cpu"):
        return False
    return bool(weight.dim() == 2 and weight.shape[0] > 0)  # partitioned elsewhere (ZeRO-3): no rows


def _batch(model: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Ids, and a mask that leaves out the first of a row; no generator is asked."""
    config = getattr(model, "config", None)
    words = min(weight.shape[0], getattr(config, "vocab_size", None) or weight.shape[0])
    ids = (torch.arange(_ROWS * _LENGTH) * 7919 + 5).remainder(words).view(_ROWS, _LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :_PADS] = 0
    pad = getattr(config, "pad_token_id", None)
    if type(pad) is int and 0 <= pad < words:
        ids[0, :_PADS] = pad
    return ids.to(weight.device), mask.to(weight.device)


def _logits(model: Any, ids: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    made: Tensor = model(ids, **kwargs, use_cache=False, return_dict=True).logits
    return made


def _chained(parts: Sequence[nn.Module], x: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    for part in parts:
        x = part(x, **kwargs)
    return x


class _Run:
    """One run: its logits or its error, and what each layer took and gave, in the order of calls."""

    def __init__(self, start: Callable[[], AbstractContextManager[None]], layers: Any, run: Callable[[], Any]) -> None:
        self._given = start, layers, run
        self.calls: list[tuple[Any, Any]] = []
        self.arguments: list[dict[str, Tensor]] = []
        self.error: Exception | None = None
        self.logits = torch.empty(0)

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
            self.calls.append((args[0] if args else kwargs.get("hidden_states"), _first(made)))
            self.arguments.append(dict(_tensors_in({**dict(enumerate(args)), **kwargs}, "")))

        # A layer that stands in the list twice has one hook, which is called twice.
        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in dict.fromkeys(layers)]
        try:
            with start():
                self.logits = run()
        except Exception as error:  # whatever a model of the caller's raises
            self.error = error
        finally:
            for hook in hooks:
                hook.remove()

    def with_other_numbers(self) -> _Run:
        """The same run behind some draws."""
        start, layers, run = self._given

        def drawn() -> Any:
            torch.rand(4), torch.rand(4, device=self.logits.device)
            return run()

        return _Run(start, layers, drawn)


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in ``value``, each with a name of its own."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(part, f"{name}[{key!r}]" if name else str(key))


def _first(made: Any) -> Any:
    return made[0] if isinstance(made, tuple | list) and made else made


@contextmanager
def _as_before(modules: Sequence[Any], device: torch.device) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Evaluation without gradients; gives what each run stands in, and leaves everything as it was."""
    seen = list(dict.fromkeys(module for top in modules for module in top.modules()))
    modes = [(module, module.training) for module in seen]
    configs = {id(c): c for m in modules if (c := getattr(base_of(m), "config", None)) is not None}
    # RWKV's evaluation halves weights by a layer's place, in place.
    rescaled = [(c, c.rescale_every) for c in configs.values() if getattr(c, "rescale_every", 0)]
    random = RandomState(device)

    @contextmanager
    def start() -> Iterator[None]:
        states = [_state(module) for module in seen]
        generators = [value for held, *_ in states for value in held.values() if access(value) is not None]
        ways = [*process_generators().values(), *(way for g in generators if (way := access(g)) is not None)]
        drawn = [(write, read()) for write, read in ways]
        try:
            with random.restored():
                yield
        finally:
            for write, was in drawn:
                write(was)
            for module, state in zip(seen, states, strict=True):
                _put_back(module, *state)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if any(getattr(m, "_compiled_call_impl", None) or type(m).__name__ == "OptimizedModule" for m in seen):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for module in seen:
                module.training = False  # train() of a user's module may do more
            for config, _ in rescaled:
                config.rescale_every = 0
            yield start
        finally:
            for config, every in rescaled:
                config.rescale_every = every
            for module, mode in modes:
                module.training = mode


State = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Tensor]]


def _state(module: nn.Module) -> State:
    attributes = {name: value for name, value in vars(module).items() if name not in OF_ALL_MODULES}
    grown = {name: value.copy() for name, value in attributes.items() if type(value) in (list, dict, set)}
    buffers = dict(module._buffers)
    return attributes, grown, buffers, {name: b.detach().clone() for name, b in buffers.items() if b is not None}


def _put_back(
    module: nn.Module,
    attributes: dict[str, Any],
    grown: dict[str, Any],
    buffers: dict[str, Any],
    values: dict[str, Tensor],
) -> None:
    now = vars(module)
    for name in [name for name in now if name not in OF_ALL_MODULES and name not in attributes]:
        del now[name]
    now.update(attributes)
    for name, was in grown.items():
        value = attributes[name]
        if value != was:
            value.clear()
            value.extend(was) if isinstance(value, list) else value.update(was)
    module._buffers.clear()
    module._buffers.update(buffers)
    for name, was in values.items():
        if not same_values(buffers[name], was):
            buffers[name].copy_(was)


def _compare(model: Any, whole: _Run, stages: _Run, kept: Tensor, mine: Sequence[range]) -> None:
    expected, found = whole.logits, stages.logits
    if expected.shape == found.shape:
        largest, far = _apart(expected, found, kept)
        limit = _rounding(model, expected) * largest
        if far <= limit:
            return
        again = whole.with_other_numbers()  # does the model repeat itself?
        if again.error is not None or far <= limit + 4 * _apart(expected, again.logits, kept)[1]:
            return
        what = f"{far:.3g} apart, where the largest is {largest:.3g}"
    else:
        what = f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    where = _where(whole, stages, mine)
    raise ScheduleError(
        f"the stages of a {type(model).__name__} give other logits than the model: {what}; they differ first {where}, "
        "where the model's forward does something that no stage runs; write stages of this model as modules of your "
        "own, or give check=False to accept the difference"
    )


def _compare_arguments(model: Any, whole: _Run, stages: _Run, kept: Tensor) -> None:
    """[Note: arguments]; where the calls are not those of the model, logits are all that is compared."""
    if len(whole.arguments) != len(stages.arguments):
        return
    rounding, again = _rounding(model, whole.logits), None
    first: dict[str, Tensor] = {}
    changing: set[str] = set()
    for arguments in whole.arguments:
        for name, value in arguments.items():
            was = first.setdefault(name, value)
            if was is not value and (was.shape != value.shape or _apart(was, value, torch.ones_like(kept))[1] > 0):
                changing.add(name)
    for at, (theirs, ours) in enumerate(zip(whole.arguments, stages.arguments, strict=True)):
        for name in dict.fromkeys((*theirs, *ours)):
            one, other = theirs.get(name), ours.get(name)
            if one is None or other is None or one.shape != other.shape:
                shapes = [None if part is None else tuple(part.shape) for part in (other, one)]
                what = f"a tensor of shape {shapes[0]} instead of {shapes[1]}"
            else:
                largest, far = _apart(one, other, kept)
                limit = rounding * largest if name in changing else 0.0
                if far <= limit:
                    continue
                again = again or whole.with_other_numbers()
                third = again.arguments[at].get(name) if at < len(again.arguments) else None
                if third is None or far <= limit + 4 * _apart(one, third, kept)[1]:
                    continue
                what = f"{far:.3g} apart, where the largest is {largest:.3g}"
            raise ScheduleError(
                f"the stages of a {type(model).__name__} call layer {at} with other arguments than the model: "
                f"{name if not name.isdigit() else f'argument {name}'} is {what}; the model makes it of what only the "
                "first stage has; write stages of this model as modules of your own, or give check=False to accept it"
            )


def _rounding(model: Any, made: Tensor) -> float:
    """How far numbers of two equal runs may be apart, in parts of the largest."""
    kinds = {p.dtype for p in (*model.parameters(), made) if p.dtype.is_floating_point}
    eps = max(torch.finfo(kind).eps for kind in kinds if kind.itemsize > 1)  # eight bits are kept, not computed
    return _ROUNDING * eps


def _apart(one: Tensor, other: Tensor, kept: Tensor) -> tuple[float, float]:
    """The largest number, and the largest difference; NaN is NaN."""
    if one.is_complex():  # rotary embeddings, of Llama 4
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.float(), other.float()
    if one.shape[: kept.dim()] == kept.shape:
        one, other = one[kept.to(one.device)], other[kept.to(other.device)]
    if not one.numel():
        return 0.0, 0.0
    same = (one == other) | (one.isnan() & other.isnan())
    far = (one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
    return one.abs().nan_to_num(0.0, 0.0, 0.0).amax().item(), far.amax().item()


def _where(whole: _Run, stages: _Run, mine: Sequence[range]) -> str:
    """The first place where a run of the model and one of its stages part."""
    count = sum(len(places) for places in mine)
    if len(whole.calls) != count or len(stages.calls) != count:
        return f"in the number of calls of layers ({len(stages.calls)} for {len(whole.calls)})"
    stage_of = [stage for stage, places in enumerate(mine) for _ in places]
    for at, (theirs, ours) in enumerate(zip(whole.calls, stages.calls, strict=True)):
        if not _same(theirs[0], ours[0]):
            if at == 0:
                return "before the first layer"
            if stage_of[at] != stage_of[at - 1]:
                return f"between stages {stage_of[at - 1]} and {stage_of[at]} (layers {at - 1} and {at})"
            return f"between layers {at - 1} and {at}, of stage {stage_of[at]}"
        if not _same(theirs[1], ours[1]):
            return f"in layer {at}, of stage {stage_of[at]} (its other arguments)"
    return "after the last layer"


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), 1e-2, 1e-3, equal_nan=True)
