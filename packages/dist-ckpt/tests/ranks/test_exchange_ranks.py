"""Reports of many ranks go up a tree: who speaks with whom, what travels, and what is said of a rank that is lost."""

import os
import signal
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, LostPeerError, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.collectives import exchange
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.plans.shard_table import Encoded
from sixfold.dist_ckpt.stores import LocalStore
from sixfold.dist_ckpt.strategies.base import SaveShardedStrategy
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

PEERS = [{1, 2, 3}, {0}, {0}, {0, 4}, {3}]  # of 5 ranks: 0 collects 1 and 2, 3 collects 4
DOWN = [4, 0, 0, 1, 0]


def caught(action):
    try:
        return action()
    except CheckpointError as error:
        return type(error).__name__, str(error)


def shard(rank, ranks):
    return ShardedTensor.from_rank_offsets("w", torch.full((3,), float(rank)), (0, rank, ranks))


def speak(rank, ranks, folder):
    """What is decided, what an error becomes, and whom this rank has sent something to."""
    exchange.STAR_RANKS = 2
    everyone, sent, plain = Exchange("world", 20), [], dist.isend

    def counted(tensor, **options):
        sent.append((options["group_dst"], tensor.numel() * tensor.element_size()))
        return plain(tensor, **options)

    dist.isend = counted
    rows = memoryview(bytearray([rank]) * 5000)
    report = Encoded(b"names" * 1000, 1, bytes(rows))
    _, seen = everyone.all_reduce(
        lambda: (None, (rank, report)),
        lambda found: [(number, bytes(one.rows) == bytes([number]) * 5000, one.names) for number, one in found],
    )
    told, sent[:] = list(sent), []
    own = everyone.reduce_scatter(lambda: (None, rank), lambda found: ("all", [bytes([n]) * 50000 for n in found]))
    parts, sent[:] = (own[1], own[2], sum(nbytes for peer, nbytes in sent if peer > rank)), []

    def fail():
        if rank == 4:
            raise ValueError("my own bug")
        return None, None

    error = caught(lambda: everyone.all_reduce(fail, lambda _: None))
    dist.isend = plain
    dist_ckpt.save({"w": shard(rank, ranks)}, folder / "c")
    loaded = dist_ckpt.load({"w": shard(rank, ranks)}, folder / "c")
    hole = caught(lambda: dist_ckpt.save({"w": shard(rank, ranks)} if rank != 4 else {}, folder / "d"))
    return seen, told, parts, error, loaded["w"].tolist(), hole


@pytest.mark.slow
def test_reports_come_in_rank_order_through_a_tree_and_errors_are_the_same_everywhere(tmp_path):
    results = run_ranks(speak, 5, tmp_path)
    expected = [(rank, True, b"names" * 1000) for rank in range(5)]
    for rank, (seen, told, parts, error, values, hole) in enumerate(results):
        assert seen == expected
        assert parts[:2] == ("all", bytes([rank]) * 50000), "each rank's own part of a decision"
        assert 0 <= parts[2] - 50000 * DOWN[rank] < 1000, "and nobody's but of those whom a rank hands it on to"
        assert {peer for peer, _ in told} == PEERS[rank]
        assert error == ("CheckpointError", "rank 4: ValueError: my own bug")
        assert values == [float(rank)] * 3
        assert hole == results[0][5] and "w[12:15]" in hole[1]
    up = [(peer, nbytes) for peer, nbytes in results[3][1] if peer == 0]
    assert len(up) == 2, "the head and the rest of the reports of two ranks"
    assert sum(nbytes for _, nbytes in up) < 10000 * 2 + 1000


def count_messages(rank, ranks, folder):
    """The messages that this rank sends in a load of a model, and how many it had asked for when it sent the first."""
    model, sent, asked = torch.nn.Linear(3, 3), [], []
    optimizer = torch.optim.AdamW(model.parameters())
    dist_ckpt.save({"model": model, "optimizer": optimizer}, folder / "c")
    plain_send, plain_receive = dist.isend, dist.irecv

    def counted(tensor, **options):
        sent.append((tensor.numel(), len(asked)))
        return plain_send(tensor, **options)

    def heard(tensor, **options):
        asked.append(tensor.numel())
        return plain_receive(tensor, **options)

    dist.isend, dist.irecv = counted, heard
    try:
        dist_ckpt.load({"model": model, "optimizer": optimizer}, folder / "c")
        loads, sent[:] = list(sent), []
        dist_ckpt.load({"w": torch.zeros(3)}, folder / "c", strict="ignore_all")
    finally:
        dist.isend, dist.irecv = plain_send, plain_receive
    return loads, len(sent)


