"""One request for a range of an object: http(s) by the standard library, everything else by fsspec.

URL --> fetch_of (this file) --> remote.py, which retries, caches and looks ahead
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.extras import extra

# What stores of fsspec call the tag, the best first.
_TAGS = (
    "ETag", "etag", "md5", "md5Hash", "Content-MD5", "mtime", "LastModified", "Last-Modified", "last_modified",
    "modified", "updated", "created",
)  # fmt: skip
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Gone(Exception):
    """There is no such object."""


class Refused(Exception):
    """The store will give the same answer again: no rights, no ranges."""


class Fetch(Protocol):
    """What asks a store about one object. Each call is one attempt; what it raises is tried again, but these two."""

    tells_change: bool  # whether each answer carries size and tag

    def facts(self) -> tuple[int, str]:
        """(size in bytes, tag that changes with the content, or nothing)."""
        ...

    def get(self, begin: int, end: int) -> tuple[bytes, int | None, str | None]:
        """(the bytes, size and tag of the object if the answer carries them)."""
        ...


def fetch_of(url: str, timeout_s: float, storage_options: dict[str, Any]) -> Fetch:
    """What fetches ranges of ``url``."""
    if url.startswith(("http://", "https://")) and not storage_options:
        _refuse_unquoted(url)
        return HttpFetch(url, timeout_s)
    return FsspecFetch(url, storage_options)


def _refuse_unquoted(url: str) -> None:
    from urllib.parse import quote  # only here: reading local pairs should not load it

    *_, path = url.removeprefix("http://").removeprefix("https://").partition("/")
    wrong = next((letter for letter in path if not "!" <= letter <= "~"), None)
    if wrong is not None:
        quoted = quote(path, safe="".join(map(chr, range(ord("!"), ord("~") + 1))))
        given = url.removesuffix(path) + quoted
        raise IndexedDataError(f"{url}: has {wrong!r}, which a URL has only quoted; give {given}")


class HttpFetch:
    """An object behind http or https."""

    tells_change = True

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s

    def facts(self) -> tuple[int, str]:
        data, size, tag = self.get(0, 1)  # a HEAD is refused by some
        return (len(data) if size is None else size), tag or ""

    def get(self, begin: int, end: int) -> tuple[bytes, int | None, str | None]:
        from urllib.error import HTTPError  # only here: reading local pairs should not load it
        from urllib.request import Request, urlopen

        request = Request(self._url, headers={"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"})
        try:
            with urlopen(request, timeout=self._timeout_s) as answer:
                found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if answer.status != 206 or found is None or int(found[1]) != begin:
                    raise Refused(f"it answers {answer.status} to a request for a range: it gives none")
                data: bytes = answer.read()
                return data, int(found[3]), _tag(answer.headers)
        except HTTPError as error:
            return self._failed(error)

    def _failed(self, error: Any) -> tuple[bytes, int | None, str | None]:
        if error.code in (404, 410):
            raise Gone(f"{error.code} {error.reason}") from error
        if error.code == 416:  # asked beyond its end: it is empty, or was cut
            size = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
            return b"", int(size[1]) if size else 0, _tag(error.headers)
        if error.code < 500 and error.code not in (408, 425, 429):
            raise Refused(f"{error.code} {error.reason}") from error
        raise error


def _tag(headers: Any) -> str:
    """What changes with the content, by the headers of an answer; nothing if none does."""
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


class FsspecFetch:
    """An object of any store that fsspec knows."""

    tells_change = False

    def __init__(self, url: str, storage_options: dict[str, Any]) -> None:
        core = extra("fsspec.core", url)
        try:
            self._store, self._path = core.url_to_fs(url, **storage_options)
        except (ImportError, ValueError) as error:  # another package is needed, or nobody knows it
            raise Refused(str(error)) from error

    def facts(self) -> tuple[int, str]:
        try:
            self._store.invalidate_cache()
            info = self._store.info(self._path)
        except FileNotFoundError as error:
            raise Gone(str(error)) from error
        except Exception as error:
            raise _of_client(error) from error
        return int(info["size"]), str(next((info[name] for name in _TAGS if info.get(name)), ""))

    def get(self, begin: int, end: int) -> tuple[bytes, int | None, str | None]:
        try:
            data: bytes = self._store.cat_file(self._path, start=begin, end=end)  # by name: s3fs has another second
        except FileNotFoundError as error:
            raise Gone(str(error)) from error
        except Exception as error:
            raise _of_client(error) from error
        return data, None, None


def _of_client(error: Exception) -> Exception:
    """What a client raised, or Refused where it will raise that again: no rights, or nothing to show them with."""
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
        return Refused(f"{type(error).__name__}: {error}")
    return error
