"""The course of a run through its generations, against a world of processes that is made of sets."""

import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.gpt.elastic.generation import Lost
from sixfold.gpt.elastic.next_generation import GRACE_S, Course, End, Fork, Form, Forward, Kill, Phase, TellOver
from sixfold.gpt.launch.spawn import Failure
from sixfold.gpt.launch.stop_signals import ENDED, STOPPED

PATIENCE_S = 5.0


def failure(text="killed", *, final=False, at=0.0):
    return Failure(rank=0, time=at, text=text, final=final)


@dataclass
class World:
    """Processes as sets: what a supervisor would have, without one."""

    course: Course
    now: float = 100.0
    alive: set = field(default_factory=set)
    forms: list = field(default_factory=list)
    end: End | None = None
    asked_to_drop: dict = field(default_factory=dict)  # member -> generation that it is to drop
    dropped: set = field(default_factory=set)  # (member, generation) that said ready
    asked_to_stop: set = field(default_factory=set)
    places: dict = field(default_factory=dict)  # member -> place

    def do(self, commands):
        for command in commands:
            assert self.end is None, f"{command} after the end"
            if isinstance(command, Fork):
                assert command.member not in self.alive
                self.alive.add(command.member)
            elif isinstance(command, Kill):
                self.alive.discard(command.member)
            elif isinstance(command, TellOver):
                assert command.generation == self.forms[-1].generation
                self.asked_to_drop[command.member] = command.generation
            elif isinstance(command, Form):
                self.formed(command)
            elif isinstance(command, Forward):
                self.asked_to_stop.add(command.member)
            else:
                self.end = command
        return self

    def formed(self, form):
        assert form.generation == len(self.forms) + 1
        assert len(form.members) == len(set(form.members)) == len(set(form.places)) == len(form.places)
        assert set(form.members) <= self.alive and len(form.members) in (self.course.sizes or (self.course.ranks,))
        if not self.course.sizes:
            assert len(form.members) == self.course.ranks
        for member, place in zip(form.members, form.places, strict=True):
            assert self.places.setdefault(member, place) == place, "a process keeps its device"
        for member in form.members:
            if self.forms and member in self.forms[-1].members:
                assert (member, self.forms[-1].generation) in self.dropped, "it has dropped what it had"
        if self.forms and len(self.forms[-1].members) == len(form.members):
            before = self.forms[-1]
            for rank, member in enumerate(form.members):
                if member in before.members:
                    assert before.members.index(member) == rank, "a survivor keeps its rank"
            lost = {one.rank for one in form.lost}
            changed = {r for r, m in enumerate(before.members) if m != form.members[r]}
            assert lost == changed or (not changed and form.lost == before.lost)
        self.forms.append(form)

    def die(self, member):
        self.alive.discard(member)
        self.do(self.course.died(member, failure(), self.now))

    def drop(self, member):
        generation = self.asked_to_drop[member]
        self.dropped.add((member, generation))
        self.do(self.course.ready(member, generation))

    def drop_all(self):
        """Every survivor answers."""
        for member in sorted(self.alive & self.asked_to_drop.keys()):
            if self.end is None and self.asked_to_drop[member] == self.course.generation:
                self.drop(member)
        return self

    def resize(self, ranks):
        self.do(self.course.resized(ranks, self.now))
        return self

    def pass_time(self, seconds):
        self.now += seconds
        self.do(self.course.tick(self.now, PATIENCE_S))


def world(ranks=4, spares=1, attempts=3, **options):
    course = Course(ranks=ranks, spares=spares, attempts=attempts, **options)
    return World(course).do(course.begin())


def test_a_run_begins_with_its_ranks_and_spares_and_ends_with_the_largest_status_when_all_are_done():
    one = world(ranks=3, spares=2)
    assert one.forms[0].members == (0, 1, 2) and one.course.idle == [3, 4]
    for member, status in ((0, 0), (2, STOPPED), (1, 0)):
        assert one.end is None
        one.do(one.course.done(member, 1, status))
    assert one.end == End(status=STOPPED)


def test_a_spare_takes_the_place_of_the_dead_when_all_survivors_have_dropped_what_they_had():
    one = world()
    one.die(2)
    assert one.asked_to_drop == {0: 1, 1: 1, 3: 1}
    for member in (3, 0):
        one.drop(member)
        assert len(one.forms) == 1
    one.drop(1)
    assert one.forms[1].members == (0, 1, 4, 3)
    assert one.forms[1].lost == (Lost(rank=2, member=2, failure=failure()),)
    assert one.course.idle == [5], "another spare is there for the next time"


