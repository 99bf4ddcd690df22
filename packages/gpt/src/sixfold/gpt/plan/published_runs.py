"""Training speeds that others have published, beside what this package plans for the same runs.

    ROWS (this file) --> predicted --> errors --> time_range.py: the range that a plan prints; docs/guide/
    gpt-plan-errors.md

Each row has a public source. ``python -m sixfold.gpt.published`` prints the table; a test compares it with the page and
the quantiles with time_range.py. No torch.

What is planned is the run as far as this package has its like. MPT has two matrices in its feed-forward part: here
three of two thirds the width, as many parameters. torchtitan's "selective" recomputes every second product: here
attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sixfold.gpt.machine.devices import LINK_EFFICIENCY, Device, device_named
from sixfold.gpt.plan.plan import LayoutPlan, PlannedConfig, plan_layout

_BASE = """
data = {blend = ["corpus"], seq_length = 8192, document_mask = false}
train = {steps = 100, global_batch_size = 128, micro_batch_size = 1}
optimizer = {lr = 1e-4}
run = {dir = "runs/published", device = "cuda"}
"""


def _model(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, *, tied: bool = False) -> str:
    return (
        f"model = {{num_layers = {layers}, hidden_size = {hidden}, num_attention_heads = {heads}, num_query_groups = "
        f"{groups}, ffn_hidden_size = {ffn}, vocab_size = {vocab}, tie_embeddings = {str(tied).lower()}}}\n"
    )


# Llama: the models' config.json. MPT: llm-foundry's scripts/train/yamls/pretrain, checked against its NumParams.
MODELS: Mapping[str, str] = {
    "Llama 3 8B": _model(32, 4096, 32, 8, 14336, 128256),
    "Llama 3 70B": _model(80, 8192, 64, 8, 28672, 128256),
    "Llama 3.1 405B": _model(126, 16384, 128, 8, 53248, 128256),
    "Llama 2 13B": _model(40, 5120, 40, 40, 13824, 32000),
    "Llama 2 70B": _model(80, 8192, 64, 8, 28672, 32000),
    "MPT 1B": _model(24, 2048, 16, 16, 5461, 50368, tied=True),
    "MPT 3B": _model(32, 2560, 20, 20, 6827, 50368, tied=True),
    "MPT 7B": _model(32, 4096, 32, 32, 10923, 50368, tied=True),
    "MPT 13B": _model(40, 5120, 40, 40, 13653, 50368, tied=True),
    "MPT 30B": _model(48, 7168, 56, 56, 19115, 50368, tied=True),
    "MPT 70B": _model(80, 8192, 64, 64, 21845, 50368, tied=True),
}
SOURCES: Mapping[str, str] = {
    "titan-h100": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "titan-a100": "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
    "foundry": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "dgxc-8b": "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd91f9be958fed4773ae95d941a3356a82/llama3.1/README_8b.md",
    "dgxc-70b": "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd91f9be958fed4773ae95d941a3356a82/llama3.1/README_70b.md",
    "slides": "the reference slides on custom FSDP in Megatron-Core (the design starts from them)",
}
KINDS = ("eager", "compiled", "fused")  # torch as it is; torch.compile; Megatron-Core with TransformerEngine


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run.

    Attributes:
        speed: tokens per second and GPU, as published or worked out from what was (seconds of a step, TFLOP/s).
        gib: of device memory, where it is published.
        note: what of the run is not planned.
    """

    source: str
    kind: str
    model: str
    device: str
    world: int
    speed: float
    overrides: Sequence[str]
    gib: float | None = None
    memory_tb_per_s: float | None = None
    note: str = ""


_Cells = tuple[str, int, int, int, int, str, float, float | None]


def _rows(
    source: str, kind: str, device: str, rows: Sequence[_Cells], *, memory: float | None = None, note: str = ""
) -> Iterator[Row]:
    """Rows of (model, GPUs, sequence, micro batch, microbatches, recompute, tokens per second and GPU, GiB)."""
    for model, world, length, micro, count, recompute, speed, gib in rows:
        keys = (
            f"data.seq_length={length}", f"train.micro_batch_size={micro}",
            f"train.global_batch_size={world * micro * count}", f"train.recompute={recompute}",
        )  # fmt: skip
        yield Row(
            source=source, kind=kind, model=model, device=device, world=world, speed=speed, overrides=keys, gib=gib,
            memory_tb_per_s=memory, note=note,
        )  # fmt: skip