def test_a_load_of_a_small_model_is_three_messages_up_and_three_down_and_without_objects_two(tmp_path):
    for rank, (loads, without) in enumerate(run_ranks(count_messages, 3, tmp_path)):
        peers = 1 if rank else 2  # of rank 0, who hears from both and tells both
        assert [nbytes for nbytes, _ in loads] == [exchange._HEAD_BYTES] * 3 * peers, "what is small has one part"
        assert loads[0][1] == peers, "a decision is asked for before the report, and all reports at once"
        assert without == 2 * peers


def lose_one(rank, ranks, dies):
    exchange.STAR_RANKS = 2
    everyone = Exchange("world", 20 if dies else 0.8)
    everyone.all_reduce(lambda: (None, None), lambda _: None)
    if rank == 4:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2.5)
        return None
    start = time.monotonic()
    found = caught(lambda: everyone.all_reduce(lambda: (None, None), lambda _: None))
    return found, time.monotonic() - start


@pytest.mark.slow
def test_a_rank_that_is_late_is_named_by_the_one_that_waits_for_it():
    results = run_ranks(lose_one, 5, False)
    late = "is dead, absent or later than timeout_s=0.8"
    for rank, who in ((0, "rank 3, which speaks for ranks 3 to 4, of 5"), (3, "rank 4 of 5")):
        (kind, text), seconds = results[rank]
        assert (kind, text.startswith(f"{who} {late}")) == (LostPeerError.__name__, True), text
        assert seconds < 2.4


@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_all_though_it_reports_to_one():
    results = run_ranks(lose_one, 5, True, allow_exit=(4,))
    for (kind, text), seconds in results[:4]:
        assert (kind, text.startswith("rank 4 of 5 is dead")) == (LostPeerError.__name__, True), text
        assert seconds < 10


def star(rank, ranks):
    above, below = Exchange("world", 20)._neighbours()
    return above, below


def test_few_ranks_speak_with_the_first_one():
    assert run_ranks(star, 3) == [(None, [1, 2]), (0, []), (0, [])]


def test_a_thousand_ranks_speak_with_few_others():
    """Everyone reports to the one that expects it, and what reaches the first rank is in the order of the ranks."""
    ranks, links = 1024, {}
    for rank in range(ranks):
        one = object.__new__(Exchange)
        one.rank, one.ranks = rank, ranks
        links[rank] = one._neighbours()

    def below(rank):
        return [rank, *(found for peer in links[rank][1] for found in below(peer))]

    assert below(0) == list(range(ranks))
    assert all(rank in links[above][1] for rank, (above, _) in links.items() if rank)
    assert max(len(peers) + (above is not None) for above, peers in links.values()) == 62


def fail_before_the_first_exchange(rank, ranks, folder):
    """What each rank is told where one cannot begin, while the others exchange first who writes and reads what."""
    seen, wrapped = [], FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    parallel = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    dist_ckpt.save({"w": shard(rank, ranks)}, folder / "c", wrapped)
    state = {"w": shard(rank, ranks)}
    for victim in range(ranks):
        place = 7 if rank == victim else folder / "c"
        seen.append(caught(lambda place=place: dist_ckpt.save(state, place, wrapped, timeout_s=20)))
        seen.append(caught(lambda place=place: dist_ckpt.load(state, place, parallel, timeout_s=20)))
    return seen, dist_ckpt.load({"w": shard(rank, ranks)}, folder / "c", parallel)["w"].tolist()


def test_a_rank_that_cannot_begin_is_told_of_where_the_others_share_out_the_work_first(tmp_path):
    results = run_ranks(fail_before_the_first_exchange, 2, tmp_path)
    for rank, (seen, values) in enumerate(results):
        assert seen == results[0][0]
        assert {kind for kind, _ in seen} == {"CheckpointError"}
        assert all("is 7" in text or "int" in text for _, text in seen)
        assert values == [float(rank)] * 3


class Odd(TorchDistSaveShardedStrategy):
    def engine(self):
        raise ValueError("my own bug")


def save_by_an_odd_strategy(rank, ranks, folder):
    strategy = Odd() if rank else TorchDistSaveShardedStrategy()
    try:
        dist_ckpt.save({"w": shard(rank, ranks)}, folder / "c", strategy, timeout_s=20)
    except Exception as error:
        return type(error).__name__, str(error)


