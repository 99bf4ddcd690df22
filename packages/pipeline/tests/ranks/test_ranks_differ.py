"""One rank brings something else than the others, or leaves: every rank raises within seconds, not at the deadline."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
from fault_helpers import Report, report
from pipeline_helpers import batch, layers, square_loss
from torch import nn

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Stage, TorchSchedule, gpipe, one_f_one_b

DEADLINE_S = 60.0
SOON_S = 10.0


def told(results: list[Report]) -> list[str]:
    """What each rank said, when all of them raised soon."""
    for kind, text, took in results:
        assert kind in ("ScheduleError", "PipelineTimeout"), (kind, text)
        assert took < SOON_S, (took, text)
    return [text for _, text, _ in results]


# ---- The runner is made


def make_and_step(rank: int, ranks: int, wrong: dict[str, Any], at: int) -> Report:
    """A runner made with ``wrong`` arguments on rank ``at``, and its first step."""
    options: dict[str, Any] = {"loss_fn": square_loss, "timeout_s": DEADLINE_S, **(wrong if rank == at else {})}
    program = options.pop("program", one_f_one_b(ranks, 4))
    stages = options.pop("stages", [Stage(layers(ranks)[rank], rank)])
    return report(lambda: PipelineRunner(program, stages, dist.group.WORLD, **options).step(*batch(8)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"loss_fn": 3}, "loss_fn is 3"),
        ({"scale": "max"}, "scale is 'max'"),
        ({"overlap": "both"}, "overlap is 'both'"),
        ({"lookahead": -1}, "lookahead is -1"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"dynamic_shapes": "maybe"}, "dynamic_shapes is 'maybe'"),
        ({"edges": "tcp"}, "edges is 'tcp'"),
        ({"program": "1F1B"}, "program is '1F1B'"),
        ({"program": one_f_one_b}, r"program is the function one_f_one_b"),
        ({"stages": [nn.Linear(8, 8)]}, r"stages[0] is a Linear"),
        ({"stages": nn.Linear(8, 8)}, r"stages is a Linear"),
    ],
)
@pytest.mark.slow
def test_an_argument_that_is_wrong_on_the_last_rank_alone_is_told_to_all_at_once(wrong, words):
    for text in told(run_ranks(make_and_step, 2, wrong, 1)):
        assert words in text


def make_two(rank: int, ranks: int, options: list[dict[str, Any]]) -> Report:
    """A runner and a step, whose options differ between ranks."""
    stage = Stage(layers(ranks)[rank], rank)
    given: dict[str, Any] = {"timeout_s": DEADLINE_S, "loss_fn": square_loss, **options[rank]}
    return report(lambda: PipelineRunner(one_f_one_b(ranks, 4), stage, dist.group.WORLD, **given).step(*batch(8)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{"edges": "one"}, {"edges": "groups"}], "edges='one'"),
        ([{}, {"edges": "one"}], "edges='one'"),
        ([{"edges": "one"}, {"loss_fn": 3}], "loss_fn is 3"),
        ([{"dynamic_shapes": "announced"}, {}], "dynamic_shapes='announced'"),
        ([{"dynamic_shapes": True}, {}], "dynamic_shapes=True"),
    ],
)
@pytest.mark.slow
def test_options_of_messages_that_differ_are_named_on_all_ranks_at_once(options, words):
    for text in told(run_ranks(make_two, 2, options)):
        assert words in text, text


# ---- A rank that is lost


def step_beside_a_killed_rank(rank: int, ranks: int) -> Report:
    class Dies(nn.Module):
        def forward(self, x: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    stage = Stage(Dies() if rank == 2 else layers(ranks)[rank], rank)
    runner = PipelineRunner(one_f_one_b(ranks, 4), [stage], dist.group.WORLD, square_loss, timeout_s=DEADLINE_S)
    return report(lambda: runner.step(*batch(8)))


@pytest.mark.slow
def test_a_lost_rank_is_named_on_all_others_without_a_store_of_the_callers():
    first, second, _ = run_ranks(step_beside_a_killed_rank, 3, allow_exit={2})
    for text in told([first, second]):
        assert "rank 2 silent" in text


# ---- What a rank finds wrong outside of the runner's calls


def torch_schedule(rank: int, ranks: int, which: str) -> Report:
    """Torch's calls, wrong on rank 1 alone."""
    wrong = rank == 1
    name = "nowhere.csv" if wrong and which == "file" else "1F1B"
    m = 0 if wrong and which == "microbatches" else 4
    x, y = batch(8)

    def call() -> None:
        schedule = TorchSchedule(
            name,
            Stage(layers(ranks)[rank], rank),
            m,
            square_loss,
            group=dist.group.WORLD,
            num_stages=ranks,
            timeout_s=DEADLINE_S,
        )
        schedule.step(*([x] if rank == 0 else []), target=y[:7] if wrong and which == "rows" else y)

    return report(call)


