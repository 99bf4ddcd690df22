"""Words between two nodes: whole and in order, however they are cut, and none of anybody who does not know the key."""

import socket
import struct
import time

import pytest

from sixfold.gpt.elastic.connection import HELLO, NONCE_BYTES, Link

KEY = b"k" * 32


@pytest.fixture
def both():
    """Two links, and the sockets below."""
    left, right = socket.socketpair()
    links = Link(left, KEY), Link(right, KEY)
    yield links
    for one in links:
        one.close()


def heard(link, count=1, seconds=5.0, other=None):
    words, deadline = [], time.monotonic() + seconds
    while len(words) < count and not link.why and time.monotonic() < deadline:
        words += link.receive()
        if other is not None:
            other.receive()  # it sends what there was no room for
    return words


def test_words_come_whole_and_in_order_in_both_directions(both):
    here, there = both
    for number in range(100):
        here.send(("word", number, "x" * number * 50))
    assert [word[1] for word in heard(there, 100, other=here)] == list(range(100))
    there.send("back")
    assert heard(here) == ["back"]


def test_no_call_waits_for_a_peer_that_reads_nothing_and_what_was_sent_comes_later(both):
    here, there = both
    heard(here, 0)
    there.receive(), here.receive()
    start = time.monotonic()
    for _ in range(20):
        here.send(b"x" * 1_000_000)
    assert time.monotonic() - start < 5
    found = []
    while len(found) < 20:
        here.receive()
        found += there.receive()
    assert all(len(word) == 1_000_000 for word in found)


class Middle:
    """Somebody between both, who passes bytes on as it likes."""

    def __init__(self, key_there=KEY):
        left, self.left = socket.socketpair()
        self.right, right = socket.socketpair()
        self.here, self.there = Link(left, KEY), Link(right, key_there)
        for one in (self.left, self.right):
            one.setblocking(False)

    def carry(self, change=lambda data: data):
        for source, target in ((self.left, self.right), (self.right, self.left)):
            try:
                target.sendall(change(source.recv(1 << 20)))
            except BlockingIOError:
                pass

    def meet(self):
        self.carry()
        self.here.receive(), self.there.receive()


def test_half_a_word_is_no_word_until_the_rest_is_there():
    one = Middle()
    one.meet()
    one.here.send("a word")
    data = one.left.recv(1 << 16)
    for at in range(len(data)):
        assert one.there.receive() == []
        one.right.send(data[at : at + 1])
    assert one.there.receive() == ["a word"]


def test_half_a_word_before_the_end_is_never_heard():
    one = Middle()
    one.meet()
    one.here.send("first"), one.here.send("second")
    data = one.left.recv(1 << 16)
    one.right.send(data[:-1])
    one.right.close()
    assert heard(one.there, 2) == ["first"] and one.there.why


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: d[:10] + bytes([d[10] ^ 1]) + d[11:]]
)
def test_a_word_that_was_changed_on_the_way_ends_the_connection_unread(change):
    one = Middle()
    one.meet()
    one.here.send({"a": "word"})
    one.right.send(change(one.left.recv(1 << 16)))
    assert heard(one.there) == [] and one.there.why == "it does not know the key of this run"


def test_a_word_that_is_said_again_ends_the_connection():
    one = Middle()
    one.meet()
    one.here.send("kill")
    data = one.left.recv(1 << 16)
    one.right.send(data + data)
    assert heard(one.there, 2) == ["kill"] and "key" in one.there.why


def test_who_has_another_key_is_not_heard():
    one = Middle(key_there=b"other" * 8)
    one.meet()
    one.here.send("word")
    one.carry()
    assert heard(one.there) == [] and "does not know the key" in one.there.why


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "it speaks of something else"),
        (HELLO + b"n" * NONCE_BYTES + struct.pack("!I", 1 << 31) + b"x" * 64, "it sends a word of 2147483648 bytes"),
        (HELLO + b"n" * NONCE_BYTES + struct.pack("!I", 5) + b"x" * 64, "it does not know the key of this run"),
    ],
)
def test_strangers_are_hung_up_on(data, why):
    left, right = socket.socketpair()
    link = Link(left, KEY)
    right.send(data)
    assert heard(link) == [] and link.why == why
    right.close()


def test_an_ended_connection_says_so_and_takes_words_without_an_error(both):
    here, there = both
    there.close()
    assert heard(here) == [] and here.why
    here.send("nobody hears")
    assert here.receive() == []
