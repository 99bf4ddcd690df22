"""What a save, a load and the tools need besides the tensors is bounded: peaks of a fresh process.

Sixteen tensors of 2 MiB, and parts of 512 KiB where the package has 4 MiB: whoever keeps copies of
a few tensors is seen.
"""

import os
import warnings
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from dist_ckpt_helpers import kib_of_status, one, peak_growth_mib

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedObject, ShardedTensor
from sixfold.dist_ckpt.background.arena import Arena
from sixfold.dist_ckpt.plans import batches
from sixfold.dist_ckpt.save_load import dtype_conversion, reader, writer
from sixfold.dist_ckpt.tools import commands as tools

COUNT, ROWS, MIB = 16, 1 << 9, 2
ALL_MIB = COUNT * MIB
PART_MIB = 0.5
BLOCK_MIB = 4
BATCH_MIB = 4 * MIB
NOISE_MIB = 2.5  # objects, stacks and heaps of threads, which are empty when a measurement begins; up to 2.2 was seen
SAVE_BOUND_MIB = (4 * 2 + 6) * PART_MIB + NOISE_MIB  # transfer.py, two threads
HAS_SAFETENSORS = find_spec("safetensors") is not None
NEEDS_SAFETENSORS = pytest.mark.skipif(not HAS_SAFETENSORS, reason="needs the extra safetensors")
FORMATS = ["torch_dist", "zarr", *(["safetensors"] if HAS_SAFETENSORS else [])]
LOAD_THREADS = min(4, len(os.sched_getaffinity(0)))
LOAD_BOUND_MIB = 4 * LOAD_THREADS * PART_MIB + NOISE_MIB  # reader.py

KINDS = {
    "plain": lambda: torch.ones(ROWS, 2 * ROWS),
    "transposed": lambda: torch.ones(2 * ROWS, ROWS).t(),
    "columns": lambda: torch.ones(ROWS, 2 * ROWS + 8)[:, : 2 * ROWS],
    "every other row": lambda: torch.ones(2 * ROWS, 2 * ROWS)[::2],
    "every other element": lambda: torch.ones(2 * ROWS * ROWS, 2)[:, 0],
    "expanded": lambda: torch.ones(1, 2 * ROWS).expand(ROWS, 2 * ROWS),
    "one long row": lambda: torch.ones(4 * ROWS * ROWS)[::2].view(1, -1),
    "conjugated": lambda: torch.ones(ROWS, ROWS, dtype=torch.complex64).conj(),
    "float8": lambda: torch.ones(8 * ROWS, ROWS).to(torch.float8_e4m3fn).t(),
    "bool": lambda: torch.ones(8 * ROWS, ROWS, dtype=torch.bool).t(),
}


GROUPS = {
    "plain": ["plain"],
    "strided": ["transposed", "columns", "every other row", "every other element", "one long row"],
    "of other kinds": ["expanded", "conjugated", "float8", "bool"],
}


def state_of(group, makers=KINDS):
    """Sixteen tensors, of the kinds of the group in turn, and a scalar."""
    kinds = GROUPS.get(group, [group])
    state = {f"w{i}": one(f"w{i}", makers[kinds[i % len(kinds)]]()) for i in range(COUNT)}
    return state | {"step": one("step", torch.tensor(3.0))}


TARGETS = {
    "same": KINDS["plain"],
    "transposed": KINDS["transposed"],
    "bfloat16": lambda: torch.ones(ROWS, 2 * ROWS, dtype=torch.bfloat16),
    "float64": lambda: torch.ones(ROWS, 2 * ROWS, dtype=torch.float64),
    "float8": lambda: torch.ones(ROWS, 2 * ROWS).to(torch.float8_e4m3fn),
}
LOADS = {"plain": ["same", "transposed"], "converted": ["bfloat16", "float64", "float8"]}