@pytest.mark.parametrize(
    ("which", "words"),
    [("file", "nowhere.csv"), ("microbatches", "n_microbatches is 0"), ("rows", "target has 7 rows")],
)
def test_what_torchs_calls_find_wrong_on_one_rank_is_told_to_all(which, words):
    first, second = run_ranks(torch_schedule, 2, which)
    if which == "file":  # the file's own error is what this rank gets
        assert "nowhere.csv" in second[1]
        assert words in told([first])[0]
        return
    for text in told([first, second]):
        assert words in text


def loader_that_ends(rank: int, ranks: int) -> Report:
    stage = Stage(layers(ranks)[rank], rank)
    runner = PipelineRunner(one_f_one_b(ranks, 4), stage, dist.group.WORLD, square_loss, timeout_s=DEADLINE_S)
    runner.step(*batch(8))

    def call() -> None:
        if rank == 1:
            try:
                raise StopIteration("the loader is at its end")
            except StopIteration as error:
                runner.fail(error)
        runner.step(*batch(8))

    return report(call)


def test_a_rank_that_cannot_go_on_ends_the_others_calls_by_fail():
    for text in told(run_ranks(loader_that_ends, 2)):
        assert "StopIteration: the loader is at its end" in text


# ---- Other calls


def other_call(rank: int, ranks: int, act: str, at: int, edges: str | None, first: bool) -> Report:
    """After two steps that all ranks make, rank ``at`` makes another call than the others."""
    stage = Stage(layers(ranks)[rank], rank)
    announced = act == "new shapes"
    runner = PipelineRunner(
        one_f_one_b(ranks, 4),
        stage,
        dist.group.WORLD,
        square_loss,
        timeout_s=DEADLINE_S,
        edges=edges,
        profile=True,
        dynamic_shapes="announced" if announced else False,
    )
    x, y = batch(8)
    known = gpipe(ranks, 4)
    result = runner.step(x, y)
    runner.step(x, y, program=known)
    acts = {
        "new program": lambda: runner.step(x, y, program=gpipe(ranks, 8)),
        "known program": lambda: runner.step(x, y, program=known),
        "evaluate": lambda: runner.evaluate(x, y),
        "forward": lambda: runner.forward(x),
        "agree": lambda: runner.agree(known),
        "timeline": lambda: runner.gather_timeline(result),
        "new shapes": lambda: runner.step(x, y, new_shapes=True),
    }

    def call() -> None:
        if (rank == at) == first:
            acts[act]()
        elif announced:
            runner.step(x, y)
        for _ in range(3):
            runner.step(x, y)

    return report(call)


@pytest.mark.parametrize("edges", [None, "groups"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.sampled
@pytest.mark.parametrize("act", ["new program", "known program", "evaluate", "forward", "agree", "timeline"])
@pytest.mark.slow
def test_another_call_on_one_rank_ends_all_soon_and_says_so(act, at, edges):
    texts = told(run_ranks(other_call, 3, act, at, edges, True))
    assert any("make the same calls" in text for text in texts), texts


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.slow
def test_new_shapes_that_one_rank_alone_announces_end_all_soon(at):
    texts = told(run_ranks(other_call, 3, "new shapes", at, "groups", True))
    assert any("make the same calls" in text for text in texts), texts


@pytest.mark.slow
def test_a_new_program_on_all_ranks_but_one_ends_all_soon():
    texts = told(run_ranks(other_call, 3, "new program", 1, "groups", False))
    assert any("make the same calls" in text for text in texts), texts


def late(rank: int, ranks: int, edges: str | None) -> list[float]:
    """A new program, to which one rank comes seconds later than the others; and steps of it."""
    stage = Stage(layers(ranks)[rank], rank)
    runner = PipelineRunner(
        one_f_one_b(ranks, 4), stage, dist.group.WORLD, square_loss, timeout_s=DEADLINE_S, edges=edges
    )
    x, y = batch(8)
    runner.step(x, y)
    if rank == 1:
        time.sleep(1.5)
    new = gpipe(ranks, 8)
    return [float(loss) for _ in range(2) for loss in runner.step(x, y, program=new).losses]


@pytest.mark.parametrize("edges", [None, "groups"])
@pytest.mark.slow
def test_a_rank_that_comes_late_to_a_new_program_is_waited_for(edges):
    *others, last = run_ranks(late, 3, edges)
    assert others == [[], []] and len(last) == 16
