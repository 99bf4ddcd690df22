"""Training with versions of the weights: the stages of a rank, whole, under pipedream and pipedream_2bw.

    rank_model.py --> VersionedModel (this file) in fsdp's place --> StageWeights: a Stage's data_parallel and optimizer
    step.py --> run_batch (this file): one batch; optimizers step inside the program

[Note: who owns what] sixfold.pipeline keeps versions of the compute weights (the module's parameters). Main weights in
main precision, sums of gradients and the optimizer of each stage are here, whole on every data-parallel rank. A
gradient is handed over when a microbatch's backward is done, and added in float32. REDUCE_GRAD sums it over the
data-parallel ranks and divides it by the targets of its own batch. STEP applies it with the rate of its own batch,
because earlier stages are a batch behind.

[Note: drained at a save] A save and, with 2bw, an evaluation begin with ``drain``. With 2bw batch t reads W(t - 1)
drained or not, so that changes no bit; the older version goes into the checkpoint. With pipedream the pipeline fills
anew behind a save: a resumed run is the run that saved there, bit for bit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sixfold.fsdp import StateRecord
from sixfold.gpt.engine.optimizer import Optimizers, build_optimizer
from sixfold.gpt.errors import NoTargetsError, TrainError
from sixfold.gpt.parallel.lost_ranks import group_collective
from sixfold.pipeline import ScheduleError
from sixfold.pipeline.proof.endless import endless

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.data.token_stream import Microbatch
    from sixfold.gpt.engine.rank_model import RankModel
    from sixfold.gpt.parallel.mesh import RankMesh
    from sixfold.pipeline import PipelineRunner, Program, StepResult

Name = str  # canonical


class NotFiniteError(TrainError):
    """A gradient that is not finite, found before the STEP of its stage.

    Attributes:
        rank: of the pipeline. where: canonical name of the module.
    """

    def __init__(self, message: str, *, rank: int, where: str) -> None:
        super().__init__(message)
        self.rank, self.where = rank, where


_NOT_FINITE = re.compile(r"rank (\d+) .*the gradient of (\S+) \(stage \d+\) is not finite")


class Batches:
    """What the batches in flight need when their STEP comes: targets and learning rate, by number."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, float]] = {}
        self.next = 0

    def add(self, targets: Tensor, rate: float) -> None:
        """Another batch begins."""
        self._of[self.next] = targets, rate
        self.next += 1

    def __getitem__(self, number: int) -> tuple[Tensor, float]:
        return self._of[number]

    def forget_before(self, number: int) -> None:
        """No stage needs them any more."""
        for old in [one for one in self._of if one < number]:
            del self._of[old]


