"""The S3 server of the tests, run as a script: moto's application behind a front that counts and injects faults.

    client --HTTP--> Front (this file): latency, faults, counts, whole objects once read --WSGI--> moto

One process and one port. A range of an object that was read before comes from memory (``Objects``): moto copies the
whole object for each of its ranges. What writes always reaches moto, and drops what was kept.
Ends with its standard input, so that it cannot outlive the tests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from random import Random
from typing import IO
from urllib.parse import parse_qs, unquote

from aiohttp import web
from moto.server import create_backend_app
from s3_server import CONTROL, Fault
from werkzeug.test import EnvironBuilder, run_wsgi_app

BUCKET_QUERIES = {"list-type", "prefix", "delimiter", "marker", "max-keys", "encoding-type"}
NOT_FORWARDED = {"connection", "transfer-encoding", "content-length", "expect", "keep-alive"}
READS = {"get", "range", "head", "list", "list_parts"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a client asks for: its kind, and bytes [start, stop) for a range (stop None: to the end)."""

    kind: str
    path: str
    key: str
    method: str
    target: str
    headers: list[tuple[str, str]]
    start: int | None = None
    stop: int | None = None

    def header(self, name: str) -> str | None:
        return next((value for found, value in self.headers if found.lower() == name), None)


def described(request: web.BaseRequest) -> Request:
    path, _, query = request.raw_path.partition("?")
    _, _, key = unquote(path).strip("/").partition("/")
    fields = set(parse_qs(query, keep_blank_values=True))
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in NOT_FORWARDED]
    span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    kind = kind_of_object(request, fields) if key else kind_of_bucket(request, fields)
    return Request(
        kind=kind, path=path, key=key, method=request.method, target=request.raw_path, headers=headers,
        start=int(span[1]) if span else None, stop=int(span[2]) + 1 if span and span[2] else None,
    )  # fmt: skip


def kind_of_object(request: web.BaseRequest, fields: set[str]) -> str:
    upload = "uploadId" in fields
    match request.method:
        case "GET":
            return "list_parts" if upload else "range" if "Range" in request.headers else "get"
        case "PUT":
            return "part" if upload else "copy" if "x-amz-copy-source" in request.headers else "put"
        case "POST":
            return "complete_multipart" if upload else "start_multipart" if "uploads" in fields else "other"
        case "DELETE":
            return "abort_multipart" if upload else "delete"
        case "HEAD":
            return "head"
    return "other"


def kind_of_bucket(request: web.BaseRequest, fields: set[str]) -> str:
    if request.method == "GET" and fields <= BUCKET_QUERIES | {"continuation-token", "fetch-owner", "start-after"}:
        return "list"
    return "delete_many" if request.method == "POST" and "delete" in fields else "bucket"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    length: int  # of the body; for HEAD, of the one that is not sent
    at: int | None = None  # where the body begins in ``kept``
    kept: IO[bytes] | None = None  # a whole object in memory, of which the system sends a part: no byte passes Python


class Moto:
    """moto's S3 application, called in threads."""

    def __init__(self) -> None:
        self._application = create_backend_app("s3")
        self._threads = ThreadPoolExecutor(16)

    async def answer(self, request: Request, body: bytes) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._called, request, body)

    def _called(self, request: Request, body: bytes) -> Answer:
        path, _, query = request.target.partition("?")
        builder = EnvironBuilder(
            path=unquote(path), query_string=query, method=request.method, headers=request.headers,
            input_stream=BytesIO(body), content_length=len(body),
        )  # fmt: skip
        environ = builder.get_environ() | {"wsgi.input_terminated": True, "RAW_URI": request.target}
        parts, status, headers = run_wsgi_app(self._application, environ)
        data = b"".join(parts)
        length = int(headers.get("Content-Length", len(data))) if request.method == "HEAD" else len(data)
        kept = [(name, value) for name, value in headers.items() if name.lower() not in NOT_FORWARDED]
        return Answer(status=int(status.split()[0]), headers=kept, body=data, length=length)


