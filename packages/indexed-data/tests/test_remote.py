"""Pairs of a store: equal to local ones, through failures; what changes or does not answer is an error by name."""

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from range_server_helpers import RangeServer

from sixfold.indexed_data import (
    IndexedDataError,
    IndexedDataset,
    IndexedDatasetBuilder,
    RemoteOptions,
    StoreError,
    build,
)
from sixfold.indexed_data.piece_files import PieceFiles
from sixfold.indexed_data.remote import WASTE, RemoteObject, coalesced


@pytest.fixture
def local(folder):
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder("wiki.bin", np.uint16) as builder:
        for _ in range(200):
            ids = rng.integers(0, 60_000, rng.integers(0, 300))
            builder.add_document(ids, loss_mask=rng.random(ids.size) < 0.5)
    return IndexedDataset("wiki")


def served(*prefixes, **options):
    names = [
        f"{prefix}{end}" for prefix in prefixes for end in (".bin", ".idx", ".mask") if os.path.exists(prefix + end)
    ]
    return RangeServer({name: Path(name).read_bytes() for name in names}, **options)


PARENT = os.getpid()
FAST = {"timeout_s": 5.0, "retries": 6}


def test_a_pair_behind_a_url_reads_as_the_local_one(local):
    with served("wiki") as server:
        remote = IndexedDataset(f"{server.url}/wiki")
        assert len(remote) == len(local)
        for number in range(len(local)):
            assert np.array_equal(remote[number], local[number])
            assert np.array_equal(remote.loss_mask(number), local.loss_mask(number))
        assert np.array_equal(remote.get(7, 1, 5), local.get(7, 1, 5))
        assert [ids.tolist() for ids in remote[3:9]] == [ids.tolist() for ids in local[3:9]]
        again = pickle.loads(pickle.dumps(remote))
        assert np.array_equal(again[11], local[11])
        assert IndexedDataset.exists(f"{server.url}/wiki")
        assert not IndexedDataset.exists(f"{server.url}/other")
        with pytest.raises(IndexedDataError, match=r"other: found .*404"):
            IndexedDataset(f"{server.url}/other")


@pytest.mark.parametrize("in_folder", [False, True], ids=["memory", "folder"])
def test_with_failing_requests_every_read_is_right_or_an_error(local, in_folder):
    cache = "cache" if in_folder else None
    with served("wiki", failing=0.3) as server:
        remote = IndexedDataset(f"{server.url}/wiki", remote=RemoteOptions(cache_folder=cache, **FAST))
        rng = np.random.default_rng(1)
        pointers, lengths = local.sequence_pointers // 2, local.sequence_lengths
        for _ in range(8):
            numbers = rng.integers(0, len(local), 20)
            remote.prefetch(pointers[numbers], lengths[numbers])
            for number in numbers.tolist():
                assert np.array_equal(remote[number], local[number])
        assert server.failed > 10


def test_what_is_fetched_ahead_is_not_asked_again_and_little_more_is_fetched(local):
    with served("wiki") as server:
        remote = IndexedDataset(f"{server.url}/wiki")
        pointers, lengths = local.sequence_pointers // 2, local.sequence_lengths
        given = server.given
        rng, needed = np.random.default_rng(2), set()
        for _ in range(10):
            numbers = rng.integers(0, len(local), 8)
            remote.prefetch(pointers[numbers], lengths[numbers])
            for number in numbers.tolist():
                assert np.array_equal(remote[number], local[number])
                needed |= set(range(int(pointers[number]), int(pointers[number]) + int(lengths[number])))
        assert server.given - given <= 1.1 * 2 * len(needed)
        before = len(server.requests)
        remote.prefetch(pointers[numbers], lengths[numbers])
        assert np.array_equal(remote[int(numbers[0])], local[int(numbers[0])])
        assert len(server.requests) == before


