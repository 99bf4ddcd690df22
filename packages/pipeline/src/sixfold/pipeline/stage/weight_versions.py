"""The weights of one stage in versions, for programs whose batches overlap.

    F, B, I, W, STEP of a slot --> the version that it reads (this file) --> the same, run with that version's leaves

[Note: versions] A version is a set of leaves, one for each trained parameter, that share the storage which the
parameters had when it was the newest. Every action of a microbatch runs with its version's leaves in the place of the
module's parameters. So does the backward, in which a checkpointed module runs its forward again. (That is what
``torch.func.functional_call`` does in 2.6 microseconds a parameter; places found once take 0.1.) Gradients gather on
the leaves. REDUCE_GRAD puts those of the batch on the parameters. STEP forgets what nobody will read, gives the
parameters a copy of their storage where the old one is still read, and calls the optimizer. So the parameters always
are the newest version, and the same objects that the optimizer knows. No graph sees an in-place step: leaves have
version counters of their own.

2BW: the forwards of batch t read W(max(t - 1, 0)), drained or not. PipeDream: a microbatch reads what was newest at its
forward until its last backward. Buffers, and parameters that are not trained, are the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.program import Weights
from sixfold.pipeline.stage.stage import Stage, check_made

__all__ = ["Versions"]

_AGAIN = "the next batch reads the weights before: make a new runner to begin with these"

Place = Callable[[nn.Parameter], object]  # puts a parameter where a module looks for it


class _Version:
    """W(number).

    Attributes:
        leaves: by the name that the module gives the parameter; a parameter of two names has one leaf.
        put: every place of a parameter, and its leaf.
    """

    def __init__(self, number: int, leaves: dict[str, nn.Parameter], places: list[tuple[Place, str]]) -> None:
        self.number, self.leaves = number, leaves
        self.put = [(place, leaves[name]) for place, name in places if name in leaves]


class Versions:
    """Which weights each slot of one stage reads.

    Args:
        weights: of the program; flushed ones need no versions.
    Attributes:
        made: STEPs that the stage has taken: the parameters are W(made).
    Raises:
        ScheduleError: the stage has tied parameters, lazy layers that have not run yet, or a ``data_parallel`` whose
            ``call`` runs the module.
    """

    def __init__(self, stage: Stage, weights: Weights) -> None:
        index = stage.index
        if getattr(stage, "tied", None):
            raise ScheduleError(f"stage {index} has tied parameters; weights: {weights} takes stages without")
        handle = stage.data_parallel
        if getattr(handle, "call", None) is not None:
            raise ScheduleError(
                f"stage {index}: data_parallel is a {type(handle).__name__} whose call runs the module with its "
                f"newest weights only; weights: {weights} takes stages with whole parameters and no call"
            )
        if stage.module is not None:
            check_made(stage.module, f"stage {index}")
        self._stage, self._delayed = stage, weights is Weights.TWO_BW
        self._module = nn.Module() if stage.module is None else stage.module
        self._places = _places(self._module)
        self._accumulate: Callable[[nn.Parameter, Tensor], object] | None = getattr(handle, "accumulate", None)
        self.made = 0
        self._batch = 0
        self._newest: _Version | None = None
        self._older: dict[int, _Version] = {}
        self._of: dict[int, _Version] = {}  # slot in flight -> what it reads
        self._gathering: _Version | None = None  # has the gradients of the batch whose STEP is to come
        self._seal: list[tuple[int, int, int, bool]] | None = None

    # ---- what the actions call

    def begin(self, batch: int) -> None:
        """The forwards to come are of ``batch``.

        Raises:
            ScheduleError: a parameter was changed by somebody else while microbatches are in flight, or since a batch
                whose weights the next one reads.
        """
        self._batch = batch
        seal = self._sealed()
        if self._seal is not None and seal != self._seal and (self._of or (self._delayed and self.made)):
            names = [name for name, _ in self._module.named_parameters()]
            changed = next((n for n, a, b in zip(names, seal, self._seal, strict=False) if a != b), names[-1])
            raise ScheduleError(
                f"stage {self._stage.index}: {changed} was written, replaced, frozen or unfrozen between two steps; "
                + ("microbatches in flight read it: call drain() before" if self._of and not self._delayed else _AGAIN)
            )
        if seal != self._seal:
            self._newest, self._places = None, _places(self._module)
        self._seal = seal

    def forward(self, call: Callable[[int], object]) -> Callable[[int], None]:
        """F of a slot, which from here on reads the version that is due."""

        def run(k: int) -> None:
            self._of[k] = version = self._due()
            self._run(version, call, k)

        return run

    def under(self, call: Callable[[int], object]) -> Callable[[int], None]:
        """RECOMPUTE, or I that leaves a W, of a slot."""

        def run(k: int) -> None:
            self._run(self._gather_on(self._of[k]), call, k)

        return run

    def last(self, call: Callable[[int], object]) -> Callable[[int], None]:
        """B or W of a slot, which then reads no version any more."""
        under = self.under(call)

        def run(k: int) -> None:
            under(k)
            version = self._of.pop(k)
            if self._accumulate is not None:
                self._hand_over(version)

        return run

    def collect(self) -> None:
        """REDUCE_GRAD: the gradients of the batch go to the parameters.

        Raises:
            ScheduleError: a parameter of the optimizer has a gradient already, which no STEP of this runner left there.
        """
        version, self._gathering = self._gathering, None
        groups: Any = getattr(getattr(self._stage, "optimizer", None), "param_groups", None)
        stepped = self._module.parameters() if groups is None else (p for group in groups for p in group["params"])
        own = {id(p) for p in stepped}  # gradients of others add up until somebody takes them
        for name, parameter in self._trained().items():
            if parameter.grad is not None and self._accumulate is None and id(parameter) in own:
                raise ScheduleError(
                    f"stage {self._stage.index}: {name} has a gradient that this runner did not make: of a backward of "
                    "one's own, or because the module reaches it other than as its attribute; clear it before step()"
                )
            if version is not None and (leaf := version.leaves.get(name)) is not None and leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad + leaf.grad
                leaf.grad = None

    def step(self) -> None:
        """STEP: W(made) becomes W(made + 1)."""
        for number in [n for n in self._older if not self._is_read(self._older[n])]:
            del self._older[number]
        if self._delayed or (self._newest is not None and self._is_read(self._newest)):
            self._older[self.made] = self._make_newest()  # the next batch of 2BW reads it, though no leaf was made yet
            for parameter in self._trained().values():
                parameter.data = parameter.data.clone()
        self._newest = None
        optimizer = getattr(self._stage, "optimizer", None)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.made += 1
        self._seal = self._sealed()

    def reading(self) -> set[int]:
        """Slots in flight."""
        return set(self._of)

    def drop(self) -> None:
        """Nothing is in flight any more: a step has failed."""
        self._of.clear()
        self._gathering = None

    # ---- state

    def state(self) -> dict[str, Any]:
        """Tensors, numbers, dicts: every version, the gradients that gather, what each slot reads. Aliases."""
        gathered = {} if self._gathering is None else self._gathering.leaves
        return {
            "made": self.made,
            "newest": {name: p.detach() for name, p in self._trained().items()},
            "older": {n: {name: leaf.detach() for name, leaf in v.leaves.items()} for n, v in self._older.items()},
            "gathered": {name: leaf.grad for name, leaf in gathered.items() if leaf.grad is not None},
            "collected": {name: p.grad for name, p in self._trained().items() if p.grad is not None},
            "slots": {slot: version.number for slot, version in self._of.items()},
        }

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that is not of this stage."""
        trained = self._trained()
        for weights in (state["newest"], *state["older"].values()):
            if list(weights) != list(trained) or any(weights[n].shape != p.shape for n, p in trained.items()):
                raise ScheduleError(
                    f"stage {self._stage.index}: the state has weights {list(weights)}, the module {list(trained)}; "
                    "their names and shapes are equal"
                )

    def load(self, state: dict[str, Any]) -> None:
        """Become what ``state`` was of; the graphs of the slots are the caller's to make again.

        Raises:
            ScheduleError: it is not of this stage.
        """
        self.check(state)
        self._places = _places(self._module)
        trained = self._trained()
        self.made, self._newest, self._gathering = state["made"], None, None
        for name, parameter in trained.items():
            parameter.data.copy_(state["newest"][name])
            collected = state["collected"].get(name)
            parameter.grad = None if collected is None else collected.to(parameter.device, copy=True)
        self._older = {
            number: self._version(number, {n: weights[n].to(p.device, copy=True) for n, p in trained.items()})
            for number, weights in state["older"].items()
        }
        newest = self._make_newest()
        self._of = {slot: self._older.get(number, newest) for slot, number in state["slots"].items()}
        if state["gathered"]:
            self._gathering = newest  # whichever: they move to the leaves of the next backward
            for name, gradient in state["gathered"].items():
                newest.leaves[name].grad = gradient.to(trained[name].device, copy=True)
        self._seal = self._sealed()

    # ---- versions

    def _due(self) -> _Version:
        """What a forward reads now."""
        number = max(self._batch - 1, 0) if self._delayed else self.made
        version = self._make_newest() if number == self.made else self._older.get(number)
        assert version is not None, f"stage {self._stage.index}: W({number}) is gone at W({self.made})"
        return version

    def _make_newest(self) -> _Version:
        if self._newest is None:
            self._refuse_hooks()
            self._newest = self._version(self.made, {name: p.data for name, p in self._trained().items()})
        return self._newest

    def _version(self, number: int, weights: dict[str, Tensor]) -> _Version:
        trained = self._trained()
        leaves: dict[str, nn.Parameter] = {}
        for name, weight in weights.items():
            # ``data`` has a version counter of its own, which the optimizer's in-place steps do not move.
            leaves[name] = leaf = nn.Parameter(weight)
            leaf.__dict__.update(trained[name].__dict__)
        return _Version(number, leaves, [(place, name) for place, name, _ in self._places])

    def _run(self, version: _Version, call: Callable[[int], object], k: int) -> None:
        """``call`` with the version's leaves in the place of the parameters."""
        try:
            for place, leaf in version.put:
                place(leaf)
            call(k)
        finally:
            for place, _, parameter in self._places:
                place(parameter)

    def _is_read(self, version: _Version) -> bool:
        """Whether a slot in flight reads it, or the forwards to come do."""
        return (self._delayed and version.number >= self.made) or any(v is version for v in self._of.values())

    def _gather_on(self, version: _Version) -> _Version:
        """Move the gradients of the batch to these leaves, so that all are added up in the order of microbatches."""
        before, self._gathering = self._gathering, version
        if before is not None and before is not version:
            for name, leaf in before.leaves.items():
                version.leaves[name].grad, leaf.grad = leaf.grad, None
        return version

    def _hand_over(self, version: _Version) -> None:
        assert self._accumulate is not None, "only a data_parallel that accumulates gets gradients handed over"
        trained = self._trained()
        for name, leaf in version.leaves.items():
            if leaf.grad is not None:
                self._accumulate(trained[name], leaf.grad)
                leaf.grad = None

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def _sealed(self) -> list[tuple[int, int, int, bool]]:
        return [(id(p), p._version, p.data_ptr(), p.requires_grad) for p in self._module.parameters()]

    def _refuse_hooks(self) -> None:
        for name, parameter in self._trained().items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ScheduleError(
                    f"stage {self._stage.index}: {name} has a gradient hook, which would not run: gradients are "
                    "added to older versions of the weights; use a hook of the module, or change gradients in the "
                    "optimizer"
                )


def _places(module: nn.Module) -> list[tuple[Place, str, nn.Parameter]]:
    """Where parameters are looked for, the first name of the one there, and it."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    found: list[tuple[Place, str, nn.Parameter]] = []
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            place: Place = partial(part._parameters.__setitem__, key)
            if type(part).__setattr__ is not nn.Module.__setattr__:  # keeps them elsewhere too, as torch's LSTM does
                place = partial(setattr, part, key)
            found.append((place, first[id(parameter)], parameter))
    return found
