"""The S3 server of the tests does what it says: S3's answers, faults injected and counted, gone with its process."""

import http.client
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from s3_server import Fault

FAST = {"retries": {"max_attempts": 0}, "read_timeout": 0.4}  # s3fs retries by itself; botocore need not too
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, Signature=any"}
DATA = random.Random(0).randbytes(100_000)


@pytest.fixture(scope="module")
def files(s3_process):
    """fsspec's S3 file system of the server, with retries of its own; making one takes 0.3 s."""
    import s3fs

    return s3fs.S3FileSystem(**s3_process.storage_options(), config_kwargs=FAST, skip_instance_cache=True)


@pytest.fixture
def place(s3, files):
    path = f"{s3.bucket()}/folder/object"
    files.pipe_file(path, DATA)
    s3.set()
    return path


def asked(s3, place, method="GET", timeout_s=10.0, body=None, **headers):
    """Status, headers and body of one request that is made once."""
    connection = http.client.HTTPConnection("127.0.0.1", s3.port, timeout=timeout_s)
    try:
        named = SIGNED | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"/{place}", body=body, headers=named)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def requests(s3):
    return {kind: tally["requests"] for kind, tally in s3.counts().items() if kind != "total"}


def test_any_range_is_the_objects_own_before_and_after_it_is_written_anew(s3, files, place):
    rng = random.Random(1)
    for data in (DATA, DATA[::-1] + b"more"):
        files.pipe_file(place, data)
        for _ in range(10):
            start = rng.randrange(len(data))
            stop = rng.randrange(start + 1, len(data) + 20)
            assert files.cat_file(place, start=start, end=stop) == data[start:stop]
    assert s3.counts()["range"]["bytes_out"] > 0
    files.rm_file(place)
    with pytest.raises(FileNotFoundError):
        files.cat_file(place, start=0, end=5)


def test_what_is_no_plain_range_is_motos_to_answer(s3, place):
    status, headers, body = asked(s3, place, Range="bytes=10-19")
    assert (status, body) == (206, DATA[10:20])
    assert headers["Content-Range"] == f"bytes 10-19/{len(DATA)}"
    etag = headers["ETag"]
    assert asked(s3, place, Range="bytes=-7")[2] == DATA[-7:]
    assert asked(s3, place, Range=f"bytes={len(DATA)}-")[0] == 416
    assert asked(s3, place, Range="bytes=0-4", If_Match=etag)[2] == DATA[:5]
    assert asked(s3, place, Range="bytes=0-4", If_Match='"0"')[0] == 412
    assert asked(s3, place + "x", Range="bytes=0-4")[0] == 404


def test_each_kind_is_counted_and_logged_in_order(s3, files, place):
    folder = place.rpartition("/")[0]
    part = 5 << 20
    with files.open(f"{folder}/large", "wb", block_size=part) as file:
        file.write(bytes(2 * part + 1))
    files.invalidate_cache()
    assert sorted(name.rpartition("/")[2] for name in files.find(folder)) == ["large", "object"]
    assert files.cat_file(f"{folder}/large", start=part, end=part + 4) == bytes(4)
    files.cp_file(place, f"{folder}/copy")
    files.rm([f"{folder}/copy", place])
    order = [kind for kind, *_ in s3.log()]
    kinds = {"start_multipart", "part", "complete_multipart", "copy", "delete_many", "list"}
    assert requests(s3) == Counter(order) and kinds <= {*order} and "put" not in order
    assert s3.counts()["part"]["bytes_in"] >= 2 * part + 1  # a client may repeat what is answered late
    assert order.index("start_multipart") < order.index("part") < order.index("complete_multipart")
    assert ("range", "folder/large", part, part + 4, 206) in s3.log()


@pytest.mark.parametrize("what", ["error", "reset", "lost", "truncate"])
def test_a_client_that_tries_again_meets_the_fault_once(s3, files, place, what):
    s3.set(faults=[Fault(what=what, kind="range", key="*object", times=1)])
    assert files.cat_file(place, start=5, end=50_000) == DATA[5:50_000]
    assert s3.report()["injected"] == [1]
    tally = s3.counts()["range"]
    assert (tally["faults"], tally["requests"]) == (1, 2)
    assert [entry[4] for entry in s3.log()] == [503 if what == "error" else what, 206]


