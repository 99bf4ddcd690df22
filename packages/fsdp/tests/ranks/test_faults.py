"""What goes wrong between ranks is named on all of them, within two seconds of the moment at which it can be known.

That moment is: a call that all ranks have made, for models and calls that differ; the death of a process; half of the
deadline, for a process that is stopped; the deadline, for one that lives and does not come.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, Net, batch, loss_of, make_adamw, make_net
from torch import nn

from ranktest import run_ranks, store
from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, fully_shard_optimizer, torch_state
from sixfold.fsdp.faults.local_processes import LocalProcesses


def wrap(net, **options):
    return FullyShardedDataParallel(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block], **options)


def outcome(action) -> tuple[str, str | None, int | None, str | None, tuple[int, ...]]:
    with pytest.raises(FsdpError) as caught:
        action()
    error = caught.value
    return str(error), error.unit, error.step, error.op, error.ranks


KNOWN_S = 5.0  # after the moment at which it can be known, on a machine that is busy; a deadline is 10 s, 60 s or 600 s


def timed_outcome(action):
    """``outcome`` and the seconds until it came; all ranks begin together."""
    dist.barrier()
    return timed(action)


def timed(action):
    """``outcome`` and its seconds."""
    began = time.monotonic()
    return outcome(action), time.monotonic() - began


def different_shapes(rank, ranks):
    net = make_net()
    if rank == 1:
        net.blocks[1].up = nn.Linear(13, 29)
    return timed_outcome(lambda: wrap(net))


def test_different_shapes_are_named_on_all_ranks():
    for (text, _, _, op, ranks), seconds in run_ranks(different_shapes, 3):
        assert "blocks.1.up.weight is (23, 13) torch.float32" in text and "(29, 13)" in text
        assert (op, ranks) == ("check", (1,)) and seconds < KNOWN_S


def different_options(rank, ranks):
    strategies = outcome(lambda: wrap(make_net(), strategy="optim" if rank == 2 else "optim_grads"))
    selected = [nn.Linear] if rank == 2 else [Block]
    world = dist.group.WORLD
    units = outcome(lambda: FullyShardedDataParallel(make_net(), process_group=world, fsdp_unit_modules=selected))
    return strategies, units


def test_different_options_are_named_on_all_ranks():
    for (text, *_, ranks), (units_text, *_, units_ranks) in run_ranks(different_options, 3):
        assert "strategy is optim_grads, on rank 2 optim." in text and ranks == (2,)
        assert "units is ['', 'blocks.0', 'blocks.1', 'blocks.2'], on rank 2" in units_text and units_ranks == (2,)


def unit_missing_on_one(rank, ranks):
    module = make_net() if rank != 1 else nn.Linear(2, 2)
    return outcome(lambda: wrap(module))


def test_an_error_of_one_rank_at_wrap_is_raised_on_all():
    for text, _, _, _, ranks in run_ranks(unit_missing_on_one, 3):
        assert "Block" in text and "matches no module of Linear" in text and ranks == (1,)


def different_values(rank, ranks):
    net = make_net()
    if rank == 1:
        with torch.no_grad():
            net.blocks[2].norm.weight[3] += 1e-6
    return timed_outcome(lambda: wrap(net))


def test_different_start_values_are_named_on_all_ranks():
    for (text, _, _, op, ranks), seconds in run_ranks(different_values, 3):
        assert "blocks.2.norm.weight differ on rank 1" in text
        assert (op, ranks) == ("check", (1,)) and seconds < KNOWN_S


class Skipping(Net):
    skip = False

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if not (self.skip and i == 1):
                x = block(x)
        return self.head(self.norm(x))


def skip_a_unit(rank, ranks, checks):
    torch.manual_seed(0)
    net = Skipping()
    model = wrap(net, checks=checks, fault_store=store(), timeout_s=10.0)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    began = 0.0

    def steps():
        nonlocal began
        for step in range(3):
            began = time.monotonic()
            net.skip = rank == 1 and step == 2
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = outcome(steps)
    return found, time.monotonic() - began, outcome(lambda: model(batch(0, 0, 0)))[0]


@pytest.mark.slow
def test_a_unit_skipped_on_one_rank_is_named_before_the_collective():
    for (text, unit, step, op, ranks), seconds, later in run_ranks(skip_a_unit, 3, "unit"):
        assert (unit, step, op, ranks) == ("blocks.1", 2, "gather", (1,)), text
        assert seconds < KNOWN_S
        assert "rank 1 is at gather of blocks.2" in text
        assert "earlier fault" in later


class Masked(nn.Module):
    """An infinite input reaches the gradient of ``scale`` alone: what it makes is masked out behind it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.factor = 1.0

    def forward(self, x):
        y = self.up(x)
        return y + torch.where(torch.zeros(4, dtype=torch.bool), self.scale * self.factor, 0.0)