@pytest.mark.parametrize("seed", range(30))
def test_coalesced_ranges_hold_all_that_was_asked_and_little_else(seed):
    """The oracle counts bytes one by one."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 3000, 40)
    end = begin + rng.integers(0, 90, 40)
    found = coalesced(begin, end)
    asked = {byte for a, b in zip(begin.tolist(), end.tolist(), strict=True) for byte in range(a, b)}
    held = [byte for a, b in found for byte in range(a, b)]
    assert asked <= set(held)
    assert len(held) == len(set(held))
    assert held == sorted(held)
    assert len(held) - len(asked) <= WASTE * (end - begin).sum()


def test_an_object_that_is_replaced_is_an_error_and_never_other_tokens(local):
    with served("wiki") as server:
        remote = IndexedDataset(f"{server.url}/wiki")
        server.tags["wiki.bin"] = '"two"'
        with pytest.raises(StoreError, match=r"wiki\.bin: has \d+ bytes and the tag '\"two\"', and had .* replaced"):
            remote[150]
        server.tags.clear()
        server.files["wiki.bin"] = server.files["wiki.bin"][:-100]
        with pytest.raises(StoreError, match="the object was replaced"):
            remote[150]
        server.files["wiki.bin"] = b""
        with pytest.raises(StoreError, match="the object was replaced"):
            remote[150]


def test_without_an_etag_the_date_tells_that_an_object_was_replaced(local):
    options = RemoteOptions(cache_folder="cache", request_bytes=1000)
    date = "Mon, 02 Nov 2026 10:00:0{} GMT".format
    with served("wiki") as server:
        server.tags |= dict.fromkeys(server.files)
        server.changed |= dict.fromkeys(server.files, date(0))
        remote = IndexedDataset(f"{server.url}/wiki", remote=options)
        assert np.array_equal(remote[3], local[3])
        server.files["wiki.bin"] = server.files["wiki.bin"][::-1]
        server.changed["wiki.bin"] = date(1)
        with pytest.raises(StoreError, match=r"00:01 GMT', and had .*00:00 GMT' when it was opened"):
            remote[150]
        later = RemoteObject(f"{server.url}/wiki.bin", options)
        assert later.read(0, later.size()) == server.files["wiki.bin"]


def test_of_an_object_without_any_tag_no_later_run_reads_what_is_in_the_folder(local):
    options = RemoteOptions(cache_folder="cache")
    with served("wiki") as server:
        server.tags |= dict.fromkeys(server.files)
        with pytest.warns(UserWarning, match=r"wiki\.bin: the store gives neither ETag nor a date"):
            first = RemoteObject(f"{server.url}/wiki.bin", options)
        first.read(0, first.size())
        before = len(server.requests)
        first.read(0, first.size())
        assert len(server.requests) == before, "it reads its own pieces again"
        server.files["wiki.bin"] = server.files["wiki.bin"][::-1]
        with pytest.warns(UserWarning, match="later runs use nothing of it in cache_folder"):
            later = RemoteObject(f"{server.url}/wiki.bin", options)
        assert later.read(0, later.size()) == server.files["wiki.bin"]


def test_a_server_that_gives_less_than_it_is_asked_for_is_asked_for_the_rest(local):
    with served("wiki") as server:
        server.at_most = 100
        remote = IndexedDataset(f"{server.url}/wiki")
        assert all(np.array_equal(remote[number], local[number]) for number in range(0, len(local), 9))


@pytest.mark.parametrize(
    ("name", "wrong", "quoted"), [("my wiki", "' '", "my%20wiki"), ("wik\u00ed", "'\u00ed'", "wik%C3%AD")]
)
def test_a_url_that_needs_quoting_is_refused_at_once(local, name, wrong, quoted):
    with served("wiki") as server:
        server.files |= {f"my%20wiki{end}": server.files[f"wiki{end}"] for end in (".bin", ".idx")}
        with pytest.raises(IndexedDataError, match=rf"has {wrong}, which a URL has only quoted; give .*/{quoted}\.idx"):
            IndexedDataset(f"{server.url}/{name}")
        assert not server.requests
        assert np.array_equal(IndexedDataset(f"{server.url}/my%20wiki")[3], local[3])


def test_a_store_that_does_not_answer_or_refuses_is_one_typed_error(local):
    options = RemoteOptions(timeout_s=0.3, retries=1)
    with served("wiki") as server:
        remote = IndexedDataset(f"{server.url}/wiki", remote=options)
        server.status = 503
        with pytest.raises(
            StoreError, match=r"wiki\.bin: bytes \d+ to \d+: 2 attempts failed, the last with HTTPError"
        ):
            remote[3]
        server.status = 403
        with pytest.raises(StoreError, match=r"the store refuses: 403"):
            remote[3]
        server.status = None
        server.hanging.set()
        with pytest.raises(StoreError, match=r"attempts failed, the last with .*[Tt]imed? ?out"):
            remote[3]
        server.hanging.clear()
        assert np.array_equal(remote[3], local[3])  # a failed read spoils nothing
    with pytest.raises(StoreError, match="attempts failed"):
        IndexedDataset("http://127.0.0.1:9/wiki", remote=options)


def test_a_server_without_ranges_is_refused(folder):
    import http.server

    Path("wiki.idx").write_bytes(bytes(100))
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(StoreError, match="answers 200 to a request for a range"):
        IndexedDataset(f"http://127.0.0.1:{server.server_port}/wiki")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("cache", [None, "cache"])
def test_a_read_of_more_than_the_cache_holds_is_whole(local, cache):
    options = RemoteOptions(cache_folder=cache, cache_bytes=300, request_bytes=128, **FAST)
    with served("wiki") as server:
        for _ in range(5):
            remote = IndexedDataset(f"{server.url}/wiki", remote=options)
            longest = int(np.argmax(local.sequence_lengths))
            assert local.sequence_lengths[longest] * 2 > 300, "else this shows nothing"
            assert np.array_equal(remote[longest], local[longest])


def test_a_damaged_piece_of_the_folder_is_fetched_anew(local):
    options = RemoteOptions(cache_folder="cache", **FAST)
    with served("wiki") as server:
        first = IndexedDataset(f"{server.url}/wiki", remote=options)
        assert all(np.array_equal(first[n], local[n]) for n in range(len(local)))
        pieces = sorted(Path("cache").glob("*.piece"))
        for path in pieces:
            data = bytearray(path.read_bytes())
            data[len(data) // 3] ^= 1
            path.write_bytes(data)
        again = IndexedDataset(f"{server.url}/wiki", remote=options)
        assert pieces and all(np.array_equal(again[n], local[n]) for n in range(len(local)))


def test_pieces_in_a_folder_are_found_by_a_later_run_and_stay_within_the_limit(local):
    options = RemoteOptions(cache_folder="cache", cache_bytes=20_000)
    with served("wiki") as server:
        first = IndexedDataset(f"{server.url}/wiki", remote=options)
        for number in range(10):
            first[number]
        before = len(server.requests)
        second = RemoteObject(f"{server.url}/wiki.bin", options)
        for number in range(10):
            at, count = int(local.sequence_pointers[number]), 2 * int(local.sequence_lengths[number])
            assert second.read(at, count) == local[number].tobytes()
        assert [name for name, *_ in server.requests[before:]] == ["wiki.bin"]  # its size
        Path("cache/mine.txt").write_text("mine")
        for number in range(len(local)):
            assert np.array_equal(first[number], local[number])
            held = sum(path.stat().st_size for path in Path("cache").glob("*.piece"))
            assert held <= 20_000 + 600
        assert Path("cache/mine.txt").read_text() == "mine"
        server.tags["wiki.bin"] = '"two"'  # another object has other files
        third = RemoteObject(f"{server.url}/wiki.bin", options)
        before = len(server.requests)
        third.read(0, 100)
        assert len(server.requests) == before + 1


def test_memory_is_bounded_for_all_objects_of_a_process(local):
    """The oracle counts bytes in a log of what was read: the last of them are here, and nothing of before."""
    rng, at_a_time = np.random.default_rng(3), 1000
    data, options = Path("wiki.bin").read_bytes()[:20_000], RemoteOptions(cache_bytes=10_001)  # of no other test
    with RangeServer({f"{number}.bin": data for number in range(5)}) as server:
        objects = [RemoteObject(f"{server.url}/{name}", options) for name in server.files]
        log = []
        for _ in range(200):
            one = int(rng.integers(5)), at_a_time * int(rng.integers(20))
            before = len(server.requests)
            assert objects[one[0]].read(one[1], at_a_time) == data[one[1] : one[1] + at_a_time]
            recent = list(dict.fromkeys(reversed(log)))[:10]
            assert (len(server.requests) == before) == (one in recent)
            log.append(one)
        del objects[:4]  # what is gone holds nothing
        for at in range(0, 10_000, at_a_time):
            objects[0].read(at, at_a_time)
        before = len(server.requests)
        for at in range(0, 10_000, at_a_time):
            objects[0].read(at, at_a_time)
        assert len(server.requests) == before


def test_a_folder_is_bounded_for_all_that_use_it(local):
    """Eight objects of one process, then four processes at once; the oracle adds up the files."""

    def held():
        total = 0
        for path in Path("cache").glob("*.piece"):
            with suppress(FileNotFoundError):  # another process has removed it meanwhile
                total += path.stat().st_size
        return total

    def read(server, names):
        objects = [RemoteObject(f"{server.url}/{name}", options) for name in names]
        for at in range(0, 20_000, 1000):
            for each in objects:
                assert each.read(at, 1000) == data[at : at + 1000]
                seen.append(held())

    data, options, seen = (
        Path("wiki.bin").read_bytes()[:20_000],
        RemoteOptions(cache_folder="cache", cache_bytes=40_000),
        [],
    )
    with RangeServer({f"{number}.bin": data for number in range(8)}) as server:
        read(server, server.files)
        assert max(seen) <= 40_000 + 1004 and held() > 30_000
        children = []
        for number in range(4):
            children.append(os.fork())
            if children[-1] == 0:
                with suppress(BaseException):
                    read(server, [f"{number}.bin", f"{number + 4}.bin"])
                    os._exit(0 if max(seen) <= 1.4 * 40_000 + 4 * 1004 else 1)
                os._exit(2)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert held() <= 1.4 * 40_000 + 4 * 1004


def test_more_ahead_than_the_cache_holds_is_refused(local):
    with served("wiki") as server:
        remote = IndexedDataset(f"{server.url}/wiki", remote=RemoteOptions(cache_bytes=1000))
        with pytest.raises(StoreError, match="1200 bytes are to be fetched ahead, and the cache holds 1000"):
            remote.prefetch([0], [600])
        assert np.array_equal(remote[0], local[0])
        with pytest.raises(IndexedDataError, match="are asked ahead; the pair has"):
            remote.prefetch([0], [10**9])


def test_a_fork_reads_what_its_parent_had_under_way(local):
    with served("wiki", delay_s=0.05) as server:
        remote = IndexedDataset(f"{server.url}/wiki", remote=RemoteOptions(**FAST))
        remote.prefetch(local.sequence_pointers[:50] // 2, local.sequence_lengths[:50])
        child = os.fork()
        if child == 0:
            same = all(np.array_equal(remote[number], local[number]) for number in range(0, 50, 7))
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert np.array_equal(remote[3], local[3])


@pytest.mark.parametrize("read_before", [False, True])
def test_a_fork_reads_from_an_asynchronous_store(local, read_before):
    """Such a client (of s3:// and gs://) works in the process that made it, and in no fork of that."""
    fsspec = pytest.importorskip("fsspec", reason="needs the extra sixfold-indexed-data[remote]")
    asyn = pytest.importorskip("fsspec.asyn", reason="needs the extra sixfold-indexed-data[remote]")

    class Store(asyn.AsyncFileSystem):
        protocol = "ofthetest"

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            weakref.finalize(self, Path(f"closed by {os.getpid()}").absolute().touch).atexit = False

        async def _info(self, path, **_):
            return {"size": os.path.getsize(Path(path).name), "ETag": "one"}

        async def _cat_file(self, path, start=None, end=None, **_):
            return Path(Path(path).name).read_bytes()[start:end]

    fsspec.register_implementation("ofthetest", Store, clobber=True)
    remote = IndexedDataset("ofthetest://bucket/wiki", remote=RemoteOptions(timeout_s=5.0, retries=1))
    if read_before:
        assert np.array_equal(remote[3], local[3])
    children = [os.fork() for _ in range(2) if os.getpid() == PARENT]
    if 0 in children:
        with suppress(BaseException):
            same = all(np.array_equal(remote[number], local[number]) for number in range(0, 50, 7))
            gc.collect()
            os._exit(0 if same and not Path(f"closed by {PARENT}").exists() else 1)
        os._exit(2)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert np.array_equal(remote[5], local[5])


def test_a_piece_that_another_thread_lets_go_is_not_missed(local, monkeypatch):
    options = RemoteOptions(cache_folder="cache", **FAST)
    data = Path("wiki.bin").read_bytes()
    with served("wiki") as server:
        remote = RemoteObject(f"{server.url}/wiki.bin", options)
        remote.read(0, 100)  # now it is a file, and each read takes it up and lets it go
        has_piece, may_let_go = threading.Event(), threading.Event()
        result, begin_missing = RemoteObject._result, RemoteObject._begin_missing
        other = threading.Thread(target=remote.read, args=(0, 100))

        def waits_with_its_piece(self, *piece):
            if threading.current_thread() is other:
                has_piece.set()
                may_let_go.wait(5)
            return result(self, *piece)

        def lets_the_other_go_on(self, *piece):
            begin_missing(self, *piece)
            if threading.current_thread() is not other:
                may_let_go.set()
                other.join(0.5)

        monkeypatch.setattr(RemoteObject, "_result", waits_with_its_piece)
        monkeypatch.setattr(RemoteObject, "_begin_missing", lets_the_other_go_on)
        other.start()
        assert has_piece.wait(5)
        assert remote.read(0, 100) == data[:100]
        other.join()


@pytest.mark.parametrize("mmap", [True, False])
def test_local_pairs_take_look_ahead_too(local, mmap):
    data = IndexedDataset("wiki", mmap=mmap)
    data.prefetch(local.sequence_pointers // 2, local.sequence_lengths)
    data.prefetch([], [])
    assert np.array_equal(data[5], local[5])
    with pytest.raises(IndexedDataError, match="are asked ahead"):
        data.prefetch([-1], [2])


def test_any_store_of_fsspec_is_read(local):
    fsspec = pytest.importorskip("fsspec", reason="needs the extra sixfold-indexed-data[remote]")
    store = fsspec.filesystem("memory")
    for end in (".bin", ".idx", ".mask"):
        store.pipe(f"/bucket/wiki{end}", Path(f"wiki{end}").read_bytes())
    options = RemoteOptions(check_s=1e-9, retries=1)
    remote = IndexedDataset("memory://bucket/wiki", remote=options)
    for number in range(0, len(local), 9):
        assert np.array_equal(remote[number], local[number])
        assert np.array_equal(remote.loss_mask(number), local.loss_mask(number))
    store.pipe("/bucket/wiki.bin", b"other")
    with pytest.raises(StoreError, match="the object was replaced"):
        remote[1]
    assert not IndexedDataset.exists("memory://bucket/none")
    with pytest.raises(StoreError, match="the store refuses"):
        IndexedDataset("nosuchstore://bucket/wiki", remote=options)


def test_without_fsspec_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(IndexedDataError, match=r"pip install 'sixfold-indexed-data\[remote\]'"):
        IndexedDataset("s3://bucket/wiki")


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"retries": -1}, {"timeout_s": 0.0}, {"cache_bytes": 0}])
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(IndexedDataError, match="connections, sizes and times are > 0"):
        RemoteOptions(**wrong)


