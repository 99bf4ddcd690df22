"""Each part of an overlap hands on its result at its own end, as ``simulate`` has it with factor 1."""

from __future__ import annotations

import pytest

from sixfold.pipeline import Action, Kind, dualpipe_v
from sixfold.pipeline.compiler.compile import handed_on
from sixfold.pipeline.compiler.wiring import Call
from sixfold.pipeline.passes import lower, post_ahead, split_backward


def calls_of(entries: list[Action]) -> list[list[Call]]:
    """A call per part, behind one that waits, as ``Wiring`` binds them."""
    rows = []
    for position, entry in enumerate(entries):
        rows.append([])
        for part in entry.each():
            if part.kind in (Kind.F, Kind.B, Kind.I):
                receive = Action(part.stage, Kind.RECV_F if part.kind is Kind.F else Kind.RECV_B, part.microbatch)
                rows[-1].append(Call(print, position, entry, receive))
            rows[-1].append(Call(print, position, entry, part, main=True))
    return rows


def row(text: str) -> list[Action]:
    return [Action.parse(word) for word in text.split()]


def order_of(rows: list[list[Call]]) -> list[str]:
    return [str(call.action) for calls in rows for call in calls]


def test_a_send_comes_between_the_parts():
    entries = row("(0F1;3B0)OVERLAP_F_B 0RECV_F2 0SEND_F1 3SEND_B0 0F2 0SEND_F2")
    rows = handed_on(entries, calls_of(entries))
    wanted = "0RECV_F1 0F1 0SEND_F1 3RECV_B0 3B0 3SEND_B0 0RECV_F2 0RECV_F2 0F2 0SEND_F2"
    assert " ".join(order_of(rows)) == wanted  # the first 0RECV_F2 posts, the second waits
    assert [len(calls) for calls in rows] == [6, 1, 0, 0, 2, 1]


@pytest.mark.parametrize("text", ["3SEND_B0 0SEND_F1", "5SEND_F1 0SEND_F1"])
def test_sends_in_another_order_keep_it(text):
    entries = row(f"(0F1;3B0)OVERLAP_F_B {text}")
    order = order_of(handed_on(entries, calls_of(entries)))
    first, second = text.split()
    assert order.index(first) < order.index(second) and order.index("3B0") < order.index(second)
    assert sorted(order) == sorted(order_of(calls_of(entries)))


@pytest.mark.parametrize("change", [lambda p: p, split_backward], ids=["B", "I and W"])
def test_every_send_of_a_program_follows_its_maker_and_the_order_of_sends_stays(change):
    for actions in post_ahead(lower(change(dualpipe_v(4, 10)))).ranks:
        order = [a for a in order_of(handed_on(list(actions), calls_of(list(actions)))) if "RECV" not in a]
        assert [a for a in order if "SEND" in a] == [str(a) for a in actions if "SEND" in str(a)]
        for at, action in enumerate(order):
            if "SEND" in action:
                makers = (action.replace("SEND_F", "F"), action.replace("SEND_B", "B"), action.replace("SEND_B", "I"))
                assert order[at - 1] in makers