def not_finite(rank, ranks):
    torch.manual_seed(0)
    net = nn.Sequential(Masked(), Masked(), Masked())
    model = FullyShardedDataParallel(
        net, process_group=dist.group.WORLD, fsdp_unit_modules=[Masked], checks="unit", timeout_s=10.0
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    before = {}
    began = 0.0

    def steps():
        nonlocal began
        for step in range(3):
            began = time.monotonic()
            before.update({name: main.detach().clone() for name, main in model.main_parameters()})
            if rank == 1 and step == 2:
                net[1].factor = float("inf")
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = outcome(steps)
    seconds = time.monotonic() - began
    untouched = all(torch.equal(before[name], main) for name, main in model.main_parameters())
    return found, untouched, seconds


def test_a_gradient_that_is_not_finite_is_named_by_parameter_before_the_reduction():
    for (text, unit, step, op, ranks), untouched, seconds in run_ranks(not_finite, 2):
        assert (unit, step, op, ranks) == ("1", 2, "reduce", (1,)), text
        assert "gradient of 1.scale on rank 1 is not finite" in text and untouched
        assert seconds < KNOWN_S


def different_order(rank, ranks):
    """Equal sizes, so that no collective fails: only the digests differ."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        strategy="optim",
        fsdp_unit_modules=[nn.Linear],
        buffers=BufferConfig(merge_bytes=None),
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)

    class Run(nn.Module):
        def forward(self, x):
            return net[1](net[0](x)) if rank != 1 else net[0](net[1](x))

    net.append(Run())
    began = 0.0

    def steps():
        nonlocal began
        for _ in range(3):
            began = time.monotonic()
            model.entry(net[2])(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return outcome(steps), time.monotonic() - began


def test_another_order_of_units_is_found_by_the_digest_of_the_step():
    for (text, _, step, op, ranks), seconds in run_ranks(different_order, 3):
        assert "different orders in step 0" in text and "[step 0; op check; rank 1]" in text
        assert (step, op, ranks) == (0, "check", (1,)) and seconds < KNOWN_S


class Either(nn.Module):
    """Two layers of equal size, of which a call uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.which = 0

    def forward(self, x):
        return self.layers[self.which](x)


def other_units(rank, ranks, then):
    """In the last step rank 1 uses another unit of equal size: no collective fails. Then all do ``then``."""
    net = Either()
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[nn.Linear],
        buffers=BufferConfig(
            prefetch_bytes=0, merge_bytes=None
        ),  # a gather ahead, along the recorded order, would be one more
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)

    def backward():
        model(torch.ones(1, 3)).sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    net.which = int(rank == 1)
    before = [main.detach().clone() for _, main in model.main_parameters()]
    if then == "save of a forward":
        model(torch.ones(1, 3))
    else:
        backward()
    actions = {"step": optimizer.step, "finish": model.finish_grad_sync, "check": model.check}
    found = timed(actions.get(then, model.full_state_dict))
    after = [main.detach() for _, main in model.main_parameters()]
    return found, all(map(torch.equal, before, after))


@pytest.mark.parametrize("then", ["step", "finish", "check", "save", "save of a forward"])
@pytest.mark.slow
def test_ranks_that_used_other_units_in_the_last_step_apply_and_save_nothing(then):
    for ((text, _, step, _, ranks), seconds), untouched in run_ranks(other_units, 2, then):
        assert "different orders in step 1" in text and (step, ranks) == (1, (1,)) and untouched
        assert seconds < KNOWN_S, f"{seconds:.1f} s"


