"""What ranks of different domains send each other: whole files arrive as they are, all else is refused."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from sixfold.dist_ckpt import CheckpointError, CorruptError, LostPeerError, StorageError, UnsafeError
from sixfold.dist_ckpt.formats.integrity import crc32
from sixfold.dist_ckpt.memory_tier.domain_folder import DomainFolder
from sixfold.dist_ckpt.memory_tier.generations import Generation
from sixfold.dist_ckpt.memory_tier.peers import Address, File, Peer, Server

TOKEN = bytes(range(32))
GENERATION = Generation(3, 7, "0123456789abcdef")


@pytest.fixture
def served(tmp_path):
    """A server over an empty folder of a run, and its address."""
    folder = DomainFolder(tmp_path / "there", "run")
    folder.make()
    server = Server(folder, "127.0.0.1", 1.0)
    server.token = TOKEN
    yield server, folder, Address(1, "there", "127.0.0.1", server.port)
    server.close()


def written(folder, **files):
    """Files of a generation, and what is told of them."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [File(name, len(data), crc32(data)) for name, data in files.items()]


def names(folder):
    return sorted(os.listdir(folder.path(GENERATION))) if folder.path(GENERATION).exists() else []


@pytest.mark.parametrize("nbytes", [0, 1, 5_000_000, 9_000_001])
def test_a_file_arrives_as_it_is_and_any_part_of_it_can_be_had(served, tmp_path, nbytes):
    _, folder, address = served
    data = os.urandom(nbytes)
    files = written(tmp_path / "own", **{"__3_0.distcp": data, "rank-3": b"record"})
    moved = []
    with Peer(address, TOKEN, 5.0) as peer:
        peer.put(GENERATION, tmp_path / "own", files, moved.append)
        assert (folder.path(GENERATION) / "__3_0.distcp").read_bytes() == data
        assert names(folder) == ["__3_0.distcp", "rank-3"]
        for start, stop in [(0, nbytes), (nbytes // 3, nbytes // 2)]:
            assert peer.get(GENERATION, "__3_0.distcp", start, stop - start) == data[start:stop]
        with pytest.raises(CorruptError, match="has fewer than"):
            peer.get(GENERATION, "__3_0.distcp", nbytes, 1)
        with pytest.raises(StorageError, match=r"__9_0.distcp is gone"):
            peer.get(GENERATION, "__9_0.distcp", 0, 1)
        assert peer.get(GENERATION, "rank-3", 0, 6) == b"record"  # an error ends no connection
    assert len(moved) >= nbytes // 2**22
    for name in names(folder):
        assert (folder.path(GENERATION) / name).stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_not_what_was_told_does_not_appear(served, tmp_path):
    _, folder, address = served
    good, bad = written(tmp_path / "own", **{"__3_0.distcp": bytes(3_000_000), "rank-3": b"record"})
    with (
        Peer(address, TOKEN, 5.0) as peer,
        pytest.raises(CorruptError, match=r"rank 1 of domain there.*arrived damaged"),
    ):
        peer.put(GENERATION, tmp_path / "own", [good._replace(crc=1), bad], lambda _: None)
    assert names(folder) == []


@pytest.mark.parametrize("name", ["../rank-3", "/etc/rank-3", "whole", ".put-00", "rank-3x", "__3_0.distcp/..", ""])
def test_names_that_are_of_no_generation_are_refused(served, tmp_path, name):
    _, folder, address = served
    (tmp_path / "own").mkdir()
    (tmp_path / "rank-3").write_bytes(b"record")
    with Peer(address, TOKEN, 5.0) as peer, pytest.raises(UnsafeError, match="is no file of a generation"):
        peer.get(GENERATION, name, 0, 1)
    source = tmp_path / "own" / "x"
    source.write_bytes(b"record")

    class Renamed(type(tmp_path)):
        def __truediv__(self, _):
            return Path(source)

    with Peer(address, TOKEN, 5.0) as peer, pytest.raises(UnsafeError, match="is no file of a generation"):
        peer.put(GENERATION, Renamed(tmp_path), [File(name, 6, crc32(b"record"))], lambda _: None)
    assert names(folder) == []


def test_a_generation_of_another_name_is_refused(served):
    _, _, address = served
    with Peer(address, TOKEN, 5.0) as peer, pytest.raises(UnsafeError, match="is the name of no generation"):
        peer.get(Generation(1, 1, "../../../../etc/"), "rank-3", 0, 1)


def test_who_does_not_know_the_token_is_not_served(served, tmp_path):
    server, folder, address = served
    files = written(tmp_path / "own", **{"rank-3": b"record"})
    for token in (bytes(32), TOKEN[:31] + b"\0"):
        with pytest.raises(LostPeerError), Peer(address, token, 5.0) as peer:
            peer.put(GENERATION, tmp_path / "own", files, lambda _: None)
    server.token = b""
    with pytest.raises(LostPeerError), Peer(address, b"", 5.0) as peer:
        peer.put(GENERATION, tmp_path / "own", files, lambda _: None)
    assert names(folder) == []


@pytest.mark.parametrize(
    "data", [b"", b"x", TOKEN, TOKEN + b"\xff" * 8, TOKEN + bytes(8), TOKEN + b"\5" + bytes(7) + b"12345"]
)
def test_garbage_ends_its_own_connection_alone(served, tmp_path, data):
    _, folder, address = served
    with socket.create_connection(address[2:], 5.0) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    with Peer(address, TOKEN, 5.0) as peer:
        peer.put(GENERATION, tmp_path / "own", written(tmp_path / "own", **{"rank-3": b"record"}), lambda _: None)
    assert names(folder) == ["rank-3"]


def test_a_copy_of_a_generation_that_was_given_up_comes_too_late(served, tmp_path):
    server, folder, address = served
    files = written(tmp_path / "own", **{"rank-3": b"record"})
    for oldest, is_taken in [((3, 8), False), ((4, 0), False), ((3, 7), True)]:
        server.oldest = oldest
        with Peer(address, TOKEN, 5.0) as peer:
            if is_taken:
                peer.put(GENERATION, tmp_path / "own", files, lambda _: None)
            else:
                with pytest.raises(StorageError, match="is older than what is kept here"):
                    peer.put(GENERATION, tmp_path / "own", files, lambda _: None)
    assert names(folder) == ["rank-3"]


def test_a_sender_that_dies_in_the_middle_leaves_nothing(served, tmp_path):
    _, folder, address = served
    (file,) = written(tmp_path / "own", **{"__3_0.distcp": bytes(1000)})

    def dies(_):
        raise KeyboardInterrupt

    with Peer(address, TOKEN, 5.0) as peer, pytest.raises(KeyboardInterrupt):
        peer.put(GENERATION, tmp_path / "own", [file._replace(nbytes=1_000_000)], dies)
    until = time.monotonic() + 5
    while names(folder) and time.monotonic() < until:
        time.sleep(0.01)
    assert names(folder) == []


def test_a_peer_that_is_stopped_or_gone_costs_one_deadline_and_is_named(tmp_path):
    (file,) = written(tmp_path / "own", **{"__3_0.distcp": bytes(50_000_000)})
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = Address(4, "away", "127.0.0.1", deaf.getsockname()[1])
        start = time.monotonic()
        with Peer(address, TOKEN, 0.3) as peer, pytest.raises(LostPeerError, match=r"rank 4 of domain away .* 0.3 s"):
            peer.put(GENERATION, tmp_path / "own", [file], lambda _: None)
        assert time.monotonic() - start < 2
    with pytest.raises(LostPeerError, match="refused"):
        Peer(address, TOKEN, 0.3)


def test_a_closed_server_ends_its_thread(tmp_path):
    folder = DomainFolder(tmp_path, "run")
    folder.make()
    server = Server(folder, "", 1.0)
    assert isinstance(server.port, int)
    thread = server._thread
    server.close()
    thread.join(5)
    assert not thread.is_alive()
    assert threading.active_count() < 50


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "-x", "x" * 101, None, 7, "a b"])
def test_a_run_is_the_name_of_a_folder(run):
    from sixfold.dist_ckpt import MemoryTier

    with pytest.raises(CheckpointError, match=r"run is .*; it names a folder"):
        MemoryTier("/dev/shm", run, group=None)
