"""A real S3 server for tests and benchmarks, with latency, faults and counts that a test sets and reads.

    with started() as server:                       # a process of its own (s3_server_process.py), on a free port
        server.environment()                        # or server.storage_options(): how fsspec finds it
        server.set(latency_ms=20, faults=[Fault(what="error", kind="range", times=3)])
        ...
        server.counts()["range"]["most_in_flight"]

moto (5.2) does what S3 does. In front of it each request waits for ``latency_ms``, then for its fault, if one takes it.
Kinds of requests: get, range, head, put, copy, delete, start_multipart, part, complete_multipart, abort_multipart,
list_parts, list, delete_many, bucket (any other of a bucket), other. The server ends with the process that started it.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

CONTROL = "/_control"  # no bucket has such a name
REQUIRED = ("moto", "flask", "flask_cors", "aiohttp", "s3fs")
START_DEADLINE_S, STOP_DEADLINE_S, CONTROL_DEADLINE_S = 60.0, 5.0, 20.0
WHATS = ("error", "reset", "lost", "truncate", "stall", "stall_body", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to requests of a kind (both names are patterns of fnmatch).

    ``error``: answered with ``status`` and ``code``, not done. ``reset``: the connection is reset, nothing done.
    ``lost``: done, and reset instead of an answer. ``truncate``: done; half of the body, then the end. ``stall``: not
    done, and no answer while the client waits. ``stall_body``: done; half of the body, then nothing. ``down``: from
    this request on, each of any kind is reset until faults are set anew.
    The first ``after`` that match are let through; then ``times`` of them (None: all) with the chance are taken.
    """

    what: str
    kind: str = "*"
    key: str = "*"
    after: int = 0
    times: int | None = None
    chance: float = 1.0
    seed: int = 0
    status: int = 503
    code: str = "SlowDown"

    def __post_init__(self) -> None:
        if self.what not in WHATS:
            raise ValueError(f"what is {self.what!r}; it is one of {', '.join(WHATS)}")

    def meets(self, kind: str, key: str) -> bool:
        return fnmatchcase(kind, self.kind) and fnmatchcase(key, self.key)


class S3Server:
    """A running server, as seen from any process that knows its port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._numbers = count()

    def environment(self) -> dict[str, str]:
        """Variables by which ``s3://`` means this server, in this process and in those that it starts."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def storage_options(self) -> dict[str, Any]:
        """The same for one file system of fsspec."""
        client = {"region_name": "us-east-1"}
        return {"endpoint_url": self.endpoint, "key": "test", "secret": "test", "client_kwargs": client}

    def bucket(self) -> str:
        """The name of a new bucket."""
        name = f"bucket-{os.getpid()}-{next(self._numbers)}"
        self._call(f"/{name}", b"", "PUT")
        return name

    def set(self, *, latency_ms: float = 0.0, faults: Sequence[Fault] = (), forget: bool = True) -> None:
        """What happens to requests from now on; with ``forget`` counts start at nought, also of those in flight."""
        told = {"latency_ms": latency_ms, "faults": [asdict(fault) for fault in faults], "forget": forget}
        self._call(CONTROL, json.dumps(told).encode(), "POST")

    def counts(self) -> dict[str, dict[str, int]]:
        """{kind: requests, faults, bytes_in, bytes_out, in_flight, most_in_flight}; "total" is of all kinds."""
        report = self.report()
        return report["kinds"] | {"total": report["total"]}

    def log(self) -> list[tuple[str, str, int | None, int | None, int | str | None]]:
        """(kind, key, start and stop of a range, status or what was injected; None: in flight), in order of arrival."""
        return [tuple(entry) for entry in self.report()["log"]]

    def report(self) -> dict[str, Any]:
        """Counts, log, the server's own CPU seconds since it forgot and, of each fault set, how often it was met."""
        return json.loads(self._call(CONTROL, None, "GET"))

    def wait_for(self, kind: str, requests: int, timeout_s: float, key: str = "*") -> None:
        """Until so many requests of a kind have come for keys of a pattern; TimeoutError after ``timeout_s``."""
        until, wanted = time.monotonic() + timeout_s, Fault(what="stall", kind=kind, key=key)
        while (found := sum(wanted.meets(*entry[:2]) for entry in self.log())) < requests:
            if time.monotonic() > until:
                raise TimeoutError(f"{found} requests of kind {kind} in {timeout_s} s; {requests} were waited for")
            time.sleep(0.01)

    def _call(self, path: str, body: bytes | None, method: str) -> bytes:
        request = urllib.request.Request(self.endpoint + path, data=body, method=method)
        with self._open(request, timeout=CONTROL_DEADLINE_S) as answer:
            return answer.read()


@contextmanager
def started() -> Iterator[S3Server]:
    """A server while the context lasts. It needs the packages of ``REQUIRED`` (extra ``test``)."""
    script = Path(__file__).with_name("s3_server_process.py")
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env=os.environ | {"S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"},
        )  # fmt: skip
        try:
            yield S3Server(_port(process, errors))
        finally:
            process.stdin.close()
            try:
                process.wait(STOP_DEADLINE_S)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


def _port(process: "subprocess.Popen[bytes]", errors: Any) -> int:
    ready, _, _ = select.select([process.stdout], [], [], START_DEADLINE_S)
    line = process.stdout.readline() if ready else b""
    if not line:
        errors.seek(0)
        raise RuntimeError(f"no S3 server within {START_DEADLINE_S} s: {errors.read().decode()}")
    return int(line)