def test_without_a_spare_a_new_process_is_started_beside_the_survivors_work():
    one = world(ranks=2, spares=0)
    one.die(0)
    assert 2 in one.alive and len(one.forms) == 1
    one.drop(1)
    assert one.forms[1].members == (2, 1)


def test_a_run_of_one_rank_begins_anew_at_once():
    one = world(ranks=1, spares=0)
    one.die(0)
    assert one.forms[1].members == (1,)


def test_who_dies_during_a_recovery_is_replaced_too_and_its_word_is_not_waited_for():
    one = world(ranks=3)
    one.die(0)
    one.drop(1)
    one.die(2)
    assert one.forms[1].members == (3, 1, 4)
    assert [lost.rank for lost in one.forms[1].lost] == [0, 2]


def test_a_survivor_that_does_not_drop_in_time_is_killed_and_replaced():
    one = world(ranks=3)
    one.die(0)
    one.drop(1)
    one.pass_time(PATIENCE_S - 0.1)
    assert len(one.forms) == 1
    one.pass_time(0.2)
    assert one.forms[1].members == (3, 1, 4) and 2 not in one.alive
    assert "rank 2 did not drop the generation within 5.0 s" in one.forms[1].lost[1].failure.text


def test_a_dead_rank_is_the_cause_of_its_peers_errors_though_they_come_first():
    one = world(ranks=2)
    one.do(one.course.failed(0, 1, failure("peer closed", final=True), True, one.now))
    one.pass_time(GRACE_S / 2)
    one.die(1)
    one.pass_time(2 * GRACE_S)
    assert one.end is None and one.asked_to_drop == {0: 1}


def test_an_error_that_blames_no_peer_is_the_cause_and_its_process_is_replaced():
    one = world(ranks=3)
    one.do(one.course.failed(0, 1, failure("peer closed", at=1.0), True, one.now))
    one.do(one.course.failed(1, 1, failure("device lost", at=2.0), False, one.now))
    one.pass_time(2 * GRACE_S)
    assert 1 not in one.alive and one.asked_to_drop == {0: 1, 2: 1}


def test_if_all_blame_a_peer_nobody_is_replaced_but_who_does_not_answer():
    one = world(ranks=3)
    one.do(one.course.failed(0, 1, failure("rank 2 is late"), True, one.now))
    one.pass_time(2 * GRACE_S)
    assert one.asked_to_drop == {0: 1, 1: 1, 2: 1}
    one.drop(0)
    one.drop(1)
    one.pass_time(PATIENCE_S + 0.1)
    assert one.forms[1].members == (0, 1, 3)


@pytest.mark.parametrize("tellers", [(0, 1, 2, 3), (2,), (1, 3)])
def test_ranks_that_an_error_accuses_are_all_replaced_whoever_tells_it(tellers):
    """All ranks know who is in the minority, and not all of them may come to say so."""
    one, accused = world(), {1: "rank 1 has other bits", 2: "rank 2 has other bits"}
    for member in tellers:
        one.do(one.course.failed(member, 1, failure("ranks 1, 2"), True, one.now, accused=accused))
    one.pass_time(2 * GRACE_S)
    assert {1, 2}.isdisjoint(one.alive) and one.asked_to_drop == {0: 1, 3: 1}
    one.drop(0)
    one.drop(3)
    [_, form] = one.forms
    assert form.members == (0, 4, 5, 3)
    assert [lost.why for lost in form.lost] == list(accused.values())


def test_whoever_was_accused_in_one_generation_is_not_in_the_next():
    one = world(ranks=2)
    one.do(one.course.failed(0, 1, failure(), True, one.now, accused={1: "rank 1 has other bits"}))
    one.die(1)
    one.drop(0)
    one.do(one.course.failed(0, 2, failure("of a device"), False, one.now))
    one.pass_time(2 * GRACE_S)
    assert [lost.rank for lost in one.forms[1].lost] == [1] and 0 not in one.alive and 2 in one.alive


def test_a_generation_that_ends_without_a_loss_says_why():
    one = world(ranks=2)
    for member in (0, 1):
        one.do(one.course.failed(member, 1, failure(f"rank {member}: no majority", at=1.0 + member), True, one.now))
    one.pass_time(0.0)
    one.drop(0)
    one.drop(1)
    assert (one.forms[1].lost, one.forms[1].cause) == ((), "rank 0: no majority")
    one.die(1)
    one.drop(0)
    assert one.forms[2].cause == ""


