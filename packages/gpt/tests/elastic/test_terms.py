"""Who leads: one node in each term, whoever asks at once; an older one finds that out before it writes."""

import os
import threading

import pytest

from sixfold.gpt.elastic.terms import DeposedError, Terms
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.metrics import MetricsWriter


@pytest.fixture
def terms(tmp_path):
    found = Terms(tmp_path / "nodes")
    found.key()
    return found


def test_of_all_nodes_that_want_a_term_one_has_it(terms):
    taken, barrier = [], threading.Barrier(8)

    def take(node):
        barrier.wait()
        for number in range(1, 21):
            if (term := terms.take(number, node)) is not None:
                taken.append(term)

    threads = [threading.Thread(target=take, args=(node,)) for node in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(term.number for term in taken) == list(range(1, 21))
    newest = terms.newest()
    assert newest == next(term for term in taken if term.number == 20)
    assert sorted(os.listdir(terms.folder)) == ["key", "term-19", "term-20"], "older ones are of no use"


def test_who_led_before_is_refused_and_who_leads_is_not(terms):
    first = terms.take(1, 0)
    first.check()
    second = terms.take(2, 1)
    second.check()
    with pytest.raises(DeposedError, match=r"of term 1, in which node 0 led the run, and term 2 has begun"):
        first.check()


def test_a_run_that_has_ended_says_so_to_who_was_cut_off(terms):
    first = terms.take(1, 0)
    second = terms.take(2, 1)
    terms.end(first, 0, "")
    assert terms.newest().ended is None, "an older leader ends nothing"
    terms.end(second, 143, "")
    assert (terms.newest().ended, terms.newest().number) == (143, 2)


def test_all_nodes_have_one_key_which_others_cannot_read(terms):
    keys, barrier = [], threading.Barrier(8)
    (terms.folder / "key").unlink()

    def read():
        barrier.wait()
        keys.append(terms.key())

    threads = [threading.Thread(target=read) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(keys)) == 1 and len(keys) == 8 and len(keys[0]) == 32
    place = terms.folder / "key"
    assert place.stat().st_mode & 0o777 == 0o600 and terms.folder.stat().st_mode & 0o777 == 0o700
    place.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others than you may read it \(mode 640"):
        terms.key()


def test_a_writer_of_an_older_term_writes_no_line_and_its_lock_keeps_nobody_out(terms, tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = terms.take(1, 0)
    old = MetricsWriter(path, first.check)
    old.write("end", step=1, reason="finished")
    second = terms.take(2, 1)
    with MetricsWriter(path, second.check) as new:
        new.write("end", step=2, reason="finished")
    before = path.read_bytes()
    with pytest.raises(DeposedError):
        old.write("end", step=3, reason="finished")
    with pytest.raises(DeposedError):
        MetricsWriter(path, first.check)
    assert path.read_bytes() == before
    old.close()