_HBM2E = 2.4  # TB/s
_TITAN = "96 GB of HBM2e, 500 W"
_RING = ("parallel.cp_comm_type=p2p",)  # as Megatron-Core does if it is told nothing else
_SEVERAL = (*_RING, "parallel.tp=4", "parallel.pp=4", "parallel.cp=2", "parallel.stages_per_rank=5")
_THREE_D = (*_SEVERAL, "parallel.schedule=interleaved", "parallel.sharding=optim", "data.seq_length=8192")
_CP = (*_RING, "parallel.cp=2", "parallel.sharding=optim", "data.seq_length=8192")
_SLIDES = (*_RING, "data.seq_length=8192", "train.global_batch_size=128", "fsdp.reduce_buffers=1")
_SLIDES_NOTE = "two constants are fitted to these three"

ROWS: tuple[Row, ...] = (
    *_rows("titan-h100", "eager", "h100", [
        ("Llama 3 8B", 8, 8192, 2, 1, "selective", 5762, 82.4),
        ("Llama 3 8B", 128, 8192, 2, 1, "selective", 5605, 67.0),
    ], memory=_HBM2E, note=_TITAN),
    *_rows("titan-h100", "compiled", "h100", [
        ("Llama 3 8B", 8, 8192, 2, 1, "selective", 6667, 77.0),
        ("Llama 3 8B", 128, 8192, 2, 1, "selective", 6514, 62.0),
    ], memory=_HBM2E, note=_TITAN),
    *_rows("titan-a100", "eager", "a100", [
        ("Llama 3 8B", 64, 8192, 1, 1, "selective", 2973, None), ("Llama 3 70B", 64, 8192, 1, 1, "full", 331, None),
        ("Llama 2 13B", 64, 4096, 2, 1, "none", 2162, None), ("Llama 2 13B", 64, 4096, 2, 1, "selective", 1904, None),
        ("Llama 2 70B", 64, 4096, 2, 1, "full", 353, None),
    ]),
    *_rows("foundry", "eager", "h100", [
        ("MPT 70B", 64, 2048, 8, 4, "full", 1039, None), ("MPT 30B", 8, 8192, 1, 21, "full", 1384, None),
        ("MPT 30B", 32, 2048, 14, 3, "full", 2308, None), ("MPT 13B", 8, 4096, 10, 3, "full", 4717, None),
        ("MPT 13B", 64, 2048, 2, 1, "none", 4800, None), ("MPT 13B", 8, 2048, 2, 1, "none", 4792, None),
        ("MPT 7B", 8, 8192, 8, 2, "full", 6935, None), ("MPT 7B", 8, 2048, 6, 1, "none", 10643, None),
        ("MPT 3B", 8, 8192, 3, 6, "none", 16578, None), ("MPT 3B", 64, 2048, 6, 3, "none", 22525, None),
        ("MPT 1B", 8, 2048, 14, 1, "none", 45455, None),
    ]),
    *_rows("foundry", "eager", "a100", [
        ("MPT 70B", 64, 2048, 8, 4, "full", 410, None), ("MPT 30B", 8, 8192, 1, 21, "full", 574, None),
        ("MPT 30B", 8, 2048, 3, 21, "full", 916, None), ("MPT 13B", 8, 8192, 5, 3, "full", 1795, None),
        ("MPT 13B", 8, 2048, 2, 3, "none", 2262, None), ("MPT 7B", 8, 8192, 8, 2, "full", 3206, None),
        ("MPT 7B", 8, 2048, 6, 2, "none", 4641, None), ("MPT 3B", 8, 8192, 3, 6, "none", 7695, None),
        ("MPT 1B", 8, 2048, 14, 4, "none", 20513, None),
    ]),
    Row(source="dgxc-8b", kind="fused", model="Llama 3 8B", device="h100", world=8, speed=81222 / 8,
        overrides=(*_CP, "train.global_batch_size=128")),
    Row(source="dgxc-8b", kind="fused", model="Llama 3 8B", device="h100", world=128, speed=1280704 / 128,
        overrides=(*_CP, "train.global_batch_size=2048")),
    Row(source="dgxc-70b", kind="fused", model="Llama 3 70B", device="h100", world=64, speed=71235 / 64,
        overrides=(*_THREE_D, "train.global_batch_size=128")),
    Row(source="dgxc-70b", kind="fused", model="Llama 3 70B", device="h100", world=1024, speed=1124478 / 1024,
        overrides=(*_THREE_D, "train.global_batch_size=2048")),
    Row(source="slides", kind="fused", model="Llama 3 70B", device="h100", world=64, speed=427e12, gib=64.62,
        overrides=(*_SLIDES, "parallel.cp=2", "train.recompute=full"), note=_SLIDES_NOTE),
    Row(source="slides", kind="fused", model="Llama 3 70B", device="h100", world=64, speed=379e12, gib=79.05,
        overrides=(*_SLIDES, "parallel.cp=4"), note=_SLIDES_NOTE),
    Row(source="slides", kind="fused", model="Llama 3 70B", device="h100", world=64, speed=226e12, gib=79.05,
        overrides=(*_SLIDES, "parallel.cp=8"), note=_SLIDES_NOTE),
)  # fmt: skip