def measured(rank, ranks, folder):
    """All peaks, in MiB by name, of one fresh process; nothing here needs a disk."""
    warnings.simplefilter("ignore")
    os.fsync = lambda handle: None
    writer.COPY_BYTES = dtype_conversion.PART_BYTES = int(PART_MIB * 2**20)
    warm_up = {"w": one("w", torch.ones(4))}
    dist_ckpt.save(warm_up, folder / "warm", check_finite=True)
    dist_ckpt.load(warm_up, folder / "warm")
    for to in FORMATS:
        tools.convert(folder / "warm", folder / f"warm-{to}", to=to)
    peaks = {}
    for group, check_finite in product(GROUPS, [False, True]):
        state, path = state_of(group), folder / f"{group}-{check_finite}"
        peaks["save", group, check_finite] = peak_growth_mib(
            lambda s=state, p=path, c=check_finite: dist_ckpt.save(s, p, check_finite=c)
        )
    state = {"model": {f"w{i}": KINDS["plain"]() for i in range(COUNT)}, "step": 3}
    peaks["plain state"] = peak_growth_mib(lambda: dist_ckpt.save(state, folder / "plain state"))
    saved = folder / "plain-False"
    for name, kinds in LOADS.items():
        state = {f"w{i}": one(f"w{i}", TARGETS[kinds[i % len(kinds)]]()) for i in range(COUNT)}
        peaks["load", name] = peak_growth_mib(lambda s=state: dist_ckpt.load(s, saved))
    # Of two: what threads of an earlier load give back meanwhile hides as much of the growth (6 MiB, seen once).
    peaks["plain tensors"] = max(peak_growth_mib(lambda: dist_ckpt.load_plain_tensors(saved)) for _ in range(2))
    state, arena = [KINDS["transposed"]() for _ in range(COUNT)], Arena()
    peaks["first copy"] = peak_growth_mib(lambda: arena.take(state))
    peaks["settled"] = peak_growth_mib(arena.settle)
    peaks["arena"] = peak_growth_mib(lambda: arena.take(state))
    arena.close()
    batches.BATCH_BYTES, tools._COMPARED_ELEMENTS = BATCH_MIB << 20, 1 << 14
    for to in FORMATS:
        peaks["convert", to] = peak_growth_mib(lambda t=to: tools.convert(saved, folder / t, to=t))
    peaks["verify"] = peak_growth_mib(lambda: tools.verify(saved))
    zeros = {f"w{i}": one(f"w{i}", torch.zeros(ROWS, 2 * ROWS)) for i in range(COUNT)}
    dist_ckpt.save(zeros, folder / "zeros")
    for other in ("plain-True", "zeros"):
        peaks["diff", other] = peak_growth_mib(lambda o=other: tools.diff(saved, folder / o))
    batches.BATCH_BYTES, tools._OBJECT_BYTES = 256 << 20, MIB << 20
    objects = [ShardedObject("o", bytes(MIB << 20), (COUNT,), (i,)) for i in range(COUNT)]
    dist_ckpt.save({"o": objects}, folder / "objects")
    peaks["diff", "objects"] = peak_growth_mib(lambda: tools.diff(folder / "objects", folder / "objects"))
    return peaks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def peaks(folder):
    return run_ranks(measured, 1, folder, timeout=120.0)[0]


