"""The executor: tables against objects, plan cache, blocks shared out, one read of each byte, joined digests."""

import gc
import random
import resource
import zlib

import pytest
import torch
from dist_ckpt_helpers import flat_shards, flip_byte, one, random_cut

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, ShardedObject, ShardedTensor, StorageError
from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.formats import integrity, metadata
from sixfold.dist_ckpt.formats.integrity import Span
from sixfold.dist_ckpt.geometry.box import Box, intersect
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.plans import plan
from sixfold.dist_ckpt.plans.plan import assign, plan_load
from sixfold.dist_ckpt.plans.shard_table import merge, table_problems, tabulate
from sixfold.dist_ckpt.save_load import loading, reader
from sixfold.dist_ckpt.stores import LocalStore, MemoryStore
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy


def damaged(shards, rng):
    """Shards as a job with a mistake has them: one lost, one twice, one in place of another, one demoted, or none."""
    shards, mistake = list(shards), rng.randrange(5)
    if mistake in (0, 2):
        shards.pop(rng.randrange(len(shards)))
    if mistake in (1, 2) and shards:
        shards.append(rng.choice(shards))
    if mistake == 3:
        rng.choice(shards).replica_id = 1
    return shards


@pytest.mark.parametrize("seed", range(30))
def test_problems_found_by_hashes_are_those_found_box_by_box(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    shards = [s for key in "ab" for s in flat_shards(key, torch.zeros(shape), random_cut(shape, rng), fill=False)]
    ranks = [[], [], []]
    for shard in [*damaged(shards, rng), one("scalar", torch.zeros(()))]:
        rng.choice(ranks).append(shard)
    table = merge([tabulate(records)[0].encode() for records in ranks])
    assert {line.partition("[")[0] for line in table_problems(table, "saved")} == set(not_once(ranks, shape))


def not_once(ranks, shape):
    """Keys of which some element has no main replica, or two: counted element by element."""
    for key in {shard.key for shards in ranks for shard in shards} - {"scalar"}:
        times = torch.zeros(shape, dtype=torch.int64)
        for shard in (shard for shards in ranks for shard in shards if shard.key == key and shard.replica_id == 0):
            for piece in shard.pieces():
                ends = zip(piece.box.offset, piece.box.size, strict=True)
                times[tuple(slice(at, at + length) for at, length in ends)] += 1
        if bool((times != 1).any()):
            yield key


def test_a_load_pauses_the_garbage_collector_over_its_own_work_alone(tmp_path, monkeypatch):
    waiting, planning = [], []

    def reduce_scatter(self, work, decide, plain=Exchange.reduce_scatter):
        waiting.append(gc.isenabled())
        return plain(self, work, decide)

    def noted(*arguments, plain=loading.tabulate):
        planning.append(gc.isenabled())
        return plain(*arguments)

    dist_ckpt.save({"w": one("w", torch.ones(5))}, tmp_path / "c", group=None)
    monkeypatch.setattr(Exchange, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(loading, "tabulate", noted)
    dist_ckpt.load({"w": one("w", torch.zeros(5))}, tmp_path / "c", group=None)
    assert gc.isenabled()
    assert (waiting, planning) == ([True, True], [False])


def test_the_table_of_a_rank_travels_once(tmp_path, monkeypatch):
    seen = []

    def reduce_scatter(self, work, decide, plain=Exchange.reduce_scatter):
        def told():
            mine, message = work()
            table = getattr(message, "table", None)
            seen.append(table is not None and bool(table.rows))
            return mine, message

        return plain(self, told, decide)

    monkeypatch.setattr(Exchange, "reduce_scatter", reduce_scatter)
    strategy = TorchDistSaveShardedStrategy()
    for value in (1.0, 2.0):
        dist_ckpt.save({"w": one("w", torch.full((5,), value))}, tmp_path / "c", strategy, group=None)
    assert seen == [False, True, False, False, False], "when it is asked for; not while it is the same"
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == [2.0] * 5


def test_a_save_after_one_that_failed_has_all_tables(tmp_path, monkeypatch):
    strategy, state = TorchDistSaveShardedStrategy(), {"w": one("w", torch.full((5,), 3.0))}
    for fails in ("prepare", "commit"):
        with monkeypatch.context() as patch, pytest.raises(StorageError, match="on fire"):
            patch.setattr(LocalStore, fails, lambda *_: (_ for _ in ()).throw(OSError(5, "the disk is on fire")))
            dist_ckpt.save(state, tmp_path / "c", strategy, group=None)
    dist_ckpt.save(state, tmp_path / "c", strategy, group=None)
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == [3.0] * 5


def test_a_save_after_one_that_failed_in_more_files_says_where_its_own_lie(tmp_path, monkeypatch):
    class Wide(MemoryStore):
        streams = 3

        def commit(self, *_):
            raise StorageError("quota")

    monkeypatch.setattr(plan, "_LEAST_FILE_BYTES", 1 << 10)
    strategy, state = TorchDistSaveShardedStrategy(), {key: one(key, torch.full((400,), ord(key))) for key in "abc"}
    dist_ckpt.save(state, tmp_path / "c", strategy, group=None)
    with pytest.raises(StorageError, match="quota"):
        dist_ckpt.save(state, Wide(), strategy, group=None)
    dist_ckpt.save(state, tmp_path / "c", strategy, group=None)
    assert {key: set(value.tolist()) for key, value in dist_ckpt.load_plain_tensors(tmp_path / "c").items()} == {
        key: {ord(key)} for key in "abc"
    }


def test_names_are_a_small_part_of_what_a_table_sends():
    records = [one(f"decoder.layers.{i // 10}.mlp.linear_fc{i % 10}.weight", torch.zeros(2, 3)) for i in range(2000)]
    encoded = tabulate(records)[0].encode()
    assert len(encoded.names) < sum(len(record.key) for record in records) / 4
    assert [kind.key for kind in merge([encoded]).kinds] == sorted(record.key for record in records)


def test_a_table_gives_back_its_rows():
    records = [one("a", torch.zeros(2, 3)), one("b", torch.zeros(4), replica_id=2), one("s", torch.zeros(()))]
    table = merge([tabulate(records[:1])[0].encode(), tabulate([])[0].encode(), tabulate(records[1:])[0].encode()])
    assert [(kind.key, kind.shape) for kind in table.kinds] == [("a", (2, 3)), ("b", (4,)), ("s", ())]
    rows = [table.row(i) for i in range(3)]
    assert [(row.rank, row.kind.key, row.main, row.box) for row in rows] == [
        (0, "a", True, Box((0, 0), (2, 3))),
        (2, "b", False, Box((0,), (4,))),
        (2, "s", True, Box((), ())),
    ]
    rows, numbers = table.main_rows()
    assert (rows.tolist(), numbers.tolist()) == ([0, 2], [0, 1])


@pytest.mark.parametrize("seed", range(20))
def test_each_touched_block_is_hashed_by_one_rank_that_touches_it(seed):
    rng = random.Random(seed)
    touched = []
    for _ in range(rng.randint(1, 5)):
        spans = []
        for file in "fg":
            at = 0
            while rng.random() < 0.7:
                at += rng.randint(1, 20)
                spans.append(Span(file, at, at + rng.randint(1, 60)))
                at = spans[-1].stop
        touched.append(spans)
    wanted = [{block for span in spans for block in span.blocks()} for spans in touched]
    shares = [[block for span in spans for block in span.blocks()] for spans in assign(touched)]
    assert sorted(block for share in shares for block in share) == sorted(set().union(*wanted))
    assert all(set(share) <= mine for share, mine in zip(shares, wanted, strict=True))


def test_blocks_that_all_ranks_touch_are_shared_evenly():
    assert [sum(s.stop - s.first for s in share) for share in assign([[Span("f", 0, 256)]] * 4)] == [64] * 4


@pytest.mark.parametrize("seed", range(10))
def test_reads_found_by_search_are_those_found_by_trying_every_chunk(seed):
    rng = random.Random(seed)
    boxes = [Box((4 * i, 5 * j), (4, 5)) for i in range(12) for j in range(seed + 2)]
    rng.shuffle(boxes)
    shape = (48, 5 * (seed + 2))
    chunks = tuple(StoredChunk(box, ByteRange("f", 100 * n, 100)) for n, box in enumerate(boxes))
    manifest = Manifest({"w": StoredTensor(torch.float32, shape, chunks)}, {})
    corner = tuple(rng.randrange(n) for n in shape)
    size = tuple(rng.randint(1, n - at) for n, at in zip(shape, corner, strict=True))
    record = ShardedTensor("w", None, torch.float32, size, shape, corner, None)
    reads = plan_load([record], manifest, dtype_policy="exact").reads
    assert [(step.chunk, step.part) for step in reads] == [
        (chunk, part) for chunk in chunks if (part := intersect(chunk.box, Box(corner, size)))
    ]


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_crcs_of_pieces_join_to_that_of_the_whole(pieces):
    data = random.Random(pieces).randbytes(100_003)
    cuts = sorted(random.Random(1).sample(range(len(data)), pieces - 1))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert integrity.join_pieces(integrity.Piece(zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(data)


@pytest.mark.parametrize("candidates", [None, {}], ids=["fastest library", "zlib alone"])
@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 100_001])
def test_crc32_is_zlibs_whatever_library_computes_it(monkeypatch, candidates, size):
    if candidates is not None:
        monkeypatch.setattr(integrity, "_CANDIDATES", candidates)
    integrity._fastest.cache_clear()
    try:
        data = random.Random(size).randbytes(size)
        for form in (data, bytearray(data), memoryview(data), memoryview(bytearray(data))):
            assert integrity.crc32(form, 77) == zlib.crc32(data, 77)
    finally:
        integrity._fastest.cache_clear()


def test_a_library_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(integrity, "_CANDIDATES", {None: lambda _: lambda value, address, nbytes: 7})
    integrity._fastest.cache_clear()
    try:
        assert integrity.library() == "zlib"
    finally:
        integrity._fastest.cache_clear()


def test_a_repeated_save_reuses_the_index_and_a_changed_one_does_not(tmp_path, monkeypatch):
    strategy, encoded = TorchDistSaveShardedStrategy(), []
    plain = metadata.encode_parts
    monkeypatch.setattr(metadata, "encode_parts", lambda manifest: encoded.append(1) or plain(manifest))

    def save(name, size, fill):
        state = {"w": one("w", torch.full((size,), fill)), "o": ShardedObject("o", [fill], (1,), (0,))}
        dist_ckpt.save(state, tmp_path / name, strategy)
        assert dist_ckpt.load_plain_tensors(tmp_path / name)["w"].tolist() == [fill] * size
        return len(encoded)

    assert [save("a", 4, 1.0), save("b", 4, 2.0), save("a", 4, 3.0)] == [1, 1, 1]
    assert [save("c", 5, 4.0), save("d", 5, 5.0), save("e", 4, 6.0)] == [2, 2, 3]
    ids = {open_checkpoint(tmp_path / name).manifest.save_id for name in "abcde"}
    assert len(ids) == 5


def test_small_and_large_tensors_share_a_file_and_every_byte_of_it_is_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 1 << 20)
    sizes = [3, 70_000, 1, 300_000, 2_000_003, 5]
    state = {f"t{i}": one(f"t{i}", torch.arange(n, dtype=torch.float32)) for i, n in enumerate(sizes)}
    dist_ckpt.save(state, tmp_path / "c", check_finite=True)
    data = (tmp_path / "c" / "__0_0.distcp").read_bytes()
    written = integrity.decode(tmp_path / "c", (tmp_path / "c" / "integrity.json").read_bytes()).files["__0_0.distcp"]
    assert written.size == len(data)
    assert list(written.digests) == [
        f"{zlib.crc32(data[at : at + (1 << 20)]):08x}" for at in range(0, len(data), 1 << 20)
    ]


@pytest.mark.slow
def test_damage_anywhere_in_blocks_that_hold_small_large_and_strided_parts_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 1 << 18)
    state = {
        "small": one("small", torch.ones(100)),
        "large": one("large", torch.ones(100_000)),
        "wide": one("wide", torch.ones(300, 200)),
    }
    dist_ckpt.save(state, tmp_path / "c")
    path = tmp_path / "c" / "__0_0.distcp"
    asked = {
        "small": one("small", torch.zeros(100)),
        "large": one("large", torch.zeros(100_000)),
        "wide": ShardedTensor("wide", torch.zeros(300, 10), torch.float32, (300, 10), (300, 200), (0, 20), None),
    }
    for position in random.Random(0).sample(range(path.stat().st_size), 40):
        flip_byte(path, position)
        with pytest.raises(CorruptError, match="__0_0"):
            dist_ckpt.load(asked, tmp_path / "c", validate_access_integrity=False)
        flip_byte(path, position)
    loaded = dist_ckpt.load(asked, tmp_path / "c", validate_access_integrity=False)
    assert all(bool((tensor == 1).all()) for tensor in loaded.values())