def test_an_error_that_would_come_again_ends_the_run_with_its_text():
    one = world(ranks=2)
    one.do(one.course.failed(0, 1, failure("the cause", final=True), False, one.now))
    one.do(one.course.failed(1, 1, failure("rank 0: the cause", final=True), True, one.now))
    one.pass_time(0.0)
    assert one.end is not None and one.end.failure.text == "the cause"


def test_recoveries_without_progress_are_counted_and_progress_begins_the_count_anew():
    one = world(ranks=1, attempts=2)
    for step in range(1, 6):
        one.course.progressed(step)
        one.die(one.course.members[0])
        one.die(one.course.members[0])
    assert one.end is None
    one.die(one.course.members[0])
    assert "killed; the run was recovered 2 times and did no step beyond 5 (elastic.attempts)" in one.end.failure.text


def test_a_stop_before_the_first_step_ends_at_once_and_a_later_one_is_told_to_all_and_kept_for_the_next_generation():
    one = world(ranks=2)
    one.do(one.course.stop(begun=False))
    assert one.end == End(status=STOPPED, at_once=True)
    one = world(ranks=2)
    one.die(0)
    one.do(one.course.stop(begun=True))
    assert one.asked_to_stop == {1, 2}
    one.drop(1)
    assert one.forms[1].stop
    one.do(one.course.stop_at_once())
    assert one.end.failure.exit_code == ENDED


def test_words_of_an_older_generation_change_nothing():
    one = world(ranks=2)
    one.die(0)
    one.drop(1)
    for event in (
        lambda: one.course.ready(1, 1),
        lambda: one.course.done(1, 1, 0),
        lambda: one.course.failed(1, 1, failure("late", final=True), False, one.now),
        lambda: one.course.died(0, failure(), one.now),
        lambda: one.course.silent(0, failure(), one.now),
    ):
        assert event() == []
    one.pass_time(60)
    assert one.end is None and len(one.forms) == 2


def test_where_lost_ones_are_not_replaced_the_run_goes_on_with_fewer_and_with_more_when_they_come_back():
    one = world(ranks=4, spares=0, sizes=(4, 2, 1), replaces=False)
    one.die(1)
    one.drop_all()
    assert one.forms[1].members == (0, 2) and one.course.idle == [3], "three are there, and two have a layout"
    one.die(0)
    one.drop_all()
    assert one.forms[2].members == (3, 2) and one.course.idle == []
    one.die(2)
    one.drop_all()
    assert one.forms[3].members == (3,)
    assert len(one.alive) == 1
    one.course.progressed(1)
    one.resize(4)
    assert one.alive == {3, 4, 5, 6}, "new ones start while the old one drops its generation"
    one.drop_all()
    assert one.forms[4].members == (3, 4, 5, 6) and one.forms[4].cause == "it was asked for" and one.forms[4].lost == ()
    assert one.forms[4].places == (3, 0, 1, 2), "who was there keeps its device"


def test_a_spare_has_a_device_of_its_own_and_takes_none_that_broke():
    one = world(ranks=2, spares=1, sizes=(2, 1), replaces=False)
    one.die(0)
    one.drop_all()
    assert (one.forms[1].members, one.forms[1].places) == ((2, 1), (2, 1))
    one.die(2)
    one.drop_all()
    assert (one.forms[2].members, one.forms[2].places) == ((1,), (1,))
    one.die(1)
    assert "no size of [1, 2] ranks has a process for each (elastic.replace is false)" in one.end.failure.text


def test_a_run_is_resized_down_and_up_and_no_process_is_too_many():
    one = world(ranks=4, spares=1, sizes=(4, 2, 1))
    one.resize(2).drop_all()
    assert one.forms[1].members == (0, 1) and len(one.alive) == 3
    one.resize(2)
    assert len(one.forms) == 2, "it has that size"
    one.die(1)
    one.drop_all()
    assert len(one.forms[2].members) == 2, "a lost one is replaced"
    one.resize(4).drop_all()
    assert len(one.forms[3].members) == 4 and len(one.alive) == 5
    assert one.course._recoveries == 1, "to be resized is no recovery"


