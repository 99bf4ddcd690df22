"""Builder threads: results in order, the first error, and no wait without end."""

import threading
import time

import pytest

from sixfold.blending import BlendingError
from sixfold.blending.builder.threads import on_threads


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_results_come_in_the_order_of_the_items(threads):
    def late(number):
        time.sleep(0.002 * (5 - number % 5))
        return number * number

    assert on_threads(late, range(12), threads, 60.0) == [number * number for number in range(12)]
    assert on_threads(late, [], threads, 60.0) == []


def test_the_error_of_the_first_item_is_raised_when_all_under_way_have_ended():
    begun = threading.Barrier(2)
    met = []

    def failing(number):
        met.append(number)
        if number < 2:
            begun.wait(60)
            time.sleep(0.05 * (1 - number))
            raise ValueError(f"item {number}")

    with pytest.raises(ValueError, match="item 0"):
        on_threads(failing, range(50), 2, 60.0)
    assert sorted(met) == [0, 1], "nothing is begun after an error"


def test_threads_that_end_nothing_are_an_error_that_names_what_they_are_at():
    go_on = threading.Event()
    begin = time.monotonic()
    with pytest.raises(BlendingError, match=r"finished nothing for 0\.1 s; they work on wiki, code"):
        on_threads(lambda name: go_on.wait(60), ["wiki", "code", "math"], 2, 0.1)
    assert time.monotonic() - begin < 30
    go_on.set()


def test_the_deadline_is_about_progress_and_not_about_the_whole():
    assert on_threads(lambda number: time.sleep(0.1) or number, range(6), 1, 0.5) == list(range(6))
