"""Random programs of training: a net, options of sharding, and what is done step by step. One seed, one value.

    draw (this file) --> Program --> fsdp_random_run_helpers.py (sharded, on ranks)       \\
                                 --> fsdp_random_oracle_helpers.py (plain torch, one process)  --> the same bits

Imports nothing of sixfold. Whatever is drawn is legal by the README: an error is a finding as much as a wrong bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from fsdp_random_net_helpers import BlockSpec, Net, NetSpec

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
Op = tuple[Any, ...]


# ---- the value


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of the wrapper, by their names there where they are plain values."""

    strategy: str
    units: tuple[str, ...]
    root_units: bool
    gathered: str | int  # an int: percent between what is needed in any case, and all
    prefetch: int | None
    reduce_buffers: int
    bucket: int | None
    merge: int | None
    share: bool
    offload: bool
    align: int
    grains: int  # seed of each parameter's granularity; 0: "element"
    grad_reduce: str
    checks: str
    initial: str
    bare: bool  # called as net(x), kept alive by the module


@dataclass(frozen=True, kw_only=True)
class Program:
    """One random training. ``replicas``: of a 2-D mesh; 0: no mesh, the group is given."""

    seed: int
    ranks: int
    replicas: int
    net: NetSpec
    sharding: Sharding
    precision: str
    fp8: tuple[str, ...]
    grad_sum: str
    divisor: float | None
    optimizer: str
    steps: tuple[tuple[Op, ...], ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed} ranks {self.ranks} replicas {self.replicas} {self.precision} {self.optimizer}"]
        lines += [f"  fp8 {self.fp8} {self.grad_sum} / {self.divisor}", f"  {self.net}", f"  {self.sharding}"]
        return "\n".join([*lines, *(f"  step {at}: {ops}" for at, ops in enumerate(self.steps))])


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16 wire": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "bf16 grads": {"grad_dtype": torch.bfloat16},
}


# ---- which programs


@dataclass
class _Draw:
    random: Random
    options: dict[str, Any] = field(default_factory=dict)

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)


def draw(seed: int, ranks: int) -> Program:
    """The program of ``seed``."""
    d = _Draw(Random(f"{seed} {ranks}"))
    driven = d.one(None, None, None, "fused", "split")
    optimizer = d.one("adamw", "adamw", "sgd", "adagrad", "two", "muon", "muon")
    precision = d.one("fp32", "fp32", *PRECISIONS)
    replicas = 0 if ranks == 1 else d.one(0, 0, *(n for n in range(1, ranks + 1) if ranks % n == 0))
    net = _draw_net(d, ranks, precision, driven)
    sharding = draw_sharding(d.random, driven, optimizer)
    names = [name for name, _ in Net(net, 0).named_parameters()]
    low = "param_dtype" in PRECISIONS[precision]
    fp8 = tuple(name for name in names if d.maybe(0.5)) if d.maybe(0.35) and low else ()
    if d.maybe(0.1) and not fp8:
        fp8 = tuple(name for name in names if name.endswith("weight") and "half" not in name)
    steps = tuple(_draw_step(d, net, driven, precision, names, ranks, at, optimizer) for at in range(d.one(3, 4, 5)))
    return Program(
        seed=seed, ranks=ranks, replicas=replicas, net=net, sharding=sharding, precision=precision, fp8=fp8,
        grad_sum="rank_order" if ranks > 2 else d.one("backend", "rank_order"),
        divisor=d.one(None, None, 1.0, 3.0), optimizer=optimizer, steps=steps,
    )  # fmt: skip


