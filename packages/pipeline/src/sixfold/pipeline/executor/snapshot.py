"""What a runner must keep to go on elsewhere as if it had never stopped.

    runner between two steps --> tensors, numbers, texts, lists, dicts (this file) --> another runner

A program that ends with its batch has nothing in flight: the state is the stages' optimizers and the random numbers.
For a program whose batches overlap it is also its position, every version of the weights with what is not trained, and
the gradients that gather. Of each microbatch in flight it is the inputs of its stage. Their forwards run again at the
load, under the random numbers of the first time.

[Note: messages at the cut] At the end of a step a rank has asked for everything that was sent to it (``periods``). Here
it waits for that, and what came is part of its own state: no message is under way between two states of one cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.compiler.compile_endless import CompiledEndless
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.compute import StageRun
from sixfold.pipeline.stage.random_state import RandomState
from sixfold.pipeline.stage.stage import Stage

__all__ = ["restored", "taken"]

State = dict[str, Any]
_FORMAT = "sixfold.pipeline 1"
_KEYS = {
    "format": str,
    "stages": list,
    "random": list,
    "optimizers": dict,
    "carried": (dict, type(None)),
}
_CARRIED = {
    "order": str,
    "autocast": list,
    "batch": int,
    "batches": int,
    "weights": dict,
    "buffers": dict,
    "slots": dict,
}
_SLOT = {"slot": int, "inputs": list, "wants": list, "graph": bool, "kwargs": dict, "random": list}
_WEIGHTS = {"made": int, "newest": dict, "older": dict, "gathered": dict, "collected": dict, "slots": dict}
_PLAIN = (Tensor, bool, int, float, str, type(None))


def taken(endless: CompiledEndless | None, stages: Mapping[int, Stage]) -> State:
    """The state; its tensors are those in use, so save or copy them before the next step.

    Raises:
        ScheduleError: keyword arguments or targets in flight hold what is no tensor, number, text, list or dict.
        PeerLost: a message that was sent did not come.
    """
    return {
        "format": _FORMAT,
        "stages": sorted(stages),
        "random": RandomState(_device(stages)).tensors(),
        "optimizers": {i: s.optimizer.state_dict() for i, s in sorted(stages.items()) if s.optimizer is not None},
        "carried": None if endless is None else _endless_state(endless),
    }


def restored(state: Any, endless: CompiledEndless | None, stages: Mapping[int, Stage]) -> None:
    """Become what ``state`` was of.

    Args:
        endless: of this runner's program, nothing of it in flight; None if its program ends with its batch.
    Raises:
        ScheduleError: it is no such state, or of other stages or of another program; nothing was changed then.
    """
    _check_keys(state, _KEYS, "the state")
    if state["format"] != _FORMAT:
        raise ScheduleError(f"the state's format is {state['format']!r}; this runner reads {_FORMAT!r}")
    if state["stages"] != sorted(stages):
        raise ScheduleError(
            f"the state is of stages {state['stages']}; here are {sorted(stages)}: each rank loads what it saved"
        )
    wanted = [i for i, stage in sorted(stages.items()) if stage.optimizer is not None]
    if sorted(state["optimizers"]) != wanted:
        raise ScheduleError(f"the state has optimizers of stages {sorted(state['optimizers'])}, the runner of {wanted}")
    if state["carried"] is not None:
        _check_endless(state["carried"], endless, stages)
    for i in wanted:
        stages[i].optimizer.load_state_dict(state["optimizers"][i])  # type: ignore[union-attr]
    if state["carried"] is not None and endless is not None:
        _load_endless(state["carried"], endless)
    RandomState.of(state["random"], _device(stages)).go_on()


# ---- batches that overlap


def _endless_state(endless: CompiledEndless) -> State:
    endless.receive()
    slots = {
        index: [_slot_state(run, k, endless) for k in sorted(endless.versions[index].reading())]
        for index, run in endless.runs.items()
    }
    return {
        "order": endless.order,
        "autocast": list(endless.goal.autocast),
        "batch": endless.batch,
        "batches": endless.batches,
        "weights": {index: versions.state() for index, versions in endless.versions.items()},
        "buffers": {index: _buffers(run.stage) for index, run in endless.runs.items()},
        "slots": slots,
    }


def _slot_state(run: StageRun, k: int, endless: CompiledEndless) -> State:
    """Of a microbatch in flight; one that only its W is left of has no inputs any more."""
    held = run.held(k)
    where = f"stage {run.index}, a microbatch in flight"
    state: State = {
        "slot": k,
        "inputs": [_plain(value, f"{where}: its input") for value in held.inputs or ()],
        "wants": [isinstance(value, Tensor) and value.requires_grad for value in held.inputs or ()],
        "graph": held.graph,
        "kwargs": {name: _plain(value, f"{where}: kwargs[{name!r}]") for name, value in run.kwargs[k].items()},
        "random": [] if held.began is None else held.began.tensors(),
        "gradients": None if held.gradients is None else [g.detach() for g in held.gradients],
    }
    if any(isinstance(value, Tensor) and value.grad_fn is not None for value in held.inputs or ()):
        raise ScheduleError(
            f"{where} has inputs with a graph of the caller's, which a state does not hold; call drain() before"
        )
    if endless.tail is not None and run.end is endless.tail:
        state["target"] = _plain(endless.tail.targets[k], f"{where}: its target")
    return state


def _load_endless(state: State, endless: CompiledEndless) -> None:
    endless.go_on_at(state["batch"], state["batches"])
    for index, run in endless.runs.items():
        endless.versions[index].load(state["weights"][index])
        for name, buffer in _buffers(run.stage).items():
            buffer.copy_(state["buffers"][index][name])
        for slot in state["slots"][index]:
            k, device = slot["slot"], run.stage.device
            run.kwargs[k] = _on(slot["kwargs"], device)
            if "target" in slot and endless.tail is not None:
                endless.tail.targets[k] = _on(slot["target"], device)
            if slot["inputs"]:
                values = zip(slot["inputs"], slot["wants"], strict=True)
                inputs = tuple(_on(v, device).requires_grad_() if wants else _on(v, device) for v, wants in values)
                began = RandomState.of(slot["random"], device)
                kept = {name: buffer.clone() for name, buffer in _buffers(run.stage).items()}
                endless.run_again(index, k, inputs, began, graph=slot["graph"])
                for name, buffer in _buffers(run.stage).items():  # the forward that counts was the first one
                    buffer.copy_(kept[name])
            if slot["gradients"] is not None:
                run.gradients[k] = tuple(_on(gradient, device) for gradient in slot["gradients"])


def _check_endless(state: Any, endless: CompiledEndless | None, stages: Mapping[int, Stage]) -> None:
    _check_keys(state, _CARRIED, "the state's 'carried'")
    if endless is None or state["order"] != endless.order:
        raise ScheduleError(
            "the state is of another program: its batches have another order or size than this runner's; "
            f"make the runner with a program that continues as\n{state['order']}"
        )
    if state["autocast"] != list(endless.goal.autocast):
        raise ScheduleError(
            f"the state was taken with autocast on for {state['autocast']}, here it is for "
            f"{list(endless.goal.autocast)}; load it within the same torch.autocast as step is called"
        )
    for name in ("weights", "buffers", "slots"):
        if sorted(state[name]) != sorted(stages):
            raise ScheduleError(f"the state's {name!r} are of stages {sorted(state[name])}; here are {sorted(stages)}")
    for index, stage in stages.items():
        weights = state["weights"][index]
        _check_keys(weights, _WEIGHTS, f"the weights of stage {index}")
        endless.versions[index].check(weights)
        if {n: b.shape for n, b in _buffers(stage).items()} != {n: b.shape for n, b in state["buffers"][index].items()}:
            raise ScheduleError(
                f"stage {index}: the state has buffers {list(state['buffers'][index])}, of other shapes"
            )
        for slot in state["slots"][index]:
            _check_keys(slot, _SLOT, f"a microbatch of stage {index}")
        if sorted(slot["slot"] for slot in state["slots"][index]) != sorted(weights["slots"]):
            raise ScheduleError(f"stage {index}: the state lacks microbatches that its weight versions are kept for")


# ---- values


def _check_keys(state: Any, wanted: Mapping[str, Any], what: str) -> None:
    if not isinstance(state, Mapping):
        raise ScheduleError(f"{what} is a {type(state).__name__}; it is a dict that state_dict() made")
    for key, kind in wanted.items():
        if key not in state:
            raise ScheduleError(f"{what} has no {key!r}; it was not made by state_dict(), or not all of it was kept")
        if not isinstance(state[key], kind):
            raise ScheduleError(f"{what}: {key!r} is a {type(state[key]).__name__}, which state_dict() does not make")


def _buffers(stage: Stage) -> dict[str, Tensor]:
    """Buffers, and parameters that are not trained."""
    if stage.module is None:
        return {}
    frozen = {name: p.data for name, p in stage.module.named_parameters() if not p.requires_grad}
    # ``data`` has a version counter of its own: a graph that holds a buffer does not see its value put back.
    return frozen | {name: buffer.data for name, buffer in stage.module.named_buffers()}


def _device(stages: Mapping[int, Stage]) -> torch.device | None:
    return next((stage.device for _, stage in sorted(stages.items()) if stage.device is not None), None)


def _plain(value: Any, what: str) -> Any:
    """``value`` with its tensors detached."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        made = [_plain(part, what) for part in value]
        return made if isinstance(value, list) else tuple(made)
    if type(value) is dict:
        return {key: _plain(part, what) for key, part in value.items()}
    raise ScheduleError(
        f"{what} holds a {type(value).__name__}; a state holds tensors, numbers, texts, lists and dicts: call drain() "
        "before state_dict()"
    )


def _on(value: Any, device: torch.device | None) -> Any:
    """A copy of ``value`` with its tensors on ``device``."""
    if isinstance(value, Tensor):
        return value.detach().to(device=device or value.device, copy=True)
    if isinstance(value, list | tuple):
        return type(value)(_on(part, device) for part in value)
    if isinstance(value, dict):
        return {key: _on(part, device) for key, part in value.items()}
    return value
