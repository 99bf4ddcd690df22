"""fsdp.gathered_bytes as a number: each step gathers what its program's plan says, and trains the same bits."""

from __future__ import annotations

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import JOB_S, lines, world_of
from torch.distributed import PrefixStore

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.fsdp import residency
from sixfold.gpt import TrainConfig
from sixfold.gpt.engine.gather_budget import unit_uses
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.training import loop
from sixfold.pipeline import Program, one_f_one_b, passes

BUDGET = 100_000  # bytes; a rank has 111 kB and more in its three or four units
TWO = ("parallel.stages_per_rank=2",)
ONE_SIZE = ("model.vocab_size=290", "model.vocab_multiple=10")  # of embedding, head and layers
CASES = {
    "one_f_one_b": ONE_SIZE,
    "interleaved": (*ONE_SIZE, *TWO),
    "zb_v": (*ONE_SIZE, *TWO),
    "one_f_one_b of several sizes": (),
    "zb_v of several sizes": TWO,
}
COMPARED = ("zb_v", "one_f_one_b of several sizes")  # with gathered_bytes = "all"
OPTIONS = ("parallel.pp=2", "train.steps=3", "model.tie_embeddings=false", "fsdp.grad_reduce=last")


def train_and_count(rank, ranks, texts):
    """Of each job fsdp's report of its gathers, and the bytes of its units."""
    found = []
    for number, text in enumerate(texts):
        kept = []
        build = loop.build_rank
        loop.build_rank = lambda *a, build=build, kept=kept, **k: kept.append(build(*a, **k)) or kept[0]
        world = world_of(rank, ranks)
        object.__setattr__(world, "store", PrefixStore(f"job-{number}", world.store))
        loop.train_in(TrainConfig.from_text(text), world)
        loop.build_rank = build
        report = kept[0].model.report()
        sizes = {name: unit["gathered_bytes"] for name, unit in report["units"].items()}
        found.append((report["plan"], sizes, str(kept[0].program(4))))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    configs = {
        (case, gathered): tiny_config(
            folder, *OPTIONS, f"parallel.schedule={case.split()[0]}", *options, f"fsdp.gathered_bytes={gathered}",
            run=f"{case}-{gathered}",
        )
        for case, options in CASES.items()
        for gathered in (BUDGET, "all")
        if gathered == BUDGET or case in COMPARED
    }  # fmt: skip
    texts = [config.to_toml() for config in configs.values()]
    by_rank = ranktest.run_ranks(train_and_count, 2, texts, timeout=JOB_S)
    return {key: (config, [row[n] for row in by_rank]) for n, (key, config) in enumerate(configs.items())}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_gathers_of_a_step_are_the_fewest_that_the_program_allows(trained, case):
    (_, ranks), planned = trained[case, BUDGET], False
    for rank, (plan, sizes, text) in enumerate(ranks):
        program = Program.parse(text)
        units = {s: [u for u in sizes if u.startswith(f"{s}.")] for s in range(len(program.placement))}
        uses = unit_uses(program, rank, units)
        least = residency.solve(uses, sizes, budget_bytes=BUDGET - sizes[""])
        assert least.exact
        assert plan["gathers_done"] == least.gathers
        one_size = len({nbytes for name, nbytes in sizes.items() if name}) == 1
        assert plan["order"] == ("given" if one_size else "recorded") and plan["steps_off_plan"] == 0
        assert plan["peak_bytes"] <= BUDGET
        planned = planned or len(set(uses)) < least.gathers < len(uses)
    assert planned, "no rank has anything to plan"


@pytest.mark.parametrize("case", COMPARED)
def test_a_budget_changes_no_bit(trained, case):
    steps = [[(e["loss"], e["grad_norm"]) for e in lines(trained[case, g][0], "step")] for g in (BUDGET, "all")]
    assert steps[0] == steps[1]


def test_uses_follow_the_program():
    program = passes.lower(one_f_one_b(2, 3))
    units = {0: ["0.embedding", "0.layers.0"], 1: ["1.layers.1", "1.head"]}
    forward, backward = units[0], units[0][::-1]
    assert unit_uses(program, 0, units) == [*forward, *forward, *backward, *forward, *backward, *backward]
    assert unit_uses(program, 1, units) == [*units[1], *units[1][::-1]] * 3


def test_a_budget_below_one_unit_is_refused_with_what_is_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"fsdp\.gathered_bytes is 1000; the root unit .* need \d+"):
        loop.train_in(tiny_config(tmp_path, "fsdp.gathered_bytes=1000"), world_of(0, 1))
    assert not torch.distributed.is_initialized()