def test_remote_options_of_a_local_pair_are_refused(local):
    with pytest.raises(IndexedDataError, match="remote is given; it goes with a URL"):
        IndexedDataset("wiki", remote=RemoteOptions())


def test_a_pair_with_provenance_tells_it_behind_a_url_too(folder):
    Path("a.jsonl").write_text('{"text": "one"}\n\n{"text": "three"}\n')
    build(["a.jsonl"], "wiki", provenance=True)
    with RangeServer({f"wiki{end}": Path(f"wiki{end}").read_bytes() for end in (".bin", ".idx", ".sources")}) as server:
        assert IndexedDataset(f"{server.url}/wiki").provenance.of(1) == ("a.jsonl", 3)


KILLED = """
import os, sys
from sixfold.indexed_data.piece_files import PieceFiles

pieces = PieceFiles("cache", "http://any/wiki.bin", 100, "one", 10_000)
pieces.write(0, 10, bytes(10))
os.replace = lambda *names: (print("written", flush=True), sys.stdin.read())
pieces.write(10, 20, bytes(10))
"""


def test_what_a_killed_writer_leaves_goes_and_nothing_else_does(folder):
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"written\n"
            process.kill()
    pieces = {path.name for path in Path("cache").iterdir() if path.suffix == ".piece"}
    left = [path for path in Path("cache").iterdir() if path.suffix != ".piece"]
    assert len(pieces) == 1 and len(left) == 1, "the second writer removed what the first one left"
    piece, writer = left[0].name.split(".piece.")
    machine, process, thread = writer.split("-")

    def unfinished(machine, process):
        return f"{piece}.piece.{machine}-{process}-{thread}"

    def without_machine(process):  # as 0.2.0.dev0 called them
        return f"{piece}.piece.{process}-{thread}"

    kept = [unfinished(machine, os.getpid()), unfinished("0" * 8, process), without_machine(process)]
    kept += ["notes.txt", f"{left[0].name}.bak", f"x{left[0].name}", f"{piece}.part.{writer}"]
    old = [unfinished("0" * 8, 1), without_machine(1)]
    for name in (*kept, *old):
        Path("cache", name).write_bytes(b"1")
    for name in (*old, "notes.txt"):
        os.utime(Path("cache", name), (time.time() - 4000,) * 2)
    folder_of_that_name = unfinished(machine, 999_999_999)
    Path("cache", folder_of_that_name).mkdir()
    found = PieceFiles("cache", "http://any/wiki.bin", 100, "one", 10_000)
    assert found.read(0, 10) == bytes(10)
    assert {path.name for path in Path("cache").iterdir()} == {*pieces, *kept, folder_of_that_name}


def test_a_writer_whose_file_was_removed_keeps_one_piece_less(folder, monkeypatch):
    pieces, replace = PieceFiles("cache", "http://any/wiki.bin", 100, "one", 10_000), os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (os.unlink(old), replace(old, new)))
    pieces.write(0, 10, bytes(10))
    assert not pieces.has(0, 10) and not list(Path("cache").iterdir())
