"""Every form of a path for every public function and command, and what an input is that holds no text."""

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from indexed_data_helpers import pair_bytes, write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder, build, merge, verify
from sixfold.indexed_data.cli import main

# name: the path of sub/NAME as it can be written, in a folder where ``link`` leads to sub
FORMS = {
    "relative": lambda folder, name: f"sub/{name}",
    "with a dot": lambda folder, name: f"./sub/{name}",
    "with two dots": lambda folder, name: f"sub/../sub/{name}",
    "with two dots after a link": lambda folder, name: f"far/../sub/{name}",
    "with two slashes": lambda folder, name: f"sub//{name}",
    "absolute": lambda folder, name: f"{folder}/sub/{name}",
    "through a link": lambda folder, name: f"link/{name}",
    "a Path": lambda folder, name: Path("sub") / name,
    "bytes": lambda folder, name: f"sub/{name}".encode(),
    "a Path of bytes": lambda folder, name: BytesPath(f"sub/{name}".encode()),
}
NAMES = ["wiki", "wiki.v1.2", "wiki.binary", " wiki", "-wiki", "wíki"]


class BytesPath:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("sub")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "sub").symlink_to("../sub")
    (tmp_path / "far").symlink_to("deep/er")  # far/.. is deep
    write_pair("hand", "uint16", [[[97, 98, 256]]])
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_every_function_takes_every_form_of_a_path(folder, form):
    for name in NAMES:
        path = FORMS[form](folder, name)
        text, pair = FORMS[form](folder, name + ".txt"), pair_bytes("hand")
        with IndexedDatasetBuilder(FORMS[form](folder, name + ".bin"), np.uint16) as builder:
            builder.add_index(b"hand" if form == "bytes" else "hand")
        assert pair_bytes(f"sub/{name}") == pair
        assert IndexedDataset.exists(path)
        for mmap in (True, False):
            assert IndexedDataset(path, mmap=mmap)[0].tolist() == [97, 98, 256]
        assert verify(path).ok
        merge([path], FORMS[form](folder, name + ".merged"))
        assert pair_bytes(f"sub/{name}.merged") == pair
        (folder / "sub" / (name + ".txt")).write_text("ab")
        assert build(text, FORMS[form](folder, name + ".built")).documents == 1
        assert build([text], FORMS[form](folder, name + ".built"), overwrite=True).documents == 1
        assert pair_bytes(f"sub/{name}.built") == pair
        builder = IndexedDatasetBuilder(FORMS[form](folder, name + ".x.bin"), np.uint16)
        builder.add_document([97, 98, 256])
        builder.finalize(FORMS[form](folder, name + ".x.idx"))
        assert pair_bytes(f"sub/{name}.x") == pair
    kinds = {name.rsplit(".", 1)[1] for name in os.listdir("sub")}
    assert kinds == {"bin", "idx", "json", "txt"}  # nothing of a writer is left


@pytest.mark.parametrize("form", [form for form in FORMS if "bytes" not in form])
def test_every_command_takes_every_form_of_a_path(folder, form, capsys):
    (folder / "sub" / "a.txt").write_text("ab")
    text, pair, both = (str(FORMS[form](folder, name)) for name in ("a.txt", "a", "both"))
    for line in (
        ["build", text, "--output", pair],
        ["info", pair],
        ["show", pair, "0", "--tokenizer", "bytes"],
        ["verify", pair],
        ["merge", pair, pair, "--output", both],
    ):
        assert main([*line, "--json"]) == 0, capsys.readouterr()
    assert pair_bytes("sub/a") == pair_bytes("hand")
    assert len(IndexedDataset("sub/both")) == 2


def calls(path):
    """Every public call with a path, by name; ``path`` is where a wrong one goes."""
    return {
        "open": lambda: IndexedDataset(path),
        "open without a map": lambda: IndexedDataset(path, mmap=False),
        "exists": lambda: IndexedDataset.exists(path),
        "verify": lambda: verify(path),
        "merge from": lambda: merge(["hand", path], "out"),
        "merge to": lambda: merge(["hand"], path),
        "write": lambda: IndexedDatasetBuilder(path),
        "finalize": lambda: IndexedDatasetBuilder("out.bin").finalize(path),
        "build from": lambda: build([path], "out"),
        "build from one": lambda: build(path, "out"),
        "build to": lambda: build(["sub/a.txt"], path),
    }


WRONG = {
    "a URL": ("s3://bucket/wiki", "is the URL s3://bucket/wiki"),
    "a URL of another kind": ("memory://wiki", "is the URL memory://wiki"),
    "a tilde": ("~/wiki", "only shells expand ~"),
    "a tilde of somebody": ("~nobody/wiki.bin", "only shells expand ~"),
    "empty": ("", "a path is not empty"),
    "a NUL": ("wi\0ki", "no NUL in it"),
}


