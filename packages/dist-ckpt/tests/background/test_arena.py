"""The arena: places, growth, and the pinned kind of memory by a stand-in for CUDA."""

import contextlib
import os

import pytest
import torch

from sixfold.dist_ckpt import StorageError
from sixfold.dist_ckpt.background import arena
from sixfold.dist_ckpt.background.arena import Arena, MappedArena, Pinned, ProgressCounter


@pytest.fixture
def made():
    memory = Arena()
    yield memory
    memory.close()


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (3, 5), (0, 4), (200, 700), (1,), (17,)]
    return [torch.randn(shape, generator=generator) for shape in shapes] + [
        torch.arange(9).bool(),
        torch.ones(2, 3).t(),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_worker_sees_the_values_at_the_call(made, seed):
    tensors = random_tensors(seed)
    expected = [tensor.clone() for tensor in tensors]
    places = made.take(tensors)
    for tensor in tensors:
        tensor.zero_()
    made.settle()
    seen = MappedArena(made.fd).tensors(places)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(seen, expected, strict=True))


def test_places_do_not_overlap_and_large_tensors_start_on_pages():
    tensors = random_tensors(0)
    places, needed = arena.layout(tensors)
    ends = 0
    for place, tensor in zip(places, tensors, strict=True):
        assert place.offset >= ends
        assert place.offset % (4096 if tensor.nbytes >= 2**18 else 64) == 0
        ends = place.offset + tensor.nbytes
    assert ends == needed


def test_memory_is_kept_and_grows_only_when_it_must(made):
    made.take([torch.ones(10)])
    made.settle()
    size = made.nbytes
    address = made._bytes.data_ptr()
    made.take([torch.ones(1000), torch.ones(20)])
    assert (made.nbytes, made._bytes.data_ptr()) == (size, address)
    places = made.take([torch.full((size,), 2.0)])
    made.settle()
    assert made.nbytes >= 4 * size
    mapped = MappedArena(made.fd)
    assert bool((mapped.tensors(places)[0] == 2).all())
    places = made.take([torch.full((2 * size,), 3.0)])
    made.settle()
    assert bool((mapped.tensors(places)[0] == 3).all()), "mapped again after it has grown"


def test_large_tensors_are_copied_in_slices_by_several_threads(made, monkeypatch):
    monkeypatch.setattr(arena, "_SMALL_BYTES", 0)
    monkeypatch.setattr(arena, "_SLICE_BYTES", 1000)
    tensors = [torch.randn(3_000), torch.randn(7), torch.randn(501, 3), torch.randn(40, 30).t()]
    places = made.take(tensors)
    made.settle()
    seen = MappedArena(made.fd).tensors(places)
    assert all(torch.equal(a, b) for a, b in zip(seen, tensors, strict=True))


def test_no_memory_is_told_with_the_bytes_it_needs(made, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    told = r"shared memory of 2097152 bytes .*\(No space left.* save synchronously"
    with pytest.raises(StorageError, match=told):
        made.reserve([torch.ones(5)])
    made.take([torch.ones(5)])
    with pytest.raises(StorageError, match=told):
        made.settle()
    assert os.fstat(made.fd).st_size == 4096, "what it had got is given back"
    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(StorageError, match="no memory of 4116 bytes for the copy"):
        made.take([torch.ones(5)])


def test_a_copy_that_does_not_fit_asks_for_no_shared_memory_and_is_moved_piece_by_piece(made, monkeypatch):
    """Fresh shared memory takes as long as ten copies: the call does not wait for it."""
    monkeypatch.setattr(arena, "_PIECE_BYTES", 1 << 20)
    counter, tensors, moves = ProgressCounter(made.fd), [torch.randn(300_000), torch.randn(700_001)], []
    counter.add(7)
    with monkeypatch.context() as without:
        without.setattr("os.posix_fallocate", lambda *_: pytest.fail("shared memory in the call"))
        places = made.take(tensors)
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    waiting = made._waiting
    made.settle(lambda: moves.append(int((waiting != 0).sum())))
    assert all(map(torch.equal, MappedArena(made.fd).tensors(places), expected))
    assert len(moves) == made.nbytes >> 20 and moves == sorted(moves, reverse=True) and moves[-1] == 0, "given back"
    assert (counter.written, made._waiting) == (7, None), "the counter's page is no part of a copy"
    made.take(tensors)
    assert made._waiting is None, "what fits is copied where it is written from"


class FakeCuda:
    """What Pinned asks of torch.cuda; CPU tensors stand for the device's."""

    def __init__(self, refuse=0):
        self.log, self._refuse = [], refuse

    def Stream(self, device):
        self.log.append("stream made")
        return self

    def wait_stream(self, other):
        self.log.append(f"waits for {other}")

    def current_stream(self, device):
        return "the trainer's stream"

    def stream(self, stream):
        return contextlib.nullcontext()

    def record_event(self):
        self.log.append("event")
        return self

    def synchronize(self):
        self.log.append("event reached")

    def cudart(self):
        return self

    def cudaHostRegister(self, address, nbytes, flags):
        self.log.append(("register", nbytes))
        return self._refuse

    def cudaHostUnregister(self, address):
        self.log.append("unregister")
        return 0


@pytest.fixture
def pinned(monkeypatch):
    cuda = FakeCuda()
    memory = Pinned(cuda, torch.device("cpu"))
    monkeypatch.setattr(arena, "pinned_for", lambda tensors: memory)
    return cuda


def test_pinned_memory_is_registered_once_and_again_after_growth(pinned):
    made = Arena()
    tensors = [torch.randn(100), torch.randn(7, 3)]
    places = made.take(tensors)
    first = made.nbytes
    assert pinned.log == [
        "stream made",
        ("register", first),
        "waits for the trainer's stream",
        "event",
        "event reached",
    ], "the copy follows what the trainer has queued, and the call ends at its event"
    seen = MappedArena(made.fd).tensors(places)
    assert all(torch.equal(a, b) for a, b in zip(seen, tensors, strict=True))
    made.take(tensors)
    assert pinned.log.count(("register", first)) == 1
    made.take([torch.ones(first)])
    assert pinned.log[-5:-3] == ["unregister", ("register", made.nbytes)]
    made.close()
    assert pinned.log[-1] == "unregister"


def test_a_driver_that_does_not_pin_is_told(made, monkeypatch):
    memory = Pinned(FakeCuda(refuse=2), torch.device("cpu"))
    monkeypatch.setattr(arena, "pinned_for", lambda tensors: memory)
    with pytest.raises(
        StorageError, match="cudaHostRegister of 2097152 bytes gave 2; raise the limit of locked memory"
    ):
        made.take([torch.ones(5)])


def test_cpu_tensors_take_plain_memory_and_no_cuda_call(monkeypatch):
    monkeypatch.setattr(torch, "cuda", None)
    assert arena.pinned_for([torch.ones(2)]) is None


def test_tensors_are_copied_while_the_interpreter_ends(made, monkeypatch):
    """From a thread that is none of a daemon's: Python has stopped all pools."""
    large = torch.randn(1 << 19)
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    places = made.take([large])
    made.settle()
    assert torch.equal(MappedArena(made.fd).tensors(places)[0], large)


def test_memory_that_was_reserved_is_that_which_is_taken(made):
    tensors = random_tensors(0)
    made.reserve(tensors)
    size, address = made.nbytes, made._bytes.data_ptr()
    places = made.take(tensors)
    assert (made.nbytes, made._bytes.data_ptr()) == (size, address)
    assert all(map(torch.equal, MappedArena(made.fd).tensors(places), tensors))
