"""The command of the cost model: the slides' tables, or a given model on a given cluster.

    python -m sixfold.fsdp.cost_model [flags] --> formulas.py, terms.py --> text or JSON (this file)

Nothing is computed here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from sixfold.fsdp.cost.formulas import (
    SLIDES_FLOPS,
    SLIDES_TP,
    collectives,
    memory_bytes,
    node_bandwidth,
    slides_tables,
    tokens_to_hide_backward,
    tokens_to_hide_forward,
)
from sixfold.fsdp.cost.terms import (
    NVLINK_BANDWIDTH,
    Cluster,
    Model,
    Run,
    backward,
    exposed_s,
    forward,
    memory,
    traffic,
)
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.strategy import ShardingStrategy

# The slides' case: Llama-3-70B, 64 devices, sequence 8192, micro-batch 1. Name, cp, recompute, TFLOP/s measured there.
CASE_STUDY = (("cp 2, recompute", 2, True, 427), ("cp 8", 8, False, 226), ("cp 4", 4, False, 379))
LLAMA_70B = Model(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128_256, gated=True)


def run_command(argv: list[str] | None = None) -> int:
    """Print what ``argv`` asks for; 2 and one line on stderr for values that cannot be."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.layers is None) != (args.hidden is None) or (args.layers is None and args.gpus is not None):
        parser.error("a model and its cluster need --layers, --hidden and --gpus together")
    if args.layers is None:
        print(json.dumps(slides_tables()) if args.json else _slides_text())
        return 0
    if args.gpus is None:
        parser.error("a model and its cluster need --layers, --hidden and --gpus together")
    try:
        found = of_model(*_from_flags(args))
    except FsdpError as error:
        parser.error(str(error))
    print(json.dumps(found) if args.json else _model_text(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sixfold.fsdp.cost_model",
        description="Print when communication hides behind computation, what a device stores and what travels. "
        "Without flags it prints the tables of the reference slides. "
        "With --layers, --hidden and --gpus it prints those of a model on a cluster.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, help="layers of the model")
    model.add_argument("--hidden", type=int, help="hidden size")
    model.add_argument("--ffn", type=int, help="width of the feed-forward part, or of one expert (4 * hidden)")
    model.add_argument("--heads", type=int, help="attention heads; needed with --kv-heads only")
    model.add_argument("--kv-heads", type=int, help="key and value heads (as many as --heads)")
    model.add_argument(
        "--vocab", type=int, default=0, help="vocabulary size; embedding and head count in memory and traffic"
    )
    model.add_argument("--swiglu", action="store_true", help="the feed-forward part has three matrices")
    model.add_argument("--experts", type=int, default=0, help="experts of each layer; 0: a dense model")
    model.add_argument("--top-k", type=int, default=1, help="experts that a token visits")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, help="devices in all")
    cluster.add_argument("--gpus-per-node", type=int, default=8, help="devices of a node (8)")
    cluster.add_argument(
        "--tflops", type=float, default=SLIDES_FLOPS / 1e12, help="TFLOP/s that a device achieves in bf16 (600)"
    )
    cluster.add_argument("--links", type=int, default=8, help="network links of a node (8)")
    cluster.add_argument("--gbit-per-s", type=float, default=400, help="bandwidth of a link (400)")
    cluster.add_argument(
        "--efficiency", type=float, default=0.85, help="part of the links' bandwidth that is reached (0.85)"
    )
    cluster.add_argument(
        "--nvlink-gbyte-per-s", type=float, default=NVLINK_BANDWIDTH / 1e9, help="what a device receives inside a node"
    )
    cluster.add_argument("--latency-us", type=float, default=0.0, help="latency of a collective (0)")
    cluster.add_argument(
        "--no-ring-factor", action="store_true", help="a collective moves all bytes, not (N-1)/N of them"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    run.add_argument("--cp", type=int, default=1, help="context parallel size")
    run.add_argument("--ep", type=int, default=1, help="expert parallel size")
    run.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="copies of the shards (HSDP): data-parallel size / ranks that share shards",
    )
    run.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    run.add_argument("--recompute", action="store_true", help="the backward runs each layer's forward again")
    run.add_argument("--fp8", action="store_true", help="weights travel as one byte, products run at twice the FLOP/s")
    run.add_argument("--grad-bytes", type=float, default=4.0, help="bytes of a gradient on the wire: 4 or 2")
    run.add_argument("--not-causal", action="store_true", help="attention computes all its products")
    run.add_argument("--seq-length", type=int, help="tokens of a sample; counts attention's products")
    run.add_argument(
        "--micro-batch",
        type=int,
        help="samples of a micro-batch; with --seq-length, prints the time that stays exposed too",
    )
    return parser


def _from_flags(args: argparse.Namespace) -> tuple[Model, Cluster, Run]:
    model = Model(
        **_picked(args, "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "top_k"), gated=args.swiglu
    )
    cluster = Cluster(
        gpus=args.gpus,
        gpus_per_node=args.gpus_per_node,
        flops=args.tflops * 1e12,
        node_bytes_per_s=node_bandwidth(args.links, args.gbit_per_s, args.efficiency),
        nvlink_bytes_per_s=args.nvlink_gbyte_per_s * 1e9,
        latency_s=args.latency_us * 1e-6,
        ring=not args.no_ring_factor,
    )
    run = Run(
        **_picked(args, "tp", "cp", "ep", "replicas", "accumulate", "recompute", "fp8"),
        **_picked(args, "grad_bytes", "seq_length", "micro_batch"),
        causal=not args.not_causal,
    )
    return model, cluster, run


def _picked(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def of_model(model: Model, cluster: Cluster, run: Run) -> dict[str, Any]:
    """Everything that is said of a model on a cluster, by strategy."""
    strategies: dict[str, Any] = {}
    for strategy in ShardingStrategy:
        this = replace(run, strategy=strategy)
        ahead, back = forward(model, cluster, this), backward(model, cluster, this)
        strategies[strategy.value] = {
            "forward_tokens": ahead.tokens,
            "backward_tokens": back.tokens,
            "forward_communication_s": ahead.communication_s,
            "backward_communication_s": back.communication_s,
            "exposed_s": exposed_s(model, cluster, this),
            "memory_bytes": memory(model, cluster, this),
            "traffic_bytes": traffic(model, cluster, this),
        }
    return {"params": model.params, "tokens": run.tokens, "strategies": strategies}


def _model_text(found: dict[str, Any]) -> str:
    tokens = found["tokens"]
    lines = [
        f"{found['params'] / 1e9:.2f}e9 parameters. Forward and backward: tokens of a micro-batch on one device",
        "above which communication of a layer hides, in the micro-batches that have any",
    ]
    lines.append(f"  {'':20s} forward  backward   memory GB  gathered GB  reduced GB" + "   exposed ms" * bool(tokens))
    for name, of in found["strategies"].items():
        moved = of["traffic_bytes"]
        line = f"  {name:20s} {of['forward_tokens']:7.0f} {of['backward_tokens']:9.0f}"
        line += f" {of['memory_bytes']['total'] / 1e9:11.2f} {moved['all_gather'] / 1e9:12.2f}"
        line += f" {(moved['reduce_scatter'] + moved['all_reduce']) / 1e9:11.2f}"
        lines.append(line + (f" {of['exposed_s'] * 1e3:12.1f}" if tokens else ""))
    if tokens:
        lines.append(f"a micro-batch has {tokens:.0f} tokens on a device; exposed: per optimizer step, at least")
    parts = found["strategies"]["optim_grads_params"]["memory_bytes"]
    said = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    lines.append(f"memory under optim_grads_params, GB, activations apart: {said}")
    return "\n".join(lines)


def case_study() -> list[tuple[str, float, float, int]]:
    """The slides' three runs of Llama-3-70B on 64 devices: name, tokens there, tokens needed, TFLOP/s measured."""
    rows = []
    for name, cp, recompute, measured in CASE_STUDY:
        needed = tokens_to_hide_backward(SLIDES_FLOPS, node_bandwidth(), recompute=recompute)
        rows.append((name, 8192 / cp, needed, measured))
    return rows


def _slides_text() -> str:
    bandwidth = node_bandwidth()
    lines = [
        f"node bandwidth {bandwidth / 1e9:.0f} GB/s, {SLIDES_FLOPS / 1e12:.0f} TFLOP/s per device",
        "tokens per micro-batch and device above which communication hides",
        "  tp  GB/s  forward  backward  bf16 gradients  recompute  64 experts, ep 8, top 4  fp8 forward",
    ]
    for tp in SLIDES_TP:
        at: dict[str, Any] = {"flops": SLIDES_FLOPS, "bandwidth": bandwidth, "tp": tp}
        columns = (
            (tokens_to_hide_forward(**at), 9),
            (tokens_to_hide_backward(**at), 10),
            (tokens_to_hide_backward(**at, grad_bytes=2), 16),
            (tokens_to_hide_backward(**at, recompute=True), 11),
            (tokens_to_hide_backward(**at, experts=64, ep=8, top_k=4), 25),
            (tokens_to_hide_forward(2 * SLIDES_FLOPS, bandwidth, tp=tp, param_bytes=1), 13),
        )
        numbers = "".join(f"{value:{width}.0f}" for value, width in columns)
        lines.append(f"  {tp:2d} {bandwidth / tp / 1e9:5.1f}{numbers}")
    lines.append("7.5e9 parameters, 64 ranks, 2 + 2 + 12 bytes; traffic in models per step at 4 micro-batches")
    for strategy in ShardingStrategy:
        name = strategy.value
        moved = ", ".join(f"{kind} {count}" for kind, count in collectives(name, 4).items())
        lines.append(f"  {name:20s} {memory_bytes(name, 7.5e9, 64) / 1e9:7.3f} GB  {moved}")
    lines.append("Llama-3-70B on 64 devices, sequence 8192, micro-batch 1: tokens there, tokens needed, measured there")
    for name, there, needed, measured in case_study():
        verdict = "hidden" if there > needed else "exposed"
        lines.append(f"  {name:16s} {there:6.0f} {needed:6.0f}  {verdict:8s} {measured} TFLOP/s")
    return "\n".join(lines)