@pytest.mark.parametrize("check_finite", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.slow
def test_a_save_copies_a_few_parts_and_never_the_state(peaks, group, check_finite):
    assert peaks["save", group, check_finite] <= SAVE_BOUND_MIB < ALL_MIB / 3


def test_a_save_of_plain_state_copies_no_more(peaks):
    assert peaks["plain state"] <= SAVE_BOUND_MIB < ALL_MIB / 3


@pytest.mark.parametrize("name", LOADS)
def test_a_load_fills_the_tensors_and_copies_a_few_parts(peaks, name):
    assert peaks["load", name] <= LOAD_BOUND_MIB < ALL_MIB / 3


def test_plain_tensors_take_their_own_bytes(peaks):
    assert ALL_MIB - NOISE_MIB <= peaks["plain tensors"] <= ALL_MIB + NOISE_MIB


def test_a_background_copy_needs_the_arena_alone(peaks):
    """The first half of async_save: strided tensors go into the arena without a copy between."""
    assert peaks["arena"] <= NOISE_MIB


def test_a_first_background_copy_is_one_copy_which_settles_in_the_arena(peaks):
    """It lies in memory of this process until it is moved, which takes no more of it."""
    assert ALL_MIB - NOISE_MIB <= peaks["first copy"] <= ALL_MIB + NOISE_MIB
    assert peaks["settled"] <= NOISE_MIB


@pytest.mark.parametrize("to", ["torch_dist", "zarr", pytest.param("safetensors", marks=NEEDS_SAFETENSORS)])
def test_a_conversion_holds_a_batch_and_never_the_checkpoint(peaks, to):
    assert peaks["convert", to] <= max(BATCH_MIB, BLOCK_MIB) + NOISE_MIB < ALL_MIB / 3


def test_verify_holds_a_block(peaks):
    assert peaks["verify"] <= BLOCK_MIB + NOISE_MIB


@pytest.mark.parametrize("other", ["plain-True", "zeros"])
def test_diff_holds_two_batches(peaks, other):
    """And what 16,384 elements differ by, at 60 bytes each."""
    assert peaks["diff", other] <= 2 * BATCH_MIB + 1 + NOISE_MIB < ALL_MIB


def test_diff_holds_a_few_objects_of_both_sides(peaks):
    """Each while it is decoded: its bytes as they are stored, once more to be unpickled, and the value."""
    assert peaks["diff", "objects"] <= 6 * MIB + NOISE_MIB < ALL_MIB / 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("plain", "bool")])
def test_a_strided_tensor_is_stored_as_its_values(tmp_path, kind):
    """The parts are put together in order: values of differing size on differing axes, against torch's own copy."""
    numbers = torch.randn(3, 5, 1 << 15).to(torch.complex64 if kind == "conjugated" else torch.float32)
    tensor = {
        "transposed": numbers.transpose(0, 2),
        "columns": numbers[:, :, 7:],
        "every other row": numbers[:, ::2],
        "every other element": numbers[..., ::2],
        "expanded": numbers[:1].expand(3, 5, 1 << 15),
        "one long row": numbers.view(-1)[::2].view(1, -1),
        "conjugated": numbers.conj().transpose(0, 1),
        "float8": numbers.real.to(torch.float8_e5m2).transpose(1, 2),
    }[kind]
    dist_ckpt.save({"w": one("w", tensor)}, tmp_path / "c")
    assert torch.equal(dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].float(), tensor.contiguous().float())


def test_a_value_that_is_not_finite_is_told_with_its_place_whatever_the_part(tmp_path):
    tensor = torch.zeros(1 << 12, 1 << 9).t()
    tensor[300, 4000] = torch.inf
    with pytest.raises(dist_ckpt.ShardingError, match=r"w\[300, 4000\] is inf on rank 0"):
        dist_ckpt.save({"w": one("w", tensor)}, tmp_path / "c", check_finite=True)


def test_a_load_of_columns_holds_a_window_of_the_files(folder, monkeypatch):
    """Mapped pages count as memory of the process until they are given back, window by window."""
    state = {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(ROWS, ROWS), (1, 1, 2)) for i in range(COUNT)}
    monkeypatch.setattr(reader.Reader.__init__, "__defaults__", (1, 4 << 20))
    monkeypatch.setattr("sixfold.dist_ckpt.save_load.loading.WINDOW_BYTES", 4 << 20)
    most = [0]

    def look(records, file, window, jobs=reader.Reader._jobs):
        for job in jobs(reader_seen[0], records, file, window):
            job()
            most[0] = max(most[0], kib_of_status("RssFile"))
        return []

    reader_seen = []
    run = reader.Reader.run

    def run_seen(self, *arguments):
        reader_seen.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(reader.Reader, "run", run_seen)
    monkeypatch.setattr(reader.Reader, "_jobs", lambda self, records, file, window: look(records, file, window))
    dist_ckpt.save(state_of("plain"), folder / "c")
    before = kib_of_status("RssFile")
    dist_ckpt.load(state, folder / "c", validate_access_integrity=False)
    assert most[0] > before
    assert (most[0] - before) / 1024 <= 2 * 4 + MIB + NOISE_MIB < ALL_MIB / 2
