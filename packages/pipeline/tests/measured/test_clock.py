"""Two clocks on paper: the offset that is found is within the error that is given."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from queue import SimpleQueue

import pytest

from sixfold.pipeline import Costs, ScheduleError, simulate, zb_v
from sixfold.pipeline.measured.one_clock import clock_offset, gathered
from sixfold.pipeline.simulation.simulate import measured


class Paper:
    """A time that only exchanges move, and a peer whose clock is ``ahead`` and runs ``drift`` faster."""

    def __init__(self, ahead, trips, drift=0.0):
        self.now, self.ahead, self.drift, self.trips = 100.0, ahead, drift, iter(trips)

    def clock(self):
        return self.now

    def exchange(self):
        out, back = next(self.trips)
        self.now += out
        theirs = self.now * (1 + self.drift) + self.ahead
        self.now += back
        return theirs


def test_equal_ways_give_the_offset_exactly_and_the_shortest_trip_wins():
    paper = Paper(-37.5, [(4.0, 1.0), (0.25, 0.25), (1.0, 3.0)])
    found = clock_offset(paper.exchange, paper.clock, rounds=3)
    assert (found.ahead_s, found.error_s) == (-37.5, 0.25)


@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_is_within_the_error_whatever_the_ways(seed):
    rng = random.Random(seed)
    trips = [(rng.expovariate(1000), rng.expovariate(1000)) for _ in range(16)]
    ahead = rng.uniform(-1e4, 1e4)
    paper = Paper(ahead, trips)
    found = clock_offset(paper.exchange, paper.clock)
    assert abs(found.ahead_s - ahead) <= found.error_s + 1e-9
    assert found.error_s == pytest.approx(min(map(sum, trips)) / 2, abs=1e-9)


def test_no_round_is_refused():
    with pytest.raises(ScheduleError, match="rounds is 0; it is >= 1"):
        clock_offset(lambda: 0.0, lambda: 0.0, rounds=0)


class Mailbox:
    """A control channel between ranks that are threads."""

    def __init__(self, queues, rank):
        self.queues, self.rank = queues, rank

    def send(self, data, peer):
        self.queues[self.rank, peer].put(data)

    def receive(self, peer):
        return self.queues[peer, self.rank].get(timeout=10)


def test_events_of_ranks_whose_clocks_differ_come_together_on_that_of_rank_0():
    program = zb_v(3, 4)
    true = simulate(program, Costs.per_rank(program, hop=0.25))
    ahead = (1e5, -3e4, 7e6)
    queues = {pair: SimpleQueue() for pair in product(range(3), repeat=2)}
    begin = time.perf_counter()

    def run(rank):
        def clock():
            return time.perf_counter() + ahead[rank]

        mine = [(r, a, s + begin + ahead[r], e + begin + ahead[r]) for r, a, s, e in true.events if r == rank]
        return gathered(mine, rank=rank, ranks=3, channel=Mailbox(queues, rank), clock=clock)

    with ThreadPoolExecutor(3) as pool:
        found, *others = pool.map(run, range(3))
    assert others == [None, None]
    assert [event[:2] for event in found] == [event[:2] for event in true.events]
    for (*_, start, end), (*_, start_true, end_true) in zip(found, true.events, strict=True):
        assert (start, end) == pytest.approx((start_true, end_true), abs=0.05)  # half the shortest of 16 round trips
    assert measured(found).makespan == pytest.approx(true.makespan, abs=0.1)