READS_URLS = ("open", "open without a map", "exists")


@pytest.mark.parametrize(
    ("what", "call"),
    [(what, call) for what in WRONG for call in calls("") if "URL" not in what or call not in READS_URLS],
)
@pytest.mark.slow
def test_a_path_that_cannot_be_meant_is_told_by_every_function(folder, what, call):
    path, message = WRONG[what]
    (folder / "sub" / "a.txt").write_text("ab")
    before = sorted(os.listdir()), sorted(os.listdir("sub")), sorted(os.listdir(".."))
    with pytest.raises(IndexedDataError, match=message):
        calls(path)[call]()
    left = [name for name in os.listdir() if not name.startswith("out.bin.tmp")]  # of a builder that is still open
    assert (sorted(left), sorted(os.listdir("sub")), sorted(os.listdir(".."))) == before


@pytest.mark.parametrize(
    "call", [call for call in calls("") if call not in ("build from one", "merge from", "finalize")]
)
@pytest.mark.parametrize("path", [None, 5, ["a"]])
def test_what_is_no_path_is_the_typed_error(folder, path, call):
    (folder / "sub" / "a.txt").write_text("ab")
    with pytest.raises(IndexedDataError, match="it is a path"):
        calls(path)[call]()


@pytest.mark.parametrize("path", ["sub/", "sub/..", "."])
def test_an_output_that_ends_in_no_name_is_refused(folder, path):
    (folder / "sub" / "a.txt").write_text("ab")
    for call in ("merge to", "write", "finalize", "build to"):
        with pytest.raises(IndexedDataError, match="name at its end"):
            calls(path)[call]()
    for call in ("open", "merge from"):
        with pytest.raises(IndexedDataError, match="A path prefix has no extension"):
            calls(path)[call]()


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_an_output_with_an_extension_is_refused_before_anything_is_written(folder, end, capsys):
    (folder / "a.txt").write_text("ab")
    before = sorted(os.listdir())
    for call in (lambda: merge(["hand"], "wiki" + end), lambda: build(["a.txt"], "wiki" + end)):
        with pytest.raises(IndexedDataError, match=r"without extension: 'wiki' names wiki\.bin and wiki\.idx"):
            call()
    for line in (["build", "a.txt"], ["merge", "hand"]):
        assert main([*line, "--output", "wiki" + end]) == 1
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_prefix_with_an_extension_is_told_that_it_has_none(folder, end):
    for call in (lambda: IndexedDataset("hand" + end), lambda: merge(["hand" + end], "b")):
        with pytest.raises(IndexedDataError, match="A path prefix has no extension"):
            call()
    assert not IndexedDataset.exists("hand" + end)
    assert not verify("hand" + end).ok


def test_a_builder_whose_block_could_not_end_is_refused_where_it_begins(folder):
    with pytest.raises(IndexedDataError, match=r"PREFIX\.bin"), IndexedDatasetBuilder("wiki"):
        raise AssertionError("the block began")
    assert not [name for name in os.listdir() if name.startswith("wiki")]


@pytest.mark.parametrize(("path", "message"), [("nowhere/out.idx", "folder is not there"), ("out", "the path prefix")])
def test_an_idx_path_that_cannot_be_loses_nothing(folder, path, message):
    builder = IndexedDatasetBuilder("out.bin", np.uint16)
    builder.add_document([97, 98, 256])
    with pytest.raises(IndexedDataError, match=message):
        builder.finalize(path)
    builder.finalize("out.idx")
    assert pair_bytes("out") == pair_bytes("hand")


def test_a_pair_is_written_and_read_where_it_was_named_whatever_the_current_folder_is(folder, monkeypatch):
    builder = IndexedDatasetBuilder("out.bin", np.uint16)
    dataset = IndexedDataset("hand", mmap=False)
    others = [IndexedDataset("sub/../hand", mmap=False) for _ in range(2)]
    monkeypatch.chdir("sub")
    builder.add_document([97, 98, 256])
    builder.finalize()
    assert pair_bytes("../out") == pair_bytes("../hand")
    for i in range(20):  # more than the pool keeps: the descriptor of ``hand`` is closed meanwhile
        write_pair(f"a{i}", "uint16", [[[i]]])
        others.append(IndexedDataset(f"a{i}", mmap=False))
    assert dataset[0].tolist() == [97, 98, 256]


def test_a_removed_current_folder_is_the_typed_error_and_absolute_paths_work(folder, monkeypatch):
    (folder / "gone").mkdir()
    monkeypatch.chdir("gone")
    (folder / "gone").rmdir()
    for call in (lambda: IndexedDatasetBuilder("out.bin"), lambda: merge([folder / "hand"], "out")):
        with pytest.raises(IndexedDataError, match=r"out\.bin: cannot be written"):
            call()
    merge((prefix for prefix in [folder / "hand"]), folder / "out")
    assert pair_bytes(folder / "out") == pair_bytes(folder / "hand")