def draw_sharding(random: Random, driven: str | None, optimizer: str) -> Sharding:
    d = _Draw(random)
    strategy = d.one(*STRATEGIES, "optim_grads_params", "optim_grads_params")
    gathered = "double"
    if strategy != "no_shard":
        gathered = d.one("double", "all", *((0, 10, 30, 60, 100) if strategy == "optim_grads_params" else ()))
    grains = d.one(0, 0, random.randrange(1, 99))
    aside = Random()  # the draws of earlier options stay what they are
    aside.setstate(random.getstate())
    return Sharding(
        strategy=strategy,
        units=d.one(("Block",), ("Block", "Embedding"), ("Linear",), ("Stage",), ("Block", "Stage"), ()),
        root_units=d.maybe(0.6),
        gathered=gathered,
        prefetch=d.one(None, None, 0, 300, 100_000),
        reduce_buffers=d.one(1, 2, 3),
        bucket=d.one(None, None, 4, 100, 333),
        merge=aside.choice((None, None, 400, 2000, 10**6)) if driven is None else None,
        share=d.maybe(0.3),
        offload=d.maybe(0.25) and optimizer != "muon",
        align=d.one(128, 128, 64, 16) if optimizer != "adamw" else 128,
        grains=grains,
        grad_reduce=d.one("auto", "auto", "last") if driven is not None else "auto",
        checks=d.one("off", "order", "order", "unit"),
        initial=d.one("check", "broadcast", "trust"),
        bare=driven is None and d.maybe(0.3),
    )


def _draw_net(d: _Draw, ranks: int, precision: str, driven: str | None) -> NetSpec:
    plain_types = "param_dtype" not in PRECISIONS[precision]
    experts = tuple(d.random.randrange(2) for _ in range(ranks)) if ranks > 1 and d.maybe(0.3) else ()
    blocks: list[BlockSpec] = []
    for _ in range(d.one(1, 2, 3, 4)):
        parts = [one for one in ("row", "column", "scale", "empty", "norows", "zero", "tiny", "spare", "buffer")
                 if d.maybe(0.15)]  # fmt: skip
        if driven is None:  # a rank that defers nothing for a layer, or a block without deferral in it: one side only
            parts += [one for one in ("partial", "nested") if d.maybe(0.15)]
        if experts and d.maybe(0.6):
            parts.append("expert")
        if plain_types and driven is None and d.maybe(0.1):
            parts.append("half")
        hidden = d.one(1, 5, 5, 9)
        mates = [i for i, one in enumerate(blocks) if one.hidden == hidden and "half" not in (*one.parts, *parts)]
        blocks.append(
            BlockSpec(
                hidden=hidden,
                parts=tuple(parts),
                # Ranks whose graphs differ recompute at different moments, and units inside are used in other orders.
                recompute=None if "partial" in parts else d.one(None, None, None, "inside", "around"),
                frozen=d.one("nothing", "nothing", "nothing", "up", "all", "norm", "zero", "expert"),
                tied=d.one(None, None, *mates) if mates else None,
            )
        )
    if driven is None and d.maybe(0.15):  # its inner backwards deliver one by one: see _draw_step
        at = d.random.randrange(len(blocks))
        blocks[at] = replace(blocks[at], recompute=None if "partial" in blocks[at].parts else "reentrant")
    cuts = (0,)
    if driven is not None and len(blocks) > 1 and d.maybe(0.6):
        cuts = (0, d.random.randrange(1, len(blocks)))
        if len(blocks) > 2 and cuts[1] < len(blocks) - 1 and d.maybe(0.4):
            cuts = (*cuts, d.random.randrange(cuts[1] + 1, len(blocks)))
    return NetSpec(blocks=tuple(blocks), tied=d.maybe(0.25), experts=experts, cuts=cuts, split=driven == "split")