def device_of(row: Row) -> Device:
    """The table's device, with the row's own rate of memory."""
    device = device_named(row.device)
    if row.memory_tb_per_s is None:
        return device
    return replace(device, memory_bytes_per_s=row.memory_tb_per_s * 1e12 * LINK_EFFICIENCY)


def planned(row: Row) -> LayoutPlan:
    """What this package plans for it."""
    config = PlannedConfig.from_text(MODELS[row.model] + _BASE, row.overrides)
    return plan_layout(config, row.world, device_of(row), fused=row.kind != "eager")


def speed_of(row: Row, plan: LayoutPlan) -> float:
    """Published tokens per second and GPU; the slides give FLOP/s by the model's own count."""
    if row.source != "slides":
        return row.speed
    return row.speed / plan.config.model.flops_per_token(plan.config.data.seq_length)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A row beside its plan: tokens per second and GPU, and what was published over what is planned."""

    row: Row
    published: float
    planned: float
    mfu: float
    gib: float

    @property
    def ratio(self) -> float:
        """Above 1 the run was faster than planned."""
        return self.published / self.planned


def beside_plans(rows: Sequence[Row] = ROWS) -> list[Beside]:
    """All rows, planned."""
    found = []
    for row in rows:
        plan = planned(row)
        assert plan.tokens_per_second is not None and plan.mfu is not None, f"{row.device} has no FLOP/s"
        found.append(
            Beside(
                row=row,
                published=speed_of(row, plan),
                planned=plan.tokens_per_second / row.world,
                mfu=plan.mfu,
                gib=plan.peak_bytes / 2**30,
            )
        )
    return found


def table(rows: Sequence[Beside]) -> str:
    """Markdown: a line for each row, and the sources below."""
    sources = list(SOURCES)
    lines = [
        "| run | GPUs | layout, recomputation | operators | published tokens/s a GPU | planned | published / planned |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        row = one.row
        layout = _layout(row) + (f"; {row.note}" if row.note else "")
        lines.append(
            f"| {row.model} [{sources.index(row.source) + 1}] | {row.world} {row.device.upper()} | {layout} | "
            f"{row.kind} | {one.published:,.0f} | {one.planned:,.0f} | {one.ratio:.2f} |"
        )
    lines += ["", *(f"{number}. {SOURCES[name]}" for number, name in enumerate(sources, 1))]
    return "\n".join(lines)


def _layout(row: Row) -> str:
    keys = dict(one.partition("=")[::2] for one in row.overrides)
    degrees = [f"{axis}{keys[f'parallel.{axis}']}" for axis in ("pp", "tp", "cp") if f"parallel.{axis}" in keys]
    shape = f"{keys.get('train.micro_batch_size', '1')} x {keys['data.seq_length']}"
    return f"{' '.join([*degrees, shape])}, {keys.get('train.recompute', 'none')}"


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, linear between neighbours."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