def test_a_link_at_a_final_name_is_replaced_and_what_it_leads_to_stays(folder):
    write_pair("sub/old", "uint16", [[[1]]])
    old = pair_bytes("sub/old")
    for end in (".bin", ".idx"):
        (folder / f"out{end}").symlink_to(f"sub/old{end}")
    assert IndexedDataset("out")[0].tolist() == [1]  # reading goes through
    merge(["hand"], "out", overwrite=True)
    assert pair_bytes("out") == pair_bytes("hand")
    assert pair_bytes("sub/old") == old


def test_names_that_are_no_utf8_are_read_written_and_printed(folder, capsysbinary):
    name = os.fsdecode(b"\xff\xfe")
    (folder / (name + ".txt")).write_text("ab")
    assert main(["build", name + ".txt", "--output", name]) == 0
    assert [main(line) for line in (["info", name], ["info", name, "--json"], ["verify", name])] == [0, 0, 0]
    assert pair_bytes(name) == pair_bytes("hand")


# ---- inputs that are no text


def archive(kind):
    data = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(data, "w") as file:
            file.writestr("a.txt", "text")
    else:
        with tarfile.open(
            fileobj=data, mode="w", format=tarfile.GNU_FORMAT if kind == "gnu" else tarfile.PAX_FORMAT
        ) as file:
            file.addfile(tarfile.TarInfo("a.txt"))
    return data.getvalue()


def array_file():
    data = io.BytesIO()
    np.save(data, np.arange(3))
    return data.getvalue()


CONTENTS = {
    "zstd": b"\x28\xb5\x2f\xfd\x04\x00\x01\x00\x00",
    "xz": lzma.compress(b"text"),
    "bzip2": bz2.compress(b"text"),
    "lz4": b"\x04\x22\x4d\x18\x64\x40\xa7",
    "parquet": b"PAR1" + bytes(20) + b"PAR1",
    "arrow": b"ARROW1\0\0" + bytes(20),
    "numpy array": array_file(),
    "tar": archive("pax"),
    "tar archive": archive("gnu"),
    "zip": archive("zip"),
    "gzip": gzip.compress(b"text"),
    "UTF-16": "text".encode("utf-16"),
    "UTF-16 text": "text without a mark".encode("utf-16-le"),
    "UTF-16 text,": "text without a mark".encode("utf-16-be"),
    "index of a pair": b"MMIDIDX\0\0" + bytes(40),
}
ENDINGS = [".bz2", ".jsonl.xz", ".xz", ".lz4", ".npy", ".npz", ".tar", ".tgz", ".tar.gz", ".TAR.ZST", ".zip", ".7z"]
ENDINGS += [".bin"]


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_what_holds_no_text_is_told_by_its_content_before_anything_is_written(folder, kind, name):
    (folder / name).write_bytes(CONTENTS[kind])
    before = sorted(os.listdir())
    with pytest.raises(IndexedDataError, match=rf"{name}: is .*{kind}.*; \w+"):
        build([name], "out", on_error="skip")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_holds_no_text_is_told_by_its_name(folder, ending):
    (folder / f"a{ending}").write_bytes(b"")
    with pytest.raises(IndexedDataError, match=r"is .*, which is not read as \w+; \w+"):
        build([f"a{ending}"], "out")


LIKE_OTHERS = ["PAR1 is a word", "BZh9", "ustar", "PK", "ARROW1", "NUMPY", "", "x" * 257 + "ustar ", "\0", "a\0\0b"]


@pytest.mark.parametrize("text", LIKE_OTHERS)
def test_text_that_begins_like_something_else_is_text(folder, text):
    (folder / "a.txt").write_text(text)
    assert build(["a.txt"], "out", append_eod=False).tokens == len(text)


def test_folders_pipes_sockets_and_devices_are_told_for_what_they_are(folder):
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, what in (("sub", "a folder; give the files"), ("pipe", "a pipe; .* write it to a file"),
                           ("socket", "a socket"), ("/dev/null", "a device"), ("-", "standard input")):  # fmt: skip
            with pytest.raises(IndexedDataError, match=rf"^{name}: .*{what}"):
                build([name], "out")
    assert sorted(os.listdir()) == ["deep", "far", "hand.bin", "hand.idx", "link", "pipe", "socket", "sub"]


def test_the_command_tells_a_url_from_a_missing_file(folder, capsys):
    assert main(["build", "s3://bucket/a.jsonl", "--output", "out", "--json"]) == 1
    assert "an input is the URL s3://bucket/a.jsonl" in json.loads(capsys.readouterr().out)["error"]["message"]
