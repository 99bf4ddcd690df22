"""The course of a run on several nodes, which come and go, and whose leader dies, against a world made of sets."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.gpt.elastic.generation import Generation, Held
from sixfold.gpt.elastic.next_generation import GRACE_S, Course, End, Fork, Form, Kill, Phase, TellOver
from sixfold.gpt.launch.spawn import Failure

PATIENCE_S = 5.0


def failure(text="killed"):
    return Failure(rank=0, time=0.0, text=text)


@dataclass
class World:
    """What is alive on which node, what it was told, and what it has dropped."""

    per_node: int
    count: int
    spares: int = 0
    sizes: tuple = ()
    replaces: bool = True
    now: float = 100.0
    node_of: dict = field(default_factory=dict)  # of members that live
    told: dict = field(default_factory=dict)  # member -> the Generation that it was told of last
    busy: set = field(default_factory=set)  # members that have not dropped that
    over: dict = field(default_factory=dict)  # member -> generation that it was told is over
    forms: list = field(default_factory=list)
    end: End | None = None
    dies_forming: int | None = None  # the leader dies when so many members have been told of the next generation

    def __post_init__(self):
        self.nodes = set(range(self.count))
        self.course = self.new_course()
        self.do(self.course.begin(sorted(self.nodes)))

    def new_course(self):
        return Course(
            ranks=self.per_node * self.count, per_node=self.per_node, spares=self.spares, attempts=1000,
            sizes=self.sizes, replaces=self.replaces,
        )  # fmt: skip

    def do(self, commands):
        for command in commands:
            assert self.end is None, f"{command} after the end"
            if isinstance(command, Fork):
                assert command.member not in self.node_of and command.node in self.nodes
                self.node_of[command.member] = command.node
            elif isinstance(command, Kill):
                self.forget(command.member)
            elif isinstance(command, TellOver):
                self.over[command.member] = command.generation
            elif isinstance(command, Form):
                if not self.formed(command):
                    self.leader_dies()
                    return
            elif isinstance(command, End):
                self.end = command

    def formed(self, form):
        assert all(form.generation > known.number for known in self.told.values()), "no member knows it yet"
        assert {*form.members} <= self.node_of.keys() and len({*form.members}) == len(form.members)
        assert len(form.members) in (self.sizes or (self.per_node * self.count,))
        assert [self.node_of[member] for member in form.members] == list(form.nodes)
        assert len({*zip(form.nodes, form.places, strict=True)}) == len(form.members), "a device has one rank"
        most = self.per_node + (0 if self.replaces else self.spares)
        assert all(place < most for place in form.places), "a node has no other devices"
        assert not self.busy & {*form.members}, "it has dropped what it had"
        self.forms.append(form)
        for told, (rank, member) in enumerate(enumerate(form.members)):
            if told == self.dies_forming:
                self.dies_forming = None
                return False
            self.told[member] = Generation(
                number=form.generation, rank=rank, place=form.places[rank], size=len(form.members), store="",
                nodes=form.nodes, wanted=form.wanted,
            )  # fmt: skip
            self.busy.add(member)
        return True

    def forget(self, member):
        for known in (self.node_of, self.told, self.over):
            known.pop(member, None)
        self.busy.discard(member)

    def die(self, member):
        self.forget(member)
        self.do(self.course.died(member, failure(), self.now))

    def lose(self, node):
        self.nodes.discard(node)
        for member in [one for one, of in self.node_of.items() if of == node]:
            self.forget(member)
        self.do(self.course.node_lost(node, f"rank {{rank}} was lost with node {node}", self.now))

    def join(self, node):
        self.nodes.add(node)
        self.do(self.course.node_joined(node, self.now))

    def leader_dies(self):
        """With its node, the first one; the others tell the next leader what they have."""
        first = min(self.nodes)
        self.nodes.discard(first)
        for member in [one for one, of in self.node_of.items() if of == first]:
            self.forget(member)
        held = {
            node: [
                Held(member=one, generation=self.told.get(one), busy=one in self.busy)
                for one, of in sorted(self.node_of.items())
                if of == node
            ]
            for node in self.nodes
        }
        self.over.clear()
        if not any(one.generation for members in held.values() for one in members):
            self.end = End(at_once=True)  # nobody is left who knows the run; nodes.py begins it anew
            return
        self.course = self.new_course()
        self.do(self.course.take_over(held, self.now))

    def drop(self, member):
        self.busy.discard(member)
        self.over.pop(member)
        self.do(self.course.ready(member, self.told[member].number))

    def drop_all(self):
        for member in sorted(self.over):
            if self.end is None and member in self.over and member in self.busy:
                self.drop(member)
        return self

    def pass_time(self, seconds):
        self.now += seconds
        self.do(self.course.tick(self.now, PATIENCE_S))

    def best(self):
        """The largest size for which the nodes that live have room."""
        most = min(self.course.ranks, sum(self.course._rooms.values()))
        return max((size for size in self.sizes or (self.per_node * self.count,) if size <= most), default=0)


def test_ranks_of_a_node_are_neighbours_and_each_node_has_its_own_devices_and_spares():
    one = World(per_node=2, count=2, spares=1)
    [form] = one.forms
    assert form.nodes == (0, 0, 1, 1) and form.places == (0, 1, 0, 1)
    assert sorted(one.node_of.values()) == [0, 0, 0, 1, 1, 1]


def test_a_lost_rank_is_replaced_on_its_node():
    one = World(per_node=2, count=2, spares=1)
    one.die(one.forms[0].members[3])
    one.drop_all()
    assert one.forms[1].nodes == (0, 0, 1, 1) and one.forms[1].places == (0, 1, 0, 1)
    assert one.forms[1].members[:3] == one.forms[0].members[:3]


def test_a_lost_node_takes_its_ranks_with_it_and_brings_them_back():
    one = World(per_node=2, count=2, sizes=(4, 2))
    one.lose(1)
    one.drop_all()
    assert one.forms[1].nodes == (0, 0) and [lost.why for lost in one.forms[1].lost] == [
        "rank 2 was lost with node 1", "rank 3 was lost with node 1",
    ]  # fmt: skip
    first = one.forms[1].members
    one.course.progressed(1)
    one.join(1)
    one.drop_all()
    assert one.forms[2].nodes == (0, 0, 1, 1) and one.forms[2].members[:2] == first
    assert one.forms[2].cause == "node 1 has joined" and one.forms[2].lost == ()


def test_without_the_node_there_is_no_size_and_the_run_ends():
    one = World(per_node=2, count=2)
    one.lose(1)
    one.drop_all()
    assert one.end is not None and "no size of [4] ranks has a process for each" in one.end.failure.text


def test_spares_of_other_nodes_take_the_ranks_of_a_lost_node_where_they_have_devices():
    one = World(per_node=2, count=3, spares=1, sizes=(6, 5, 3), replaces=False)
    one.lose(2)
    one.drop_all()
    assert one.forms[1].nodes == (0, 0, 0, 1, 1, 1) and one.forms[1].places == (0, 1, 2, 0, 1, 2)
    one.die(one.forms[1].members[3])
    one.drop_all()
    assert one.forms[2].nodes == (0, 0, 0, 1, 1) and one.forms[2].places == (0, 1, 2, 1, 2)


def test_a_node_that_joins_during_a_recovery_is_in_the_generation_that_is_formed():
    one = World(per_node=1, count=3, sizes=(3, 2, 1))
    one.lose(2)
    one.join(2)
    one.drop_all()
    assert len(one.forms) == 2 and one.forms[1].nodes == (0, 1, 2)


def test_a_node_that_brings_no_size_stops_nobody():
    one = World(per_node=1, count=4, sizes=(4, 2))
    one.lose(3)
    one.lose(2)
    one.drop_all()
    one.join(2)
    assert len(one.forms) == 2 and one.course.phase is Phase.RUNNING and not one.over, "three have no layout"
    one.join(3)
    one.drop_all()
    assert one.forms[2].nodes == (0, 1, 2, 3)


def test_the_next_leader_takes_over_who_lives_and_keeps_ranks_where_the_size_stays():
    one = World(per_node=1, count=3, spares=1, sizes=(3, 2))
    second, third = one.forms[0].members[1:]
    one.leader_dies()
    assert one.over == {second: 1, third: 1}
    one.drop_all()
    [_, form] = one.forms
    assert form.generation == 2 and form.members == (second, third) and form.nodes == (1, 2)
    assert [lost.why for lost in form.lost] == ["rank 0 was lost with node 0"]


@pytest.mark.parametrize("told", range(4))
def test_a_leader_that_dies_while_it_forms_a_generation_leaves_some_in_it_and_the_next_one_has_a_new_number(told):
    one = World(per_node=1, count=4, sizes=(4, 3, 2, 1))
    one.die(one.forms[0].members[1])
    one.dies_forming = told
    one.drop_all().drop_all()
    last = one.forms[-1]
    assert last.nodes == (1, 2, 3) and one.course.phase is Phase.RUNNING
    assert last.generation == (2 if told < 2 else 3), "what nobody who lives was told of may be formed again"


def test_a_size_that_was_asked_for_outlives_the_leader():
    one = World(per_node=1, count=3, sizes=(3, 2, 1))
    one.do(one.course.resized(1, one.now))
    one.drop_all()
    assert one.forms[-1].nodes == (0,)
    one.do(one.course.resized(2, one.now))
    one.drop_all()
    one.leader_dies()
    one.drop_all()
    assert len(one.forms[-1].members) == 2 and one.forms[-1].nodes == (1, 2)


KINDS = ["die", "lose", "join", "drop", "drop", "leader", "forming", "resize", "time", "fail"]


@settings(max_examples=400, deadline=None)
@given(
    per_node=st.integers(1, 3),
    count=st.integers(1, 4),
    spares=st.integers(0, 2),
    replaces=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), max_size=40),
)
def test_in_any_order_of_lost_and_new_nodes_and_leaders_a_quiet_world_has_the_largest_size_it_can(
    per_node, count, spares, replaces, events
):
    sizes = tuple(range(per_node * count, 0, -1))
    one = World(per_node, count, spares, sizes, replaces)
    for kind, number in events:
        if one.end is not None or not one.node_of:
            break
        members, nodes = sorted(one.node_of), sorted(one.nodes)
        if kind == "die":
            one.die(members[number % len(members)])
        elif kind == "lose" and len(nodes) > 1:
            one.lose(nodes[1 + number % (len(nodes) - 1)])
        elif kind == "join":
            if number < count and number not in one.nodes:
                one.join(number)
        elif kind == "leader" and len(nodes) > 1:
            one.leader_dies()
        elif kind == "forming" and len(nodes) > 1:
            one.dies_forming = number
        elif kind == "resize":
            one.do(one.course.resized(sizes[number % len(sizes)], one.now))
        elif kind == "drop":
            waiting = sorted(one.over.keys() & one.busy)
            if waiting:
                one.drop(waiting[number % len(waiting)])
        elif kind == "fail":
            one.do(one.course.failed(members[number % len(members)], one.course.generation, failure(), False, one.now))
        elif kind == "time":
            one.pass_time(number / 2)
    one.dies_forming = None
    for _ in range(4):  # no more faults
        one.drop_all()
        if one.end is None:
            one.pass_time(2 * GRACE_S)
    if one.end is not None:
        return
    assert one.course.phase is Phase.RUNNING
    assert {*one.course.members} <= one.node_of.keys() and {*one.course.members} == one.busy
    assert len(one.course.members) == one.best()
    for member in one.course.members:
        one.do(one.course.done(member, one.course.generation, 0))
    assert one.end == End(status=0)
