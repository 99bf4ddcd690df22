"""What a rank really holds: bytes of fsdp and the optimizer after a step, and what autograd saved in a forward."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from run_helpers import world_of
from torch.utils._python_dispatch import TorchDispatchMode

from sixfold.dist_ckpt import MemoryTier
from sixfold.gpt import TrainConfig
from sixfold.gpt.checkpoints.training_state import sharded_state
from sixfold.gpt.config.rules import check_world
from sixfold.gpt.data.token_stream import Microbatch
from sixfold.gpt.engine.rank_model import RankModel, build_rank
from sixfold.gpt.engine.step import train_step
from sixfold.gpt.engine.weight_versions import VersionedModel
from sixfold.gpt.parallel.mesh import make_mesh
from sixfold.gpt.parallel.sequence_parts import WHOLE_ROWS, SequencePart, documents_here


def microbatch_of(config: TrainConfig, seed: int, part: SequencePart = WHOLE_ROWS) -> Microbatch:
    """Random tokens in rows that hold two documents each, in the form in which a TokenStream gives them to ``part``."""
    b, s = config.train.micro_batch_size, config.data.seq_length
    tokens = torch.randint(0, config.model.vocab_size, (b, s), generator=torch.Generator().manual_seed(seed))

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(part.cut(whole.numpy()))

    mine = cut(tokens)
    kwargs: dict[str, Any] = {"labels": cut(tokens.roll(-1, 1)), "loss_mask": torch.ones(mine.shape)}
    if config.data.document_mask:
        starts = [row * s + at for row in range(b) for at in (0, s // 3)]
        bounds = torch.tensor([*starts, b * s], dtype=torch.int32)
        alone = part.size == 1
        kwargs["cu_seqlens"] = bounds if alone else documents_here(bounds.numpy(), b, part).to(torch.from_numpy)
        kwargs["position_ids"] = cut(torch.cat((torch.arange(s // 3), torch.arange(s - s // 3))).repeat(b, 1))
    if config.train.hidden_dropout:
        kwargs["row_numbers"] = torch.arange(b)
    return Microbatch(tokens=mine, kwargs=kwargs, targets=float(mine.numel()))


class Saved:
    """Storages that autograd saves, each once, but for those of parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._kept: list[torch.Tensor] = []  # alive, so that no address comes twice

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """For ``saved_tensors_hooks``."""
        self._kept.append(tensor)
        return tensor

    @property
    def nbytes(self) -> int:
        """Of all storages."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._kept}
        return sum(nbytes for at, nbytes in storages.items() if at not in self._own)


class Sends(TorchDispatchMode):
    """Bytes that this rank sends over tp, over cp and among experts, as rings send them. A context manager.

    ``(n - 1) / n`` of what a gather leaves or a scatter takes, twice that of an all-reduce; of an all-to-all of rows
    those for others, of a message all of it. Counts of rows (integers) are left out.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        axes = mesh.axes
        self.axes = {axis.group: name for name, axis in (("cp", axes.cp), ("tp", axes.tp)) if axis.group is not None}
        self._exchange = axes.exchange.group
        self.idle = not self.axes and self._exchange is None
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See every operator, collectives among them."""
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in _SENT:
            boxed = next(one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one))
            group = dist.ProcessGroup.unbox(boxed)
            exchanged = name == "alltoall_base_" and group == self._exchange
            axis = "ep" if exchanged else self.axes.get(group)
            if axis is not None:
                self.bytes[axis] += _SENT[name](group, args)
        return func(*args, **(kwargs or {}))


def _nbytes_of(given: Any) -> int:
    tensors = [given] if isinstance(given, torch.Tensor) else given
    return sum(one.nbytes for one in tensors)


def _rows_for_others(group: Any, args: Any) -> float:
    given, splits = args[1], args[4]
    if not given.is_floating_point():
        return 0.0
    if not splits:
        return given.nbytes * (1 - 1 / group.size())
    return given.nbytes * (1 - splits[group.rank()] / max(sum(splits), 1))


_SENT: dict[str, Callable[[Any, Any], float]] = {
    "_allgather_base_": lambda group, args: args[0].nbytes * (1 - 1 / group.size()),
    "_reduce_scatter_base_": lambda group, args: args[1].nbytes * (1 - 1 / group.size()),
    "allreduce_": lambda group, args: _nbytes_of(args[0]) * 2 * (1 - 1 / group.size()),
    "alltoall_base_": _rows_for_others,
    "send": lambda group, args: _nbytes_of(args[0]),
}


def measured_rank(rank: int, ranks: int, texts: list[str]) -> list[dict[str, Any]]:
    """Bytes of this rank for each configuration; activations are those of a microbatch."""
    return [_measured(TrainConfig.from_text(text), world_of(rank, ranks)) for text in texts]


def _measured(config: TrainConfig, world: Any) -> dict[str, Any]:
    mesh = make_mesh(check_world(config, world.size), world, world.device, 60.0)
    found = build_rank(config, mesh, world)
    count = config.train.global_batch_size // (config.train.micro_batch_size * mesh.dp)
    part = SequencePart(mesh.axes.cp.rank, mesh.axes.cp.size)
    batch = [microbatch_of(config, count * mesh.dp_rank + number, part) for number in range(count)]
    saved, sends = Saved(found.model.module), Sends(mesh)
    watched = nullcontext() if sends.idle else sends  # every operator passes it
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor), watched:
        train_step(found, batch, 1e-3)
    activations = saved.nbytes // count
    train_step(found, batch, 1e-3)
    held = found.model.report()["bytes"]
    moments = [
        t.untyped_storage().nbytes()
        for state in found.optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor) and t.dim()
    ]
    places = {"pp_rank": mesh.pp_rank, "data_rank": mesh.data_rank}
    sent = {f"{axis}_sent": round(sends.bytes[axis]) for axis in ("tp", "cp", "ep")}
    return {**held, **places, **sent, "moments": sum(moments), "activations": activations, "state": _state_bytes(found)}


def _state_bytes(rank: RankModel) -> dict[str, int]:
    """Bytes of each whole tensor of which this rank has a part to save."""
    state = sharded_state(rank).items()
    return {key: math.prod(one.global_shape) * one.dtype.itemsize for key, one in state}


def stated_by_tier(rank: int, ranks: int, text: str) -> dict[str, int]:
    """What a memory tier states for each domain, where each rank is one and has a copy in another."""
    config, world = TrainConfig.from_text(text), world_of(rank, ranks)
    mesh = make_mesh(check_world(config, world.size), world, world.device, 60.0)
    found = build_rank(config, mesh, world)
    found.materialize_state()
    with tempfile.TemporaryDirectory() as folder:
        tier = MemoryTier(folder, "plan", domain=f"rank {rank}", replicas=1, group=mesh.control)
        needed = tier.needed_bytes(dict(sharded_state(found)))
        tier.discard()
    return needed


class Live:
    """Bytes of storages that autograd holds now, each once, but for those of parameters; ``most`` there ever were."""

    def __init__(self, own: set[int]) -> None:
        self._own, self._held, self.now, self.most = own, Counter[int](), 0, 0

    def pack(self, tensor: torch.Tensor) -> Held:
        """For ``saved_tensors_hooks``."""
        return Held(self, tensor.detach())

    def count(self, storage: torch.UntypedStorage, by: int) -> None:
        """Another one holds the storage, or one less."""
        at = storage.data_ptr()
        self._held[at] += by
        if at not in self._own and self._held[at] == max(by, 0):
            self.now += by * storage.nbytes()
            self.most = max(self.most, self.now)


class Held:
    """What a graph holds of a tensor, until the graph lets go of it."""

    def __init__(self, live: Live, tensor: torch.Tensor) -> None:
        self.tensor, self._live = tensor, live
        live.count(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._live.count(self.tensor.untyped_storage(), -1)


def rank_in_flight(rank: int, ranks: int, texts: list[str]) -> list[dict[str, int]]:
    """Of each configuration the most bytes that this rank's graphs held in a step, and those of versions of weights."""
    return [_in_flight(TrainConfig.from_text(text), world_of(rank, ranks)) for text in texts]