def _draw_step(
    d: _Draw, net: NetSpec, driven: str | None, precision: str, names: list[str], ranks: int, at: int, optimizer: str
) -> tuple[Op, ...]:
    ops: list[Op] = []
    count = len(net.blocks)
    once = any(one.recompute == "reentrant" for one in net.blocks)  # README: last bits of accumulated sums differ
    if driven is None and d.maybe(0.3) and not once:
        # A frozen middle may be skipped, and a trained one: by all ranks.
        ops.append(("order", tuple(d.random.randrange(count) for _ in range(d.random.randint(1, count + 2)))))
    if d.maybe(0.1):
        ops.append(("frozen", d.one(*names), d.maybe(0.4)))
    if d.maybe(0.1):
        ops.append(("materialize",))
    if driven is None:
        micros: list[Op] = []
        for k in range(1 if once else d.one(1, 1, 2, 3)):
            micros += _draw_micro(d, 10 * at + k, once)
        if any(
            "drop" in op for op in micros
        ):  # a graph that may still have its backward: one of two calls reduces early
            micros = [("micro", op[1], "plain", op[3]) if "joint" in op else op for op in micros]
        ops += micros
    else:
        if d.maybe(0.15):
            ops += [("driven", tuple(draw_actions(d.random, net, d.one(1, 2, 3), at, stop=True))), ("zero", True)]
        ops.append(("driven", tuple(draw_actions(d.random, net, d.one(1, 2, 3, 4), at, stop=False))))
        ops += [("eval", 10 * at + 7)] if d.maybe(0.15) else []
    exact = precision != "bf16 grads"
    for op, chance in ((("finish",), 0.4), (("square", "stages.0"), 0.2), (("clip", d.one(0.05, 0.5, 1e6)), 0.4),
                       (("scale", d.one(0.5, 0.3)), 0.1), (("divide", 3.0), 0.1)):  # fmt: skip
        if (exact or op[0] in ("finish", "square")) and d.maybe(chance):
            ops.append(op)
    ops.append(("grads",))
    if d.maybe(0.9):
        ops.append(("closure", 10 * at + 9) if driven is None and d.maybe(0.1) and optimizer != "muon" else ("step",))
    ops.append(("zero", d.maybe(0.8)) if once or d.maybe(0.9) else ("grads",))
    between = [
        ("full",), ("stream",), ("state",),
        ("load", d.one("dict", "one", "pairs", "pairs one"), d.random.randrange(ranks)),
        ("write", d.one(*names)), ("lr", d.random.randrange(2), d.one(1e-3, 2e-2)), ("roundtrip",), ("report",),
        ("torch state",), ("eval", 10 * at + 8),
        ("reshard", d.random.randrange(10**6), d.one("records", "torch")),
    ]  # fmt: skip
    while d.maybe(0.45):
        ops.append(d.one(*between))
    if any(op[0] == "reshard" for op in ops):
        ops.insert(next(i for i, op in enumerate(ops) if op[0] == "reshard"), ("zero", True))
    return tuple(ops)


def _draw_micro(d: _Draw, key: int, once: bool) -> list[Op]:
    hint = d.one(None, None, "no_sync", "last", "not last")
    kind = d.one("plain", "plain", "plain", "two", "two reversed", "joint", "retain", "drop", "eval between", "boom")
    kind = d.one("plain", "drop", "eval between") if once else kind
    if kind == "boom":
        return [("boom", key, d.one(0, 0, 1), d.one("forward", "backward"), hint), ("zero", True)]
    return [("micro", key, kind, hint)]


def draw_actions(random: Random, net: NetSpec, microbatches: int, at: int, *, stop: bool) -> list[tuple[str, int, int]]:
    """A legal order of one step of a driven program: (kind, stage, micro-batch), with hints where they please."""
    stages, split = len(net.cuts), net.split
    todo: list[tuple[str, int, int]] = [(kind, s, m) for kind in (("F", "I", "W") if split else ("F", "B"))
                                        for s in range(stages) for m in range(microbatches)]  # fmt: skip
    done: list[tuple[str, int, int]] = []
    finished: set[tuple[str, int, int]] = set()

    def ready(one: tuple[str, int, int]) -> bool:
        kind, s, m = one
        if kind == "F":
            return s == 0 or ("F", s - 1, m) in finished
        if kind == "W":
            return ("I", s, m) in finished
        return ("F", s, m) in finished and (s == stages - 1 or (kind, s + 1, m) in finished)

    while todo:
        if random.random() < 0.2:
            done.append((random.choice("UR"), random.randrange(stages), 0))
        legal = [one for one in todo if ready(one)]
        chosen = (
            random.choice([one for one in legal if one[0] != "F"] or legal)
            if random.random() < 0.6
            else random.choice(legal)
        )
        todo.remove(chosen)
        finished.add(chosen)
        done.append(chosen)
    if stop:
        return done[: random.randint(1, len(done))]
    order = list(range(stages))
    random.shuffle(order)
    return [*done, *(("G", s, 0) for s in order)]
