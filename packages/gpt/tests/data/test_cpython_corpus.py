"""The demo's corpus: from source files to documents."""

import ast
import hashlib

import pytest

from sixfold.gpt.data import cpython_corpus as corpus
from sixfold.gpt.errors import ConfigError

SOURCE = '''"""Module text."""
class A:
    """Class text.

        indented
    """
    def f(self):
        """Class text.

            indented
        """
        async def g(): "Inner text."
    def h(self): "  "
def k(): 1
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of three files, and three topics."""
    monkeypatch.setattr(corpus, "topics", lambda: [b"Topic.", b"Module text.", b""])
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "encoded.py").write_bytes("# coding: latin-1\n'''Größe'''\n".encode("latin-1"))
    for name in ("test/x.py", "a/tests/x.py", "site-packages/x.py", "test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("'''A test.'''")
    return tmp_path


def documents(found):
    return [d for part in found.train.values() for d in part] + found.valid


def test_documents_are_topics_and_docstrings_without_tests_and_duplicates(library):
    found = documents(corpus.cpython_corpus(library))
    assert sorted(found) == sorted(
        [b"Topic.", b"Module text.", b"Class text.\n\nindented", b"Inner text.", "Größe".encode()]
    )


def test_the_split_is_decided_by_a_documents_own_sha256(library):
    for i in range(300):
        (library / f"m{i}.py").write_text(f"'''Text of module {i}.'''")
    found = corpus.cpython_corpus(library)
    assert all(hashlib.sha256(d).digest()[0] < 0x1A for d in found.valid)
    assert all(hashlib.sha256(d).digest()[0] >= 0x1A for part in found.train.values() for d in part)
    assert 10 < len(found.valid) < 60


def test_the_digest_changes_with_any_document_and_not_with_the_day(library):
    first = corpus.cpython_corpus(library)
    assert corpus.cpython_corpus(library) == first
    (library / "b.py").write_text("'''One more.'''")
    assert corpus.cpython_corpus(library).sha256 != first.sha256


def test_a_folder_without_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "topics", lambda: [b"Topic."])
    with pytest.raises(ConfigError, match="no Python source under"):
        corpus.cpython_corpus(tmp_path)


def test_this_pythons_own_files_are_found_and_none_is_a_test():
    folder = corpus.Path(ast.__file__).parent
    files = corpus.source_files(folder)
    names = {str(p.relative_to(folder)) for p in files}
    assert {"ast.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert len(corpus.topics()) > 50