def test_two_targets_of_the_same_bytes_are_both_filled(tmp_path):
    dist_ckpt.save({"w": one("w", torch.arange(200_000.0))}, tmp_path / "c")
    asked = {"a": one("w", torch.zeros(200_000)), "b": one("w", torch.zeros(200_000), replica_id=1)}
    loaded = dist_ckpt.load(asked, tmp_path / "c")
    assert torch.equal(loaded["a"], torch.arange(200_000.0)) and torch.equal(loaded["b"], loaded["a"])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("verify", ["touched", "off"])
def test_threads_and_small_windows_read_the_same_values(tmp_path, monkeypatch, threads, verify):
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 1 << 18)
    values = {f"t{i}": torch.randn(n, 7) for i, n in enumerate((1, 30_000, 3, 6_000, 2, 25_000))}
    dist_ckpt.save({key: one(key, tensor) for key, tensor in values.items()}, tmp_path / "c")
    checkpoint = open_checkpoint(tmp_path / "c", verify=verify)
    whole = [one(key, torch.zeros_like(tensor)) for key, tensor in values.items()]
    columns = [
        ShardedTensor(key, torch.zeros(len(t), 2), t.dtype, (len(t), 2), tuple(t.shape), (0, 3), None)
        for key, t in values.items()
    ]
    spans = checkpoint.integrity.all_spans() if verify == "touched" else []
    blocks = [block for span in spans for block in span.blocks() if block.file.endswith("distcp") and block.number % 3]
    done = []
    found = reader.Reader(checkpoint, "exact", threads, window_bytes=1 << 18)
    found.run(
        [*whole, *columns],
        plan_load([*whole, *columns], checkpoint.manifest, dtype_policy="exact"),
        blocks,
        done.append,
    )
    assert sorted(done) == list(range(12))
    for record, tensor in zip(whole, values.values(), strict=True):
        assert torch.equal(record.data, tensor)
    for record, tensor in zip(columns, values.values(), strict=True):
        assert torch.equal(record.data, tensor[:, 3:5])


@pytest.mark.parametrize("mebibytes", [1, 12], ids=["written midway", "reserved before the first byte"])
def test_a_real_limit_on_the_size_of_a_file_leaves_the_old_checkpoint_and_no_staging(tmp_path, mebibytes):
    dist_ckpt.save({"w": one("w", torch.ones(4))}, tmp_path / "c")
    large = one("w", torch.zeros(mebibytes << 18))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (mebibytes << 19, hard))
    try:
        with pytest.raises(StorageError, match=r"EFBIG: .* needs \d+ bytes, \d+ are free"):
            dist_ckpt.save({"w": large}, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == [1.0] * 4