def test_an_error_has_the_status_and_the_code_that_were_asked_for(s3, place):
    s3.set(faults=[Fault(what="error", kind="get", status=500, code="InternalError")])
    status, _, body = asked(s3, place)
    assert (status, b"<Code>InternalError</Code>" in body) == (500, True)
    assert s3.counts()["get"]["faults"] == 1


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("reset", ConnectionResetError),
        ("lost", ConnectionResetError),
        ("truncate", http.client.IncompleteRead),
        ("stall", TimeoutError),
        ("stall_body", TimeoutError),
    ],
)
def test_what_a_client_sees_that_asks_once(s3, place, what, error):
    s3.set(faults=[Fault(what=what, kind="get")])
    with pytest.raises(error):
        asked(s3, place, timeout_s=0.2)
    assert asked(s3, place, "HEAD")[0] == 200, "other kinds are let through"


@pytest.mark.parametrize(("what", "done"), [("lost", True), ("reset", False), ("error", False), ("stall", False)])
def test_a_write_that_fails_was_done_only_where_the_fault_says_so(s3, place, what, done):
    s3.set(faults=[Fault(what=what, kind="put")])
    try:
        assert asked(s3, place, "PUT", timeout_s=0.2, body=b"new")[0] == 503
    except OSError:
        assert what != "error"
    s3.set()
    assert asked(s3, place)[2] == (b"new" if done else DATA)


def test_a_store_that_goes_down_in_the_middle_answers_nothing_until_it_is_up_again(s3, place):
    s3.set(faults=[Fault(what="down", kind="put", after=1)])
    assert asked(s3, place, "PUT", body=b"first")[0] == 200
    for method, body in (("PUT", b"second"), ("GET", None), ("HEAD", None)):
        with pytest.raises(ConnectionResetError):
            asked(s3, place, method, body=body)
    s3.set()
    assert asked(s3, place)[2] == b"first"


def test_a_test_waits_for_a_request_that_stands_still(s3, place):
    s3.set(faults=[Fault(what="stall", kind="put", times=1)])
    with ThreadPoolExecutor(1) as thread:
        stalled = thread.submit(asked, s3, place, "PUT", 0.5, b"new")
        s3.wait_for("put", 1, timeout_s=10, key="*/object")
        assert s3.counts()["put"]["in_flight"] == 1
        assert asked(s3, place)[2] == DATA
        with pytest.raises(TimeoutError):
            stalled.result()
    until = time.monotonic() + 10
    while s3.counts()["put"]["in_flight"]:
        assert time.monotonic() < until, "the client has gone, its request has not"
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match="1 requests of kind put"):
        s3.wait_for("put", 2, timeout_s=0)
    with pytest.raises(TimeoutError, match="0 requests of kind put"):
        s3.wait_for("put", 1, timeout_s=0, key="*/other")


def test_a_seed_says_which_requests_a_fault_takes(s3, place):
    def taken(seed):
        s3.set(faults=[Fault(what="error", kind="head", chance=0.5, seed=seed)])
        return [asked(s3, place, "HEAD")[0] for _ in range(24)]

    first = taken(1)
    assert first == taken(1) != taken(2)
    assert {200, 503} == set(first)


def test_four_ranks_of_16_ranges_are_in_flight_together_and_each_waits_for_the_latency(s3, place):
    s3.set(latency_ms=400)
    start_s = time.monotonic()
    with ThreadPoolExecutor(64) as threads:
        spans = [(1000 * i, 1000 * i + 999) for i in range(64)]
        found = list(threads.map(lambda span: asked(s3, place, Range=f"bytes={span[0]}-{span[1]}"), spans))
    assert time.monotonic() - start_s >= 0.4
    assert [body for _, _, body in found] == [DATA[start : stop + 1] for start, stop in spans]
    assert s3.counts()["range"]["most_in_flight"] >= 48
    assert s3.counts()["range"]["in_flight"] == 0


@pytest.mark.slow
def test_the_environment_alone_says_where_the_store_is(s3, place):
    import s3fs

    assert s3fs.S3FileSystem(skip_instance_cache=True).cat_file(place) == DATA


@pytest.mark.slow
def test_the_server_ends_with_its_process_however_that_ends(s3_process):
    script = "import os, s3_server\nwith s3_server.started() as server: print(server.port); os.kill(os.getpid(), 9)"
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    killed = subprocess.run([sys.executable, "-c", script], env=here, stdout=subprocess.PIPE, timeout=120)
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", int(killed.stdout)), 1).close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < until, "it still listens"
        time.sleep(0.02)


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="what is 'slow'"):
        Fault(what="slow")