def save_on_one(rank, ranks, checks, call):
    """Rank 0 alone asks for the state, and the other trains on."""
    net = make_net()
    model = wrap(net, checks=checks)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)

    def step():
        loss_of(model(batch(0, 0, rank)), batch(0, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    ask = {
        "weights": model.full_state_dict,
        "DTensors": lambda: torch_state.get_model_state_dict(model),
        "optimizer": lambda: torch_state.get_optimizer_state_dict(model, optimizer),
    }[call]
    return timed_outcome(ask if rank == 0 else step)


@pytest.mark.parametrize(
    ("checks", "call"),
    [("order", "weights"), ("off", "weights"), ("unit", "weights"), ("order", "DTensors"), ("order", "optimizer")],
)
@pytest.mark.slow
def test_a_state_that_one_rank_alone_asks_for_is_an_error_of_all_within_seconds(checks, call):
    for (text, _, _, _, ranks), seconds in run_ranks(save_on_one, 2, checks, call):
        assert "all ranks are alive and disagree: most wait for save in step 0, rank 1 waits for " in text
        assert ranks == (1,) and seconds < 2 * KNOWN_S, f"{seconds:.1f} s"


def stopped_in_the_first_step(rank, ranks):
    """Rank 0 waits for a rank that is stopped; its deadline is 600 s."""
    net = make_net()
    model = wrap(net, timeout_s=1.6)
    if rank == 1:
        store().set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    found = timed(lambda: model(batch(0, 0, rank)))
    os.kill(int(store().get("stopped")), signal.SIGKILL)
    return found


def test_a_rank_that_stops_in_the_first_step_is_named_without_its_long_deadline():
    (text, unit, step, op, lost), seconds = run_ranks(stopped_in_the_first_step, 2, allow_exit=(1,))[0]
    assert (unit, step, op, lost) == ("", 0, "gather", (1,)) and "the process of rank 1 is stopped" in text
    assert seconds < 0.8 + KNOWN_S


def in_step_two(rank, ranks, what):
    """Rank 1 does ``what`` in the middle of step 2; the others train on. What they raise, and how long it took."""
    net = make_net()
    model = wrap(net, timeout_s=DEADLINES[what], busy_timeout_s=DEADLINES[what])
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    began = time.monotonic()

    def steps():
        nonlocal began
        for step in range(4):
            began = time.monotonic()
            if rank == 1 and step == 2:
                if what == "stops":
                    store().set("stopped", str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif what == "hangs":
                    time.sleep(3.5)
            with model.no_sync():
                loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            if rank != 1 and step == 2 and what == "does something else":
                model.full_state_dict()  # gathers, where rank 1 reduces
            optimizer.step()
            optimizer.zero_grad()

    found = outcome(steps)
    seconds = time.monotonic() - began
    if what == "stops" and rank == 0:
        os.kill(int(store().get("stopped")), signal.SIGKILL)
    return found, seconds


DEADLINES = {"stops": 2.4, "hangs": 1.2, "does something else": 6.0}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_a_rank_that_stops_is_named_before_the_deadline(ranks):
    """SIGSTOP: no socket closes, and no store says anything."""
    results = run_ranks(in_step_two, ranks, "stops", allow_exit=(1,))
    for rank in {0, ranks - 1} - {1}:
        (text, unit, step, op, lost), seconds = results[rank]
        # Its answer to the digest of the step before may not have left: then that is what the others wait for first.
        assert (step, lost) == (2, (1,)) and (op, unit is None) in {("gather", False), ("check", True)}, text
        assert "the process of rank 1 is stopped; no sign of life from rank 1" in text
        assert "(no beat for" in text or "another rank reported a fault" in text
        assert seconds < DEADLINES["stops"] / 2 + KNOWN_S, f"{seconds:.1f} s"


@pytest.mark.slow
def test_a_rank_that_hangs_is_told_from_a_dead_one():
    results = run_ranks(in_step_two, 3, "hangs")
    for rank in (0, 2):
        (text, unit, step, op, lost), seconds = results[rank]
        assert (step, op, lost) == (2, "gather", (1,)) and unit is not None
        assert "rank 1 lives but did not come; it was last at " in text and "in step 1" in text
        assert seconds < DEADLINES["hangs"] + KNOWN_S, f"{seconds:.1f} s"
    assert "another rank reported a fault" in results[1][0][0] or "no answer" in results[1][0][0]


def busy_in_step_one(rank, ranks):
    """Rank 1 is busy for longer than the deadline, and then goes on."""
    net = make_net()
    model = wrap(net, timeout_s=2.0, busy_timeout_s=30.0)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    began = time.monotonic()
    for step in range(3):
        if rank == 1 and step == 1:
            time.sleep(3.0)
        loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.check()
    return time.monotonic() - began


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_a_rank_that_lives_and_is_busy_for_longer_than_the_deadline_is_waited_for(ranks):
    assert min(run_ranks(busy_in_step_one, ranks)) > 3.0


def evaluate_alone(rank, ranks):
    """Rank 0 evaluates before step 0; the others do not come for a while. What rank 0 printed."""
    model = wrap(make_net(), timeout_s=1.2)
    said = io.StringIO()
    dist.barrier()
    with torch.no_grad(), contextlib.redirect_stdout(said):
        if rank:
            time.sleep(1.0)
        model(batch(0, 0, rank))
    return said.getvalue()


def test_a_rank_that_waits_alone_says_within_seconds_for_whom():
    said, nothing = run_ranks(evaluate_alone, 2)
    assert nothing == "" and len(said.splitlines()) <= 2, said
    assert "rank 0 has waited " in said and "for gather of (root) in step 0; rank 1 lives and has not come" in said
    assert "it was last at check. This ends after 600 s" in said


@pytest.mark.slow
def test_a_rank_that_does_something_else_is_named_before_the_deadline():
    for (text, _, step, _, lost), seconds in run_ranks(in_step_two, 3, "does something else"):
        assert step == 2 and lost == (1,), text
        words = "all ranks are alive and disagree: most wait for save in step 2, rank 1 waits for reduce of "
        assert words in text
        assert seconds < KNOWN_S, f"{seconds:.1f} s"


def die(rank, ranks, where, checks, in_step):
    net = make_net()
    model = wrap(net, checks=checks)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    if where == "on another machine":
        model._engine.faults.local_processes = LocalProcesses()
    began = time.monotonic()

    def steps():
        nonlocal began
        for step in range(5):
            if step == in_step:
                began = time.monotonic()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = outcome(steps)
    return found, time.monotonic() - began


@pytest.mark.parametrize(
    ("ranks", "where", "checks", "in_step"),
    [
        (2, "on this machine", "order", 2),
        (3, "on another machine", "order", 2),  # where its connections tell
        (3, "on this machine", "unit", 2),  # in an exchange through the store, where no connection does
        (2, "on this machine", "unit", 0),  # the deadline is that of the first step
    ],
)
@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_the_survivors(ranks, where, checks, in_step):
    results = run_ranks(die, ranks, where, checks, in_step, allow_exit=(1,))
    for rank in range(ranks):
        if rank != 1:
            (text, unit, step, op, lost), seconds = results[rank]
            assert lost == (1,) and "no sign of life from rank 1" in text, text
            assert ("the process of rank 1 has ended" in text) is (where == "on this machine")
            assert step == in_step and op in ("gather", "reduce", "check") and (unit is not None or op == "check"), text
            assert seconds < KNOWN_S, f"{seconds:.1f} s"


class Unsent:
    """A control channel whose rows do not travel."""

    def start_with(self, row, bits, count, wait):
        return lambda: ([row], bits)


def die_with_a_digest_unsent(rank, ranks):
    """Rank 1 sends no digest in step 1 and is gone before step 2."""
    net = make_net()
    model = wrap(net, checks="order")
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)

    def steps():
        for step in range(3):
            if rank == 1 and step == 1:
                model._engine._order_check._control = Unsent()
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return outcome(steps)


def test_a_rank_that_dies_before_its_digest_travels_is_named_in_the_step_that_waits_for_it():
    """The digest is of step 1 and was sent in its backward; what waits is that step's optimizer."""
    text, unit, step, op, lost = run_ranks(die_with_a_digest_unsent, 2, allow_exit=(1,))[0]
    assert (unit, step, op, lost) == (None, 1, "check", (1,)), text
    assert "the process of rank 1 has ended" in text and "[step 1; op check; rank 1]" in text


def threads_after_a_refused_wrap(rank: int, ranks: int) -> list[str]:
    layers = [nn.Linear(4, 4) for _ in range(1 + rank)]
    with pytest.raises(FsdpError):
        FullyShardedDataParallel(nn.Sequential(*layers), process_group=dist.group.WORLD)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sixfold-fsdp")]


def test_a_refused_wrap_leaves_no_thread():
    assert run_ranks(threads_after_a_refused_wrap, 2) == [[], []]
