"""A server of files by http that honours ranges, fails on purpose, waits, and counts what it gave."""

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of 5, the kernel drops what many clients ask at once, and they ask again after a second


class RangeServer:
    """Files by name, in memory. ``failing`` requests of all fail with 503 or a cut answer; each takes ``delay_s``."""

    def __init__(self, files, failing=0.0, delay_s=0.0):
        self.files, self.failing, self.delay_s = dict(files), failing, delay_s
        self.requests, self.failed, self.given = [], 0, 0
        self.at_most = 2**63  # bytes of one answer
        self.changed = {}  # name: Last-Modified
        self.tags, self.hanging, self.status = {}, threading.Event(), None
        self._random, self._lock = Random(0), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, handler):
        name = handler.path.lstrip("/")
        time.sleep(self.delay_s)
        if self.hanging.is_set():
            time.sleep(30)
        with self._lock:
            fails = self._random.random() < self.failing
            cut = self._random.random() < 0.5
            self.failed += fails
        if name not in self.files or self.status or (fails and not cut):
            handler.send_response(self.status or (404 if name not in self.files else 503))
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        data = self.files[name]
        begin, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"]).groups())
        if begin >= len(data):
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(data)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        piece = data[begin : min(end + 1, begin + self.at_most)]
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {begin}-{begin + len(piece) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(piece)))
        tag = self.tags.get(name, '"one"')
        for header, value in (("ETag", tag), ("Last-Modified", self.changed.get(name))):
            if value is not None:
                handler.send_header(header, value)
        handler.end_headers()
        with self._lock:
            self.requests.append((name, begin, begin + len(piece)))
            self.given += len(piece)
        handler.wfile.write(piece[: len(piece) // 2] if fails else piece)
        if fails:
            handler.close_connection = True

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