class StageWeights:
    """Main weights of one stage, their gradients' sums and their optimizer; ``data_parallel`` of its ``Stage``.

    ``step`` and ``zero_grad`` make it the ``Stage``'s optimizer too.
    """

    def __init__(
        self, stage: int, module: nn.Module, config: TrainConfig, data: dist.ProcessGroup | None, batches: Batches
    ) -> None:
        self.stage, self._module, self._data, self._batches = stage, module, data, batches
        self._in_rank_order = config.grad_sum == "rank_order"
        self.mains: dict[Name, nn.Parameter] = {
            name: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
            for name, parameter in module.named_parameters()
        }
        self._main_of = {id(p): self.mains[name] for name, p in module.named_parameters()}
        self._sums: dict[int, Tensor] = {}
        self.optimizers = build_optimizer(config.optimizer, self.mains.items())
        self.waited_s = 0.0  # for other data-parallel ranks
        self.done = 0  # batches that were reduced, of those of ``batches``

    # ---- data_parallel

    def unshard(self) -> None:
        """Weights are whole."""

    def reshard(self) -> None:
        """Weights are whole."""

    def before_last_backward(self) -> None:
        """Nothing overlaps with the last backward."""

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of a microbatch, in float32."""
        main = self._main_of[id(parameter)]
        if id(main) in self._sums:
            self._sums[id(main)].add_(gradient)
        else:
            self._sums[id(main)] = gradient.to(torch.float32, copy=True)

    def reduce_grad(self) -> None:
        """Sum over the data-parallel ranks, and divide by the targets of the batch."""
        began = time.perf_counter()
        targets, _ = self._batches[self.done]
        for main in self.mains.values():
            total = self._sums.pop(id(main), None)
            total = torch.zeros_like(main) if total is None else total
            main.grad = self._summed(total).div_(targets.to(torch.float32))
        self.done += 1
        self.waited_s += time.perf_counter() - began if self._data is not None else 0.0

    def _summed(self, mine: Tensor) -> Tensor:
        if self._data is None:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self._data.size() if self._in_rank_order else 0)]
        with group_collective(self._data, "sum of a stage's gradients over dp and cp"):
            if not parts:
                dist.all_reduce(mine, group=self._data)
                return mine
            dist.all_gather(parts, mine.contiguous(), group=self._data)
        for part in parts[1:]:
            parts[0].add_(part)
        return parts[0]

    # ---- optimizer

    def step(self) -> None:
        """Update main weights, and write compute weights anew.

        Raises:
            TrainError: a gradient is not finite, or nothing is a target; the stage's weights are those before it.
        """
        targets, rate = self._batches[self.done - 1]
        gradients = {name: main.grad for name, main in self.mains.items() if main.grad is not None}
        finite = [gradient.isfinite().all() for gradient in gradients.values()]
        if finite and not bool(torch.stack(finite).all()):  # the one read of the host
            if not bool(targets):  # 0 / 0
                raise TrainError(NoTargetsError.TEXT)
            name = [name for name, one in zip(gradients, finite, strict=True) if not bool(one)][-1]
            raise TrainError(
                f"the gradient of {name} (stage {self.stage}) is not finite; the weights of this stage are those "
                "before it"
            )
        for group in self.optimizers.param_groups:
            group["lr"] = rate
        self.optimizers.step()
        self.refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Main gradients are used once."""
        for main in self.mains.values():
            main.grad = None

    def state_dict(self) -> dict[str, Any]:
        """For the runner's: nothing; ``VersionedModel.state_records`` has it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of ``state_dict``."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute weights become those that main weights say."""
        for name, parameter in self._module.named_parameters():
            parameter.data.copy_(self.mains[name])