class Objects:
    """Whole objects once read, until something is written to their path or to any bucket."""

    def __init__(self, moto: Moto) -> None:
        self._moto = moto
        self._kept: dict[str, Answer] = {}
        self._writes: Counter[str] = Counter()
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def written(self, request: Request) -> None:
        """To be told before and after each write."""
        if request.key:
            self._writes[request.path] += 1
            self._kept.pop(request.path, None)
        else:
            self._writes[""] += 1
            self._kept.clear()

    async def range_of(self, request: Request) -> Answer | None:
        """The range's bytes; None if this is a question for moto: no such object, range or version, a condition."""
        conditions = any(name.lower().startswith(("if-modified", "if-none", "if-unmod")) for name, _ in request.headers)
        if request.start is None or "?" in request.target or conditions:
            return None
        whole = await self._whole(request)
        if whole is None or request.start >= whole.length or (request.stop or whole.length) <= request.start:
            return None
        headers = [(n, v) for n, v in whole.headers if not n.lower().startswith(("x-amz-checksum", "content-range"))]
        etag = next((value for name, value in headers if name.lower() == "etag"), None)
        if request.header("if-match") not in (None, etag):
            return None
        stop = min(request.stop or whole.length, whole.length)
        headers.append(("Content-Range", f"bytes {request.start}-{stop - 1}/{whole.length}"))
        length = stop - request.start
        return Answer(status=206, headers=headers, body=b"", length=length, at=request.start, kept=whole.kept)

    async def _whole(self, request: Request) -> Answer | None:
        async with self._reading[request.path]:
            if (kept := self._kept.get(request.path)) is not None:
                return kept
            before = self._writes[request.path], self._writes[""]
            plain = [(n, v) for n, v in request.headers if n.lower() not in ("range", "if-match")]
            everything = Request(
                kind="get", path=request.path, key=request.key, method="GET", target=request.path, headers=plain
            )
            answer = await self._moto.answer(everything, b"")
            if answer.status != 200:
                return None
            memory = open(os.memfd_create("object"), "w+b")  # noqa: SIM115 - lives as long as the answer
            memory.write(answer.body)
            memory.flush()
            kept = replace(answer, body=b"", kept=memory)
            if before == (self._writes[request.path], self._writes[""]):
                self._kept[request.path] = kept
            return kept


