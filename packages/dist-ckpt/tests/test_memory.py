"""What a save, a load and the tools need besides the tensors is bounded: peaks of a forked child at clear ratios.

Sixteen tensors of 2 MiB, and parts of 512 KiB where the package has 4 MiB: whoever keeps copies of
a few tensors is seen.
"""

import warnings

import pytest
import torch
from dist_ckpt_helpers import kib_of_status, one, peak_growth_mib

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor, reader, tools
from sixfold.dist_ckpt.arena import Arena

COUNT, ROWS, MIB = 16, 1 << 9, 2
ALL_MIB = COUNT * MIB
PART_MIB = 0.5
NOISE_MIB = 2.0  # of the allocator and of threads
SAVE_BOUND_MIB = (4 * 2 + 6) * PART_MIB + NOISE_MIB  # transfer.py, two threads
LOAD_BOUND_MIB = 16 * PART_MIB + NOISE_MIB  # reader.py

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


@pytest.fixture(scope="module", autouse=True)
def _small_parts_and_all_imported(tmp_path_factory):
    """What is imported and allocated once is there before anything is measured; nothing here needs a disk."""
    folder = tmp_path_factory.mktemp("warm")
    small = {"w": one("w", torch.ones(4))}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("os.fsync", lambda handle: None)
        patch.setattr("sixfold.dist_ckpt.transfer.COPY_BYTES", int(PART_MIB * 2**20))
        patch.setattr("sixfold.dist_ckpt.reader.PART_BYTES", int(PART_MIB * 2**20))
        dist_ckpt.save(small, folder / "c", check_finite=True)
        dist_ckpt.load(small, folder / "c")
        for to in ("torch_dist", "zarr", "safetensors"):
            tools.convert(folder / "c", folder / to, to=to)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "c"
    dist_ckpt.save(state_of("plain"), folder)
    return folder


@pytest.mark.parametrize("check_finite", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_a_save_copies_a_few_parts_and_never_the_state(tmp_path, group, check_finite):
    state = state_of(group)
    grown = peak_growth_mib(lambda: dist_ckpt.save(state, tmp_path / "c", check_finite=check_finite), anonymous=True)
    assert grown <= SAVE_BOUND_MIB < ALL_MIB / 3


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
        "float8": numbers.to(torch.float8_e5m2).transpose(1, 2),
    }[kind]
    dist_ckpt.save({"w": one("w", tensor)}, tmp_path / "c")
    assert torch.equal(dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].float(), tensor.contiguous().float())


def test_a_value_that_is_not_finite_is_told_with_its_place_whatever_the_part(tmp_path):
    tensor = torch.zeros(1 << 12, 1 << 9).t()
    tensor[300, 4000] = torch.inf
    with pytest.raises(dist_ckpt.ShardingError, match=r"w\[300, 4000\] is inf on rank 0"):
        dist_ckpt.save({"w": one("w", tensor)}, tmp_path / "c", check_finite=True)


def test_a_background_copy_needs_the_arena_alone():
    """The first half of async_save: strided tensors go into the arena without a copy between."""
    tensors = [KINDS["transposed"]() for _ in range(COUNT)]
    arena = Arena()
    try:
        assert peak_growth_mib(lambda: arena.take(tensors), anonymous=True) <= NOISE_MIB
    finally:
        arena.close()


TARGETS = {
    "same": KINDS["plain"],
    "transposed": KINDS["transposed"],
    "bfloat16": lambda: torch.ones(ROWS, 2 * ROWS, dtype=torch.bfloat16),
    "float64": lambda: torch.ones(ROWS, 2 * ROWS, dtype=torch.float64),
    "float8": lambda: torch.ones(ROWS, 2 * ROWS).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kinds", [("same", "transposed"), ("bfloat16", "float64", "float8")], ids="-".join)
def test_a_load_fills_the_tensors_and_copies_a_few_parts(saved, kinds):
    state = {f"w{i}": one(f"w{i}", TARGETS[kinds[i % len(kinds)]]()) for i in range(COUNT)}
    grown = peak_growth_mib(lambda: dist_ckpt.load(state, saved), anonymous=True)
    assert grown <= LOAD_BOUND_MIB < ALL_MIB / 3


def test_a_load_of_columns_holds_a_window_of_the_files(saved, monkeypatch):
    """Mapped pages count as memory of the process until they are given back, window by window."""
    state = {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(ROWS, ROWS), (1, 1, 2)) for i in range(COUNT)}
    monkeypatch.setattr(reader.Reader.__init__, "__defaults__", (1, 4 << 20))
    monkeypatch.setattr("sixfold.dist_ckpt.loading.WINDOW_BYTES", 4 << 20)
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
    before = kib_of_status("RssFile")
    dist_ckpt.load(state, saved, validate_access_integrity=False)
    assert most[0] > before
    assert (most[0] - before) / 1024 <= 2 * 4 + MIB + NOISE_MIB < ALL_MIB / 2


def test_plain_tensors_take_their_own_bytes(saved):
    assert (
        ALL_MIB
        <= peak_growth_mib(lambda: dist_ckpt.load_plain_tensors(saved), anonymous=True) + NOISE_MIB
        <= ALL_MIB + 4
    )


@pytest.mark.parametrize("to", ["torch_dist", "zarr", "safetensors"])
def test_a_conversion_holds_a_batch_and_never_the_checkpoint(saved, tmp_path, monkeypatch, to):
    monkeypatch.setattr("sixfold.dist_ckpt.conversion.BATCH_BYTES", 2 * MIB << 20)
    grown = peak_growth_mib(lambda: tools.convert(saved, tmp_path / to, to=to), anonymous=True)
    assert grown <= 2 * MIB + SAVE_BOUND_MIB < ALL_MIB


def test_verify_and_diff_hold_a_block_and_two_batches(saved, monkeypatch):
    monkeypatch.setattr("sixfold.dist_ckpt.conversion.BATCH_BYTES", MIB << 20)
    assert peak_growth_mib(lambda: tools.verify(saved), anonymous=True) <= 4 + NOISE_MIB  # one block
    assert peak_growth_mib(lambda: tools.diff(saved, saved), anonymous=True) <= 8 * MIB + NOISE_MIB < ALL_MIB