def test_a_resize_that_overtakes_a_recovery_takes_its_reason_along():
    one = world(ranks=2, spares=1, sizes=(2, 1))
    one.course.progressed(5)
    one.die(1)
    one.drop_all()
    one.resize(1).drop_all()
    assert [lost.why for lost in one.forms[2].lost] == [lost.why for lost in one.forms[1].lost] != []
    one.course.progressed(6)
    one.resize(2).drop_all()
    assert one.forms[3].lost == ()


def test_who_is_asked_for_another_size_during_a_recovery_forms_that_one():
    one = world(ranks=4, spares=0, sizes=(4, 2, 1))
    one.die(0)
    one.resize(1).drop_all()
    assert one.forms[1].members == (1,) and len(one.alive) == 1
    one.resize(4)
    one.die(1)
    one.drop_all()
    assert len(one.forms[2].members) == 4


KINDS = ["die", "silent", "fail", "fail-final", "accuse", "drop", "late", "stall", "time", "resize"]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*KINDS, "die", "drop", "drop"]),
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.integers(1, 4),
    spares=st.integers(0, 2),
    events=EVENTS,
    sizes=st.sampled_from([(), (4, 2, 1), (4, 3, 2, 1)]),
    replaces=st.booleans(),
)
def test_in_any_order_of_faults_generations_are_whole_and_a_quiet_world_always_goes_on(
    ranks, spares, events, sizes, replaces
):
    sizes = sizes and (ranks, *(size for size in sizes if size < ranks))
    one = world(ranks, spares, attempts=100, sizes=sizes, replaces=replaces)
    for step, (kind, number) in enumerate(events, 1):
        if one.end is not None:
            break
        if not one.alive:
            break
        member = sorted(one.alive)[number % len(one.alive)]
        if kind == "die":
            one.die(member)
        elif kind == "silent":
            one.do(one.course.silent(member, failure("stopped"), one.now))
        elif kind == "fail":
            one.do(one.course.failed(member, one.course.generation, failure("own"), number % 2 == 0, one.now))
        elif kind == "accuse":
            why = {number % len(one.course.members): "other bits"}
            one.do(one.course.failed(member, one.course.generation, failure("two"), True, one.now, accused=why))
        elif kind == "fail-final" and number == 7:
            one.do(one.course.failed(member, one.course.generation, failure("own", final=True), False, one.now))
        elif kind == "drop" and one.asked_to_drop.get(member) == one.course.generation:
            one.drop(member)
        elif kind == "late":
            older = one.course.generation - 1 - number
            assert one.course.ready(member, older) == one.course.done(member, older, 0) == []
        elif kind == "resize":
            if sizes:
                one.resize(sizes[number % len(sizes)])
        elif kind == "stall":
            one.do(one.course.stalled(failure("no step"), one.now))
        else:
            one.pass_time(number / 2)
        one.course.progressed(step)
    for _ in range(3):  # no more faults: survivors answer, time passes
        one.drop_all()
        if one.end is None:
            one.pass_time(2 * GRACE_S)
    assert one.course.phase in (Phase.RUNNING, Phase.ENDED)
    if one.course.phase is Phase.RUNNING:
        assert set(one.course.members) <= one.alive and set(one.course.idle) <= one.alive
        if replaces and sizes:
            assert len(one.course.members) == one.course.ranks and len(one.course.idle) <= max(spares, 0)
        for member in one.course.members:
            one.do(one.course.done(member, one.course.generation, 0))
        assert one.end == End(status=0)


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("drops_between", range(3))
def test_every_pair_of_deaths_of_three_ranks_leads_to_a_whole_generation(first, second, drops_between):
    one = world(ranks=3, spares=0)
    one.die(first)
    for member in sorted(one.alive & one.asked_to_drop.keys())[:drops_between]:
        one.drop(member)
    rank_of_second = one.course.members[second]
    if rank_of_second in one.alive:
        one.die(rank_of_second)
    for member in sorted(one.alive & one.asked_to_drop.keys()):
        if one.asked_to_drop[member] == one.course.generation and one.course.phase is Phase.GATHERING:
            one.drop(member)
    assert one.course.phase is Phase.RUNNING and set(one.course.members) <= one.alive


def test_it_has_no_clock_of_its_own(monkeypatch):
    monkeypatch.setattr(time, "monotonic", None)
    one = world(ranks=2)
    one.die(0)
    one.pass_time(PATIENCE_S + 1)
    assert len(one.forms) == 2