class Rule:
    """A fault, and how often it was met."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self._seen, self.injected = fault, 0, 0
        self._random = Random(fault.seed)

    def takes(self, request: Request) -> bool:
        if not self.fault.meets(request.kind, request.key):
            return False
        self._seen += 1
        if self._seen <= self.fault.after or self.injected == self.fault.times:
            return False
        if self._random.random() >= self.fault.chance:
            return False
        self.injected += 1
        return True


@dataclass(slots=True)
class Tally:
    """Counts of one kind of request."""

    requests: int = 0
    faults: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    def begin(self) -> None:
        self.requests += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def report(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Counts:
    """All requests since ``Front.control`` was told to forget."""

    kinds: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    total: Tally = field(default_factory=Tally)
    log: list[list[object]] = field(default_factory=list)  # kind, key, start, stop, status or fault


class Front:
    """Answers every request: with moto's answer, after the latency, unless a fault takes it."""

    def __init__(self) -> None:
        self._moto = Moto()
        self._objects = Objects(self._moto)
        self._counts = Counts()
        self._rules: list[Rule] = []
        self._latency_s, self._cpu_s = 0.0, 0.0
        self._down = False
        self._writing: set[asyncio.Task[Answer]] = set()

    async def handle(self, received: web.BaseRequest) -> web.StreamResponse:
        if received.path == CONTROL:
            return await self.control(received)
        request, counts = described(received), self._counts
        tallies = (counts.kinds[request.kind], counts.total)
        entry: list[object] = [request.kind, request.key, request.start, request.stop, None]
        counts.log.append(entry)
        for tally in tallies:
            tally.begin()
        try:
            if "Expect" in received.headers:  # clients send no body before they are told to
                await received.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                received.writer.output_size = 0
            body = await received.content.read()  # ``received.read()`` has a limit
            await asyncio.sleep(self._latency_s)
            fault = self._fault_of(request)
            for tally in tallies:
                tally.bytes_in += len(body)
                tally.faults += fault is not None
            response, sent, entry[4] = await self._answered(received, request, body, fault)
            for tally in tallies:
                tally.bytes_out += sent
            return response
        finally:
            for tally in tallies:
                tally.in_flight -= 1

    def _fault_of(self, request: Request) -> Fault | None:
        if self._down:
            return Fault(what="reset")
        for rule in self._rules:
            if rule.takes(request):
                self._down = rule.fault.what == "down"
                return rule.fault
        return None

    async def _answered(
        self, received: web.BaseRequest, request: Request, body: bytes, fault: Fault | None
    ) -> tuple[web.StreamResponse, int, object]:
        """The response, its bytes, and the status or fault for the log. See ``Fault`` for what each does."""
        what = fault.what if fault else None
        if fault and what == "error":
            text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
            answer = Answer(status=fault.status, headers=[("Content-Type", "text/xml")], body=text, length=len(text))
            return *(await send(received, request, answer, len(text))), fault.status
        if what in ("reset", "down"):
            return reset(received), 0, what
        if what == "stall":
            await asyncio.Event().wait()  # until the client goes
        answer = await self._done(request, body)
        if what == "lost":
            return reset(received), 0, what
        length = answer.length // 2 if what in ("truncate", "stall_body") else answer.length
        response, sent = await send(received, request, answer, length)
        if what == "truncate" and received.transport is not None:
            received.transport.close()
        if what == "stall_body":
            await asyncio.Event().wait()
        return response, sent, what or answer.status

    async def _done(self, request: Request, body: bytes) -> Answer:
        if request.kind == "range" and (found := await self._objects.range_of(request)) is not None:
            return found
        if request.kind in READS:
            return await self._moto.answer(request, body)
        # A client that goes cancels its request, not what moto has begun to write.
        writing = asyncio.create_task(self._written(request, body))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return await asyncio.shield(writing)

    async def _written(self, request: Request, body: bytes) -> Answer:
        self._objects.written(request)
        try:
            return await self._moto.answer(request, body)
        finally:
            self._objects.written(request)

    async def control(self, received: web.BaseRequest) -> web.StreamResponse:
        """GET: the counts. POST: sets latency and faults, forgets counts."""
        if received.method == "POST":
            told = await received.json()
            self._latency_s = told.get("latency_ms", self._latency_s * 1e3) / 1e3
            if "faults" in told:
                self._rules = [Rule(Fault(**fault)) for fault in told["faults"]]
                self._down = False
            if told.get("forget"):
                self._counts, self._cpu_s = Counts(), time.process_time()
        report = {
            "kinds": {kind: tally.report() for kind, tally in self._counts.kinds.items()},
            "total": self._counts.total.report(),
            "log": self._counts.log,
            "cpu_s": time.process_time() - self._cpu_s,
            "injected": [rule.injected for rule in self._rules],
        }
        return web.Response(body=json.dumps(report).encode(), content_type="application/json")


async def send(
    received: web.BaseRequest, request: Request, answer: Answer, length: int
) -> tuple[web.StreamResponse, int]:
    """Send the first ``length`` bytes of the body under headers that promise all of it."""
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    if answer.status != 204:
        response.content_length = answer.length
    await response.prepare(received)
    if request.method == "HEAD":
        length = 0
    if answer.kept and received.transport is None:
        raise ConnectionResetError("the client has gone")
    if length and answer.kept:
        await asyncio.get_running_loop().sendfile(received.transport, answer.kept, answer.at, length)
    elif length:
        await response.write(answer.body[:length])
    if length == answer.length or not length:
        await response.write_eof()
    return response, length


def reset(received: web.BaseRequest) -> web.StreamResponse:
    """Close the connection by RST."""
    if received.transport is not None:
        linger = struct.pack("ii", 1, 0)
        received.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        received.transport.abort()
    return web.Response()


def end_with(stream: BytesIO) -> None:
    stream.read()
    os._exit(0)


async def serve() -> None:
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    runner = web.ServerRunner(web.Server(Front().handle, handler_cancellation=True, access_log=None))
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await web.SockSite(runner, listening).start()
    print(listening.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(sys.stdin.buffer,), daemon=True).start()
    asyncio.run(serve())
