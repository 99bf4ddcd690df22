"""What a plan says of its own error: published runs beside their plans, and the range that comes of it."""

import json
import math
from pathlib import Path

import pytest
from config_helpers import MINIMAL
from llama_helpers import H100, llama

from sixfold.gpt.commands import cli
from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig
from sixfold.gpt.machine.devices import DEVICES
from sixfold.gpt.plan.activation_bytes import Shape
from sixfold.gpt.plan.elementwise_bytes import elementwise_bytes
from sixfold.gpt.plan.plan import plan_layout
from sixfold.gpt.plan.published_runs import ROWS, SOURCES, beside_plans, planned, table
from sixfold.gpt.plan.time_range import QUANTILES, RANGES, SEEN

PAGE = Path(__file__).parents[4] / "docs/guide/gpt-plan-errors.md"


@pytest.fixture(scope="module")
def rows():
    return beside_plans()


def test_every_row_has_a_public_source_and_there_are_rows_of_every_kind():
    assert {row.source for row in ROWS} == set(SOURCES)
    assert all(where.startswith("https://") for name, where in SOURCES.items() if name != "slides")
    assert {row.kind for row in ROWS} == {"eager", "compiled", "fused"}
    assert {row.device for row in ROWS} == set(SEEN)


@pytest.mark.slow
def test_the_page_shows_the_table_as_it_is_today(rows):
    assert table(rows) in PAGE.read_text(), "python -m sixfold.gpt.plan.published_runs prints the table of the page"


@pytest.mark.parametrize(
    ("name", "kinds", "shares"),
    [("eager", {"eager"}, QUANTILES), ("compiled", {"compiled", "fused"}, QUANTILES),
     ("other device", {"eager", "compiled", "fused"}, (0.0, 1.0))],
)  # fmt: skip
def test_the_range_of_a_plan_is_that_of_the_published_runs(rows, name, kinds, shares):
    import numpy as np

    ratios = [one.ratio for one in rows if one.row.kind in kinds]
    low, high = np.quantile(ratios, shares)
    assert RANGES[name].low == math.floor(low * 100) / 100
    assert RANGES[name].high == math.ceil(high * 100) / 100
    count = RANGES[name].source.partition(" ")[0]
    assert count in (str(len(ratios)), "all")


def test_torchtitans_published_speed_of_an_8b_lies_in_the_range_that_is_printed(rows):
    for one in rows:
        if one.row.source == "titan-h100" and one.row.world == 8:
            low, high = planned(one.row).range_of(one.planned)
            assert low <= one.published <= high


@pytest.mark.parametrize("length", [2048, 8192, 131072])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_mfu_is_never_above_the_efficiency_of_the_products(rows, length, recompute):
    for fused in (False, True):
        options = (f"data.seq_length={length}", f"train.recompute={recompute}", "train.global_batch_size=512")
        found = plan_layout(llama(*options), 64, H100, fused=fused)
        assert found.mfu is not None and found.mfu < H100.flops_of("bf16") / H100.peak_flops
    for one in rows:
        device = DEVICES[one.row.device]
        assert one.mfu < device.flops / device.peak_flops, one.row.model


def test_compiled_operators_move_less_and_experts_move_their_rows():
    plain = TrainConfig.from_text(MINIMAL)
    experts = TrainConfig.from_text(MINIMAL, ["model.num_experts=4", "model.moe_ffn_hidden_size=96"])
    for config in (plain, experts):
        shape = Shape.of(config, ParallelConfig(dp=1))
        eager, fused = (elementwise_bytes(config, shape, "cuda", range(4), last=False, fused=f) for f in (False, True))
        assert fused.forward < eager.forward and fused.backward < eager.backward


SMALL = (
    "model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.ffn_hidden_size=64",
    "model.vocab_size=128", "data.seq_length=576", "data.document_mask=false", "train.micro_batch_size=1",
    "train.global_batch_size=1",
)  # fmt: skip


LEFT_OUT = {
    "mm", "bmm", "addmm", "mv", "embedding", "embedding_dense_backward", "empty", "empty_like", "detach",
    "_unsafe_view", "zeros",
}  # fmt: skip


@pytest.mark.parametrize(("precision", "recompute"), [("bf16", "none"), ("fp32", "none"), ("fp32", "full")])
def test_bytes_of_elementwise_operators_are_those_that_torch_dispatches(precision, recompute):
    """The oracle sees each operator's tensors; views, products and the attention kernel are left out."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from sixfold.gpt import GPTModel

    config = TrainConfig.from_text(MINIMAL, [*SMALL, f"train.precision={precision}", f"train.recompute={recompute}"])
    moved = {"now": 0, "forward": 0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func.name().removeprefix("aten::").partition(".")[0]
            products = name in (
                "mm",
                "bmm",
                "addmm",
                "mv",
                "embedding",
                "embedding_dense_backward",
                "empty",
                "empty_like",
            )
            if not (func.is_view or products or "attention" in name or name in ("detach", "_unsafe_view", "zeros")):
                tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
                # In place: what is written is an input, too.
                moved["now"] += sum(x.numel() * x.element_size() for x in tensors)
            return out

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = GPTModel(config.model)
    model.initialize(1)
    model.to(dtype)
    model.recompute = recompute
    tokens = torch.randint(0, 128, (1, 576))
    with Count():
        loss = model(tokens, labels=tokens).sum()
        moved["forward"], moved["now"] = moved["now"], 0
        loss.backward()
    shape = Shape.of(config, ParallelConfig(dp=1))
    found = elementwise_bytes(config, shape, "cpu", range(2), last=True, fused=False)
    assert found.forward == pytest.approx(moved["forward"], rel=0.25)
    assert found.backward == pytest.approx(moved["now"], rel=0.25)


def test_the_verb_prints_a_range_and_json_has_it_in_added_keys(tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text(MINIMAL)
    assert cli.main(["plan", str(path), "--world", "8", "--device", "h100", "train.global_batch_size=32"]) == 0
    page = capsys.readouterr().out
    assert " a step, " in page and "the range is that of 27 published runs of torch without a compiler" in page
    assert (
        cli.main(["plan", str(path), "--world", "8", "--device", "b200", "--json", "train.global_batch_size=32"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    fast, slow = found["step_seconds_range"]
    assert fast < found["step_seconds"] < slow
    low, high = found["tokens_per_second_range"]
    assert low == pytest.approx(32 * 32 / slow) and high == pytest.approx(32 * 32 / fast)
    assert "none of them on this device" in found["range_from"]
