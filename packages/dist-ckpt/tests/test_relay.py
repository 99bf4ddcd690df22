"""The memory of a relay: what is lent never overlaps, and room that is there is found."""

import random
from collections import deque

import pytest
import torch

from sixfold.dist_ckpt.ranks import relay


@pytest.mark.parametrize("seed", range(5))
def test_what_a_ring_lends_keeps_its_bytes_until_it_is_given_back(monkeypatch, seed):
    monkeypatch.setattr(relay, "_HELD_BYTES", 4096)
    numbers, ring, lent, refused = random.Random(seed), relay._Ring(torch.device("cpu")), deque(), 0
    for step in range(2000):
        part = ring.take(numbers.choice([1, 100, 128, 700, 1024])) if numbers.random() < 0.6 else None
        if part is None:
            refused += len(lent) > 4
            if lent:
                value, oldest = lent.popleft()
                assert oldest.eq(value).all(), f"step {step}"
                ring.give_back()
        else:
            assert part.data_ptr() % 16 == 0
            lent.append((step % 251, part.fill_(step % 251)))
    assert refused > 20


def test_a_ring_that_nothing_is_lent_of_has_room_for_its_whole_size(monkeypatch):
    monkeypatch.setattr(relay, "_HELD_BYTES", 1000)
    ring = relay._Ring(torch.device("cpu"))
    for nbytes in (1000, 300, 1000):
        assert ring.take(nbytes) is not None
        ring.give_back()
    assert ring.take(600) is not None
    assert ring.take(400) is None  # aligned, it would end behind the ring
    assert ring.take(300) is not None