class VersionedModel:
    """The stages of a rank, in the place of fsdp's wrapper: what checkpoints and metrics ask of it.

    Attributes:
        module: the rank's container, keyed by stage.
        weights: by stage.
        delayed: 2bw: a batch reads the version before the newest, which a checkpoint therefore holds too.
    """

    def __init__(self, module: nn.ModuleDict, config: TrainConfig, mesh: RankMesh) -> None:
        self.module = module
        self.delayed = config.parallel.schedule == "pipedream_2bw"
        self.batches = Batches()
        self._replica = mesh.data_rank
        self.weights = {
            int(stage): StageWeights(int(stage), one, config, mesh.data, self.batches) for stage, one in module.items()
        }
        self.older: dict[str, Tensor] = {}  # W(t - 1) by the container's names, from or for a checkpoint
        self.microbatches = 0  # of the batches in flight

    @property
    def optimizer(self) -> Optimizers:
        """All stages' optimizers."""
        return Optimizers([part for one in self.weights.values() for part in one.optimizers.parts])

    @property
    def waited_s(self) -> float:
        """Seconds in sums over data-parallel ranks."""
        return sum(one.waited_s for one in self.weights.values())

    def main_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As fsdp's: names of the container."""
        for stage, one in self.weights.items():
            for name, main in one.mains.items():
                yield f"{stage}.{name}", main

    def state_records(self, optimizer: torch.optim.Optimizer | None = None) -> list[StateRecord]:
        """As fsdp's: the newest version; ``older_records`` has the other of 2bw."""
        found = []
        for name, main in self.main_parameters():
            state = {} if optimizer is None else optimizer.state.get(main, {})
            tensors = {"param": main.detach()} | {
                key: value for key, value in state.items() if torch.is_tensor(value) and value.shape == main.shape
            }
            found += [self._record(name, key, tensor) for key, tensor in tensors.items()]
        return found

    def older_records(self) -> list[StateRecord]:
        """The version before the newest, after a batch of 2bw."""
        return [self._record(name, "older", tensor) for name, tensor in self.older.items()]

    def _record(self, name: str, key: str, tensor: Tensor) -> StateRecord:
        return StateRecord(
            name=name,
            key=key,
            global_shape=tuple(tensor.shape),
            start=0,
            stop=tensor.numel(),
            tensor=tensor.detach().view(-1),
            replica=self._replica,
        )

    def materialize_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state as its first step would, without a step."""
        for group in optimizer.param_groups:
            for main in group["params"]:
                if main in optimizer.state:
                    continue
                if isinstance(optimizer, torch.optim.AdamW):
                    step = torch.zeros((), dtype=torch.float32, device=main.device)
                    moments = {key: torch.zeros_like(main) for key in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[main] = {"step": step, **{key: m.detach() for key, m in moments.items()}}
                else:
                    optimizer.state[main] = {"momentum_buffer": torch.zeros_like(main).detach()}

    def refresh(self) -> None:
        """Main weights were written from outside."""
        for one in self.weights.values():
            one.refresh()

    def zero_grad(self) -> None:
        """Gradients are the program's; nothing outlives a STEP."""

    def check(self) -> None:
        """Nothing is received behind the host's back."""

    # ---- the runner's side

    def drain(self, runner: PipelineRunner) -> None:
        """Run what is in flight; with 2bw keep the version that the next batch reads."""
        if not self.batches.next:
            return
        runner.drain()
        if self.delayed:
            carried = runner.state_dict()["carried"]
            for stage, weights in carried["weights"].items():
                (older,) = weights["older"].values()
                self.older |= {f"{stage}.{name}": tensor.detach() for name, tensor in older.items()}

    def expect_older(self) -> None:
        """Make room for the older version of a checkpoint."""
        for stage, one in self.module.items():
            self.older |= {f"{stage}.{name}": torch.empty_like(p) for name, p in one.named_parameters()}

    def go_on(self, runner: PipelineRunner, program: Program, step: int) -> None:
        """The next batch reads the older version that a checkpoint of ``step`` held."""
        found = endless(program)
        assert found is not None, f"{program.name} keeps versions"
        weights = {
            stage: {
                "made": step,
                "newest": {name: p.detach() for name, p in one._module.named_parameters()},
                "older": {step - 1: {name: self.older[f"{stage}.{name}"] for name in one.mains}},
                "gathered": {},
                "collected": {},
                "slots": {},
            }
            for stage, one in self.weights.items()
        }
        state = runner.state_dict()
        state["carried"] = {
            "order": str(found.unrolled(len(found.steps) + 1)),
            "autocast": [],
            "batch": step,
            "batches": 0,
            "weights": weights,
            "buffers": {stage: {} for stage in weights},
            "slots": {stage: [] for stage in weights},
        }
        runner.load_state_dict(state)


def run_batch(
    rank: RankModel, model: VersionedModel, batch: Sequence[Microbatch], rate: float, targets: Tensor
) -> tuple[StepResult, Program]:
    """One batch, with the losses of its microbatches where the last stage is. Earlier stages hold backwards of it.

    Args:
        targets: of the whole batch, over all data-parallel ranks.
    Raises:
        NotFiniteError: a gradient, of this batch or of one before it. NoTargetsError: the batch has none.
    """
    if model.microbatches not in (0, len(batch)):
        model.drain(rank.runner)  # other microbatches: another program
    model.microbatches = len(batch)
    model.batches.add(targets, rate)
    program = rank.program(len(batch))
    try:
        result = rank.run_program(batch, program)
    except ScheduleError as error:  # on all ranks of the pipeline, with the text of the one
        if NoTargetsError.TEXT in str(error):
            raise NoTargetsError(rank.config.data.eod_mask_loss) from error
        if (found := _NOT_FINITE.search(str(error))) is None:
            raise
        raise NotFiniteError(f"{error}", rank=int(found[1]), where=found[2].rpartition(".")[0]) from error
    model.batches.forget_before(min((one.done for one in model.weights.values()), default=model.batches.next) - 1)
    return result, program