def test_any_error_before_the_first_exchange_is_told_to_all(tmp_path):
    told = run_ranks(save_by_an_odd_strategy, 2, tmp_path)
    assert told == [("CheckpointError", "rank 1: ValueError: my own bug"), ("ValueError", "my own bug")]


class Meeting(SaveShardedStrategy):
    """A user's strategy whose ranks wait for each other."""

    entered = False

    @property
    def can_handle_sharded_objects(self):
        return True

    def save(self, sharded_state_dict, checkpoint_dir):
        Meeting.entered = True
        dist.barrier()


def save_where_one_rank_does_not_see_the_folder(rank, ranks, folder):
    if rank:
        LocalStore.join = lambda *_: (folder / "of-another-disk").rename(folder / "x")
    try:
        dist_ckpt.save({"w": shard(rank, ranks)}, folder / "c", Meeting("meeting", 1), timeout_s=20)
    except CheckpointError as error:
        told = type(error).__name__, "of-another-disk" in str(error), Meeting.entered
    dist.barrier()  # the first rank tells the others before it removes what it has made
    return told, os.listdir(folder)


def test_a_rank_that_cannot_join_is_told_of_before_any_enters_a_strategys_collectives(tmp_path):
    assert (
        run_ranks(save_where_one_rank_does_not_see_the_folder, 2, tmp_path) == [(("StorageError", True, False), [])] * 2
    )


def objects_of_a_class_of_ones_own(rank, ranks, folder):
    class Mine(ShardedObject):
        def __init__(self, data):
            super().__init__("o", data, (ranks,), (rank,))

    dist_ckpt.save({"o": Mine(rank)}, folder, timeout_s=20.0)
    with pytest.raises(CheckpointError, match="local object"):
        Exchange("world", 20.0).all_reduce(lambda: (None, Mine if rank else None), lambda _: None)
    return dist_ckpt.load({"o": Mine(None)}, folder, timeout_s=20.0)["o"]


def test_objects_of_a_class_that_no_pickle_knows_are_saved_and_what_cannot_travel_is_told_to_all(tmp_path):
    assert run_ranks(objects_of_a_class_of_ones_own, 2, tmp_path / "c") == [0, 1]


def send_what_only_this_rank_knows(rank, ranks, sender, star):
    """An object of a module that one rank alone has: in a report, in a decision, in a rank's own part of one."""
    exchange.STAR_RANKS = star
    everyone, sent = Exchange("world", 20), rank
    if rank == sender:
        sys.modules["only_here"] = module = types.ModuleType("only_here")
        module.Odd = type("Odd", (), {"__module__": "only_here"})
        sent = module.Odd()
    start = time.monotonic()
    report = caught(lambda: everyone.all_reduce(lambda: (None, sent), lambda _: None))
    decision = caught(lambda: everyone.all_reduce(lambda: (None, None), lambda _: sent if sender == 0 else None)[1])
    part = caught(lambda: everyone.reduce_scatter(lambda: (None, None), lambda _: (None, [sent] * ranks))[2])
    after = everyone.all_reduce(lambda: (None, rank), sum)[1]
    known = [found if isinstance(found, tuple) else type(found).__name__ for found in (decision, part)]
    return report, known, after, time.monotonic() - start


@pytest.mark.parametrize("star", [64, 2])
@pytest.mark.slow
def test_a_message_that_cannot_be_unpickled_is_a_typed_error_on_all_ranks_that_names_its_sender(star):
    results = run_ranks(send_what_only_this_rank_knows, 5, 4, star)
    for report, _, after, seconds in results:
        assert report == results[0][0] and report[0] == "CheckpointError"
        assert report[1].startswith(
            "rank 4 sent what cannot be read here (ModuleNotFoundError: No module named 'only_h"
        )
        assert after == 10
        assert seconds < 10, "nobody has waited for the deadline"


@pytest.mark.parametrize("star", [64, 2])
@pytest.mark.slow
def test_a_decision_that_cannot_be_unpickled_is_a_typed_error_where_it_is_not_read_and_no_wait_for_others(star):
    results = run_ranks(send_what_only_this_rank_knows, 5, 0, star)
    assert results[0][1] == ["Odd", "Odd"]
    for report, found, after, seconds in results[1:]:
        assert report == (None, None)
        for kind, text in found:
            assert kind == "CheckpointError"
            assert text.startswith("rank 0 sent what cannot be read here (ModuleNotFoundError")
        assert after == 10
        assert seconds < 10
