"""A built site as a reader's browser gets it: served on this machine's loopback, opened in a headless Chromium.

    site/ --> server --> Chromium, driven by playwright (this file) --> test_explorer_page.py

Skips, with the reason, where there is no browser, no playwright or no built site.
"""

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # Debian's names and others'


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder's address, while it is served."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def chromium():
    """A headless browser of this machine."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (docs/requirements.txt)"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is on the path; one of {', '.join(BROWSERS)} is needed")
    with playwright.sync_playwright() as driver:
        # A sandbox of its own needs rights that root and containers do not give; the site is ours.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