def _in_flight(config: TrainConfig, world: Any) -> dict[str, int]:
    mesh = make_mesh(check_world(config, world.size), world, world.device, 60.0)
    found = build_rank(config, mesh, world)
    count = config.train.global_batch_size // (config.train.micro_batch_size * mesh.dp)
    gradients = [0]
    versions = found.model.weights.values() if isinstance(found.model, VersionedModel) else ()
    for weights in versions:
        weights.step = _watched(weights, gradients)
    steps = 1 if not versions else 3 * world.size
    batches = [[microbatch_of(config, count * step + n) for n in range(count)] for step in range(steps)]
    live = Live({p.untyped_storage().data_ptr() for p in found.model.module.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda held: held.tensor):
        for batch in batches:
            train_step(found, batch, 1e-3)
    if not versions:
        return {"activations": live.most}
    carried = found.runner.state_dict()["carried"]["weights"].values()
    leaves = [leaf for one in carried for kept in (one["newest"], *one["older"].values()) for leaf in kept.values()]
    moments = [t for state in found.optimizer.state.values() for t in state.values() if t.dim()]
    found.settle()
    return {
        "main_weights": _nbytes([main for _, main in found.model.main_parameters()]),
        "moments": _nbytes(moments),
        "newest": _nbytes(found.model.module.parameters()),
        "versions": _nbytes(leaves),
        "gradients": gradients[0],
    }


def _watched(weights: Any, most: list[int]) -> Callable[[], None]:
    plain = weights.step

    def step() -> None:
        most[0] = max(most[0], _nbytes([m.grad for m in weights.mains.values()]))
        plain()

    return step


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
