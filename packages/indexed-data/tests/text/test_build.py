"""Text into pairs: exact text, exact order, one place per bad line, and nothing half done."""

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from indexed_data_helpers import pair_bytes

from sixfold.indexed_data import IndexedDataError, IndexedDataset, build
from sixfold.indexed_data.text.inputs import Lines, Source, TextOptions, cut

EOD = 256


def texts(prefix):
    """The documents of a byte pair, with the EOD checked and taken off."""
    documents = [ids.tolist() for ids in IndexedDataset(prefix)]
    assert all(ids[-1] == EOD for ids in documents)
    return [bytes(ids[:-1]).decode() for ids in documents]


def files_of(prefix):
    """What a build leaves under a prefix."""
    return [f"{prefix}.bin", f"{prefix}.idx", f"{prefix}.manifest.json"]


def test_jsonl_gives_one_document_per_line_exactly_as_it_is(folder):
    kept = ["plain", " spaces \r\n kept\t", "é漢😀", "\u0000"]
    lines = [json.dumps({"text": kept[0]}), "", "   ", json.dumps({"text": kept[1], "more": 1})]
    lines += [
        json.dumps({"text": kept[2]}, ensure_ascii=False),
        json.dumps({"text": ""}),
        json.dumps({"text": kept[3]}),
    ]
    (folder / "a.jsonl").write_text("\n".join(lines), newline="")
    report = build(["a.jsonl"], "out")
    assert texts("out") == kept
    assert (report.documents, report.sequences, report.empty_documents, report.bad_lines) == (4, 4, 1, 0)
    assert report.tokens == sum(len(text.encode()) + 1 for text in kept)
    assert (report.dtype, report.bin_bytes, report.errors) == ("uint16", 2 * report.tokens, ())
    assert sorted(os.listdir()) == ["a.jsonl", "out.bin", "out.idx", "out.manifest.json"]


@pytest.mark.parametrize(
    ("kind", "documents"),
    [
        ("file", ["one\ntwo \n\n \nthree\r\n"]),
        ("line", ["one", "two ", "three"]),
        ("paragraph", ["one\ntwo ", "three"]),
    ],
)
def test_a_text_file_is_cut_as_asked(folder, kind, documents):
    (folder / "a.txt").write_bytes(b"one\ntwo \n\n \nthree\r\n")
    build("a.txt", "out", text_documents=kind)
    assert texts("out") == documents


def test_files_come_in_the_given_order_whatever_their_kind(folder):
    (folder / "b.md").write_text("text\n")
    (folder / "a.jsonl").write_text('{"body": "json"}\n')
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.write('{"body": "zipped"}\n')
    build(["c.jsonl.gz", "b.md", "a.jsonl", "b.md"], "out", json_key="body")
    assert texts("out") == ["zipped", "text\n", "json", "text\n"]
    build(["a.jsonl"], "out", format="text", overwrite=True)
    assert texts("out") == ['{"body": "json"}\n']


def test_without_eod_nothing_is_appended(folder):
    (folder / "a.txt").write_text("ab")
    build(["a.txt"], "out", append_eod=False, dtype="int32")
    dataset = IndexedDataset("out")
    assert (dataset[0].tolist(), dataset.dtype) == ([97, 98], np.int32)


BAD_LINES = {
    b"{": "not JSON: Expecting property name enclosed in double quotes at column 2",
    b"[1]": "a JSON list, not an object",
    b'{"body": "x"}': "no string at key 'text'",
    b'{"text": 5}': "no string at key 'text'",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at column 11",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode("latin-1"))
def test_a_bad_line_is_named_and_nothing_is_left(folder, line):
    (folder / "a.jsonl").write_bytes(b'{"text": "ok"}\n\n' + line + b'\n{"text": "more"}\n')
    with pytest.raises(IndexedDataError, match=r"^a\.jsonl:3: ") as caught:
        build(["a.jsonl"], "out")
    assert BAD_LINES[line] in str(caught.value)
    assert os.listdir() == ["a.jsonl"]
    report = build(["a.jsonl"], "out", on_error="skip")
    assert texts("out") == ["ok", "more"]
    assert report.bad_lines == len(report.errors) == 1
    assert report.errors[0] == str(caught.value)


def test_a_text_file_that_is_not_utf8_is_named_with_the_line_of_the_byte(folder):
    (folder / "a.txt").write_bytes(b"one\ntwo\nx\xe9y\n")
    with pytest.raises(IndexedDataError, match=r"a\.txt:3: not UTF-8: byte 0xe9 at column 2"):
        build(["a.txt"], "out")


def test_the_first_ten_bad_lines_are_listed_and_all_are_counted(folder):
    (folder / "a.jsonl").write_text("".join('{"text": "x"}\n' if i % 2 else "bad\n" for i in range(60)))
    for part_bytes in (1 << 20, 200):
        report = build(["a.jsonl"], "out", on_error="skip", part_bytes=part_bytes, overwrite=True)
        assert (report.documents, report.bad_lines) == (30, 30)
        assert [error.split(":")[1] for error in report.errors] == [str(2 * i + 1) for i in range(10)]


@pytest.mark.parametrize("last", ["", "\n"])
@pytest.mark.parametrize("part_bytes", [1, 2, 3, 7, 40, 1000])
def test_every_line_is_in_exactly_one_slice_wherever_the_file_is_cut(folder, part_bytes, last):
    lines = [b"", b"a", b"", b"", "é漢".encode(), b"x" * 50, b"yz", b""] * 3 + [b"end"]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + last.encode())
    parts = cut([Source.of("a.jsonl", TextOptions())], TextOptions(), part_bytes)
    assert len(parts) == -(-os.path.getsize("a.jsonl") // part_bytes)
    slices = [Lines(piece) for part in parts for piece in part]
    assert [line for piece in slices for _, line in piece] == lines
    assert sum(piece.count for piece in slices) == len(lines)


def test_small_files_share_a_part_and_large_text_files_stay_whole(folder):
    sizes = [10, 10, 10, 100, 10]
    for i, size in enumerate(sizes):
        (folder / f"{i}.txt").write_text("x" * size)
    parts = cut([Source.of(f"{i}.txt", TextOptions()) for i in range(5)], TextOptions(), 25)
    assert [[piece.path for piece in part] for part in parts] == [["0.txt", "1.txt"], ["2.txt"], ["3.txt"], ["4.txt"]]


def test_bytes_do_not_depend_on_how_the_work_is_cut(folder):
    kept = ["a", "b é\n", "c" * 30, "d"]
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in kept))
    (folder / "b.txt").write_text("b1\nb2")
    build(["a.jsonl", "b.txt", "a.jsonl"], "whole", text_documents="line")
    assert texts("whole") == [*kept, "b1", "b2", *kept]
    build(["a.jsonl", "b.txt", "a.jsonl"], "cut", text_documents="line", part_bytes=40)
    assert pair_bytes("cut") == pair_bytes("whole")


@pytest.mark.parametrize("bad", [0, 17, 39])
def test_a_bad_line_has_its_number_in_the_file_however_it_was_cut(folder, bad):
    (folder / "a.jsonl").write_text("".join("bad\n" if i == bad else '{"text": "fine"}\n' for i in range(40)))
    (folder / "b.jsonl").write_text('{"text": "first"}\n' * 3)
    for inputs in (["b.jsonl", "a.jsonl"], ["a.jsonl", "b.jsonl"]):
        with pytest.raises(IndexedDataError, match=rf"^a\.jsonl:{bad + 1}: not JSON"):
            build(inputs, "out", part_bytes=300)
        assert sorted(os.listdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.slow
def test_workers_write_the_same_bytes(folder):
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"document {i} " * (i % 50)}) + "\n" for i in range(500))
    )
    one = build(["a.jsonl"], "one")
    two = build(["a.jsonl"], "two", workers=2, part_bytes=50_000)
    assert pair_bytes("one") == pair_bytes("two")
    assert (one.documents, one.tokens, one.empty_documents) == (two.documents, two.tokens, two.empty_documents)


TOKENIZER = """
import os, signal
import numpy as np

class Tokenizer:
    vocab_size, eod = 300, 299

    def encode(self, text):
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "raise":
            raise KeyError("token")
        return [1000] if text == "range" else [ord(c) - ord("a") for c in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)

class Bytes(Tokenizer):
    def encode(self, text):
        return None if text == "none" else np.frombuffer(text.encode(), np.uint8)

class NoEnd:
    vocab_size = 4
    encode = Tokenizer.encode
"""


def test_any_tokenizer_can_be_named_by_module_and_callable(folder):
    (folder / "my_tokenizer.py").write_text(TOKENIZER)
    (folder / "a.txt").write_text("abz")
    build(["a.txt"], "out", tokenizer="my_tokenizer:Tokenizer")
    assert IndexedDataset("out")[0].tolist() == [0, 1, 25, 299]
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("text", "message"),
    [("raise", r"a\.jsonl:2: .*KeyError: 'token'"), ("range", r"a\.jsonl:2: .*position 0: id 1000; .*from 0 to 299")],
)
def test_a_tokenizer_that_fails_is_an_error_with_the_line_even_when_skipping(folder, text, message):
    (folder / "my_tokenizer2.py").write_text(TOKENIZER)
    (folder / "a.jsonl").write_text('{"text": "ab"}\n' + json.dumps({"text": text}) + "\n")
    with pytest.raises(IndexedDataError, match=message):
        build(["a.jsonl"], "out", tokenizer="my_tokenizer2:Tokenizer", on_error="skip")
    assert not IndexedDataset.exists("out")


def test_an_end_beyond_the_dtype_of_the_tokenizers_ids_is_stored_whole(folder):
    (folder / "my_tokenizer4.py").write_text(TOKENIZER)
    (folder / "a.txt").write_text("ab")
    build(["a.txt"], "out", tokenizer="my_tokenizer4:Bytes")
    assert IndexedDataset("out")[0].tolist() == [97, 98, 299]
    (folder / "a.txt").write_text("none")
    with pytest.raises(IndexedDataError, match=r"a\.txt:1: tokenizer my_tokenizer4:Bytes failed: TypeError"):
        build(["a.txt"], "out", tokenizer="my_tokenizer4:Bytes", overwrite=True)


def test_a_hugging_face_file_is_read_through_the_extra(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    vocabulary = {"hello": 0, "world": 5, "[UNK]": 1, "<eod>": 7}  # with gaps: the vocabulary has 8 ids
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save("words.json")
    (folder / "a.txt").write_text("hello big world")
    build(["a.txt"], "out", tokenizer="words.json", eod_token="<eod>")
    assert IndexedDataset("out")[0].tolist() == [0, 1, 5, 7]
    with pytest.raises(IndexedDataError, match="no token '<end>'"):
        build(["a.txt"], "out2", tokenizer="words.json", eod_token="<end>")
    with pytest.raises(IndexedDataError, match="no EOD to append"):
        build(["a.txt"], "out2", tokenizer="words.json")


REFUSALS = {
    "no inputs": ({"inputs": []}, "no inputs"),
    "a missing input": ({"inputs": ["nope.txt"]}, r"nope\.txt: No such file"),
    "a folder": ({"inputs": ["."]}, "is a folder"),
    "an output without a name": ({"output": "./"}, "'./' has no name at its end"),
    "a missing folder": ({"output": "nowhere/out"}, r"nowhere/out\.building: cannot be made"),
    "format": ({"format": "xml"}, "format is 'xml'"),
    "text_documents": ({"text_documents": "page"}, "text_documents is 'page'"),
    "on_error": ({"on_error": "shrug"}, "on_error is 'shrug'"),
    "dtype": ({"dtype": "uint8"}, "dtype is 'uint8'"),
    "workers": ({"workers": 0}, "workers is 0"),
    "tokenizer": ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2'"),
    "tokenizer file": ({"tokenizer": "nope.json"}, r"nope\.json"),
    "tokenizer module": ({"tokenizer": "no_such_module:T"}, "ModuleNotFoundError"),
    "eod_token": ({"eod_token": "x"}, "it goes with a file or folder"),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_options_that_cannot_work_are_refused_before_anything_is_written(folder, reason):
    options, message = REFUSALS[reason]
    (folder / "a.txt").write_text("text")
    with pytest.raises(IndexedDataError, match=message):
        build(**{"inputs": ["a.txt"], "output": "out", **options})
    assert os.listdir() == ["a.txt"]


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b'{"text": "x"}\n' * 1000)[:-20]])
def test_a_broken_gzip_file_is_named(folder, data):
    (folder / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(IndexedDataError, match=r"a\.jsonl\.gz: cannot be read"):
        build(["a.jsonl.gz"], "out")
    assert os.listdir() == ["a.jsonl.gz"]


def test_a_pair_is_replaced_only_when_asked(folder):
    (folder / "a.txt").write_text("old")
    build(["a.txt"], "out")
    (folder / "a.txt").write_text("new")
    with pytest.raises(IndexedDataError, match="pass overwrite"):
        build(["a.txt"], "out")
    assert texts("out") == ["old"]
    build(["a.txt"], "out", overwrite=True)
    assert texts("out") == ["new"]


def test_inputs_without_documents_make_an_empty_pair(folder):
    for name in ("a.txt", "b.jsonl"):
        (folder / name).write_text("")
    report = build(["a.txt", "b.jsonl"], "out")
    assert (report.documents, report.empty_documents) == (0, 1)
    assert len(IndexedDataset("out")) == 0
    build(["b.jsonl"], "none")
    assert len(IndexedDataset("none")) == 0


def numbered(folder, n=60):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i:05d}"}) + "\n" for i in range(n)))
    build(["a.jsonl"], "whole")


def interrupt_after_two_parts(done, total):
    if done == 2:
        raise KeyboardInterrupt


def test_an_interrupted_build_goes_on_from_its_finished_parts(folder):
    numbered(folder)
    with pytest.raises(KeyboardInterrupt, match=r"input part a\.jsonl\[1000:1500\]"):
        build(["a.jsonl"], "out", part_bytes=500, progress=interrupt_after_two_parts)
    assert not IndexedDataset.exists("out")
    stamps = [os.stat(f"out.building/part-0000{i}.bin").st_mtime_ns for i in range(2)]
    reused = []

    def compare(done, total):
        if done == 2:
            reused.extend(os.stat(f"out.building/part-0000{i}.bin").st_mtime_ns for i in range(2))

    build(["a.jsonl"], "out", part_bytes=500, progress=compare)
    assert reused == stamps
    assert pair_bytes("out") == pair_bytes("whole")
    assert sorted(os.listdir()) == ["a.jsonl", *files_of("out"), *files_of("whole")]


@pytest.mark.parametrize("change", ["options", "input"])
def test_parts_of_another_build_are_not_used(folder, change):
    numbered(folder)
    with pytest.raises(KeyboardInterrupt):
        build(["a.jsonl"], "out", part_bytes=500, progress=interrupt_after_two_parts)
    if change == "input":
        (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text().replace("document", "DOCUMENT"))
    build(["a.jsonl"], "out", part_bytes=500, append_eod=change == "input")
    build(["a.jsonl"], "whole", append_eod=change == "input", overwrite=True)
    assert pair_bytes("out") == pair_bytes("whole")


def test_a_part_whose_report_was_cut_is_made_again(folder):
    numbered(folder)
    with pytest.raises(KeyboardInterrupt):
        build(["a.jsonl"], "out", part_bytes=500, progress=interrupt_after_two_parts)
    os.truncate("out.building/part-00000.json", 7)
    build(["a.jsonl"], "out", part_bytes=500)
    assert pair_bytes("out") == pair_bytes("whole")


@pytest.mark.parametrize("done", [1, 6])
def test_a_building_folder_that_somebody_removes_is_named_and_the_remedy_works(folder, done):
    numbered(folder)

    def clean_up(parts, total):
        if parts == min(done, total):
            shutil.rmtree("out.building")

    with pytest.raises(IndexedDataError, match=r"out\.building was removed while the build wrote into it; build again"):
        build(["a.jsonl"], "out", part_bytes=500, progress=clean_up)
    assert not IndexedDataset.exists("out")
    build(["a.jsonl"], "out", part_bytes=500)
    assert pair_bytes("out") == pair_bytes("whole")


def test_a_folder_that_no_build_made_is_not_emptied(folder):
    numbered(folder)
    (folder / "out.building").mkdir()
    (folder / "out.building" / "thesis.txt").write_text("mine")
    with pytest.raises(IndexedDataError, match=r"out\.building holds thesis\.txt .*was not made by a build"):
        build(["a.jsonl"], "out")
    assert os.listdir("out.building") == ["thesis.txt"]


def test_two_builds_of_one_output_do_not_meet(folder):
    numbered(folder)
    refused = []

    def build_again(done, total):
        with pytest.raises(IndexedDataError, match="another build of the same output is running"):
            build(["a.jsonl"], "out")
        refused.append(done)

    build(["a.jsonl"], "out", progress=build_again)
    assert refused == [0, 1]
    assert pair_bytes("out") == pair_bytes("whole")


KILLED = """
import time
from sixfold.indexed_data import build
build(["a.jsonl"], "out", part_bytes=500, progress=lambda *_: time.sleep(0.05))  # not done before it is killed
"""


@pytest.mark.slow
def test_a_killed_build_leaves_no_pair_and_the_next_one_finishes_it(folder):
    numbered(folder, 400)
    process = subprocess.Popen([sys.executable, "-c", KILLED])
    deadline = time.monotonic() + 30
    while not os.path.exists("out.building/part-00002.json") and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not [name for name in os.listdir() if name in ("out.bin", "out.idx")]
    build(["a.jsonl"], "out", part_bytes=500)
    assert pair_bytes("out") == pair_bytes("whole")
    assert sorted(os.listdir()) == ["a.jsonl", *files_of("out"), *files_of("whole")]


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error_that_names_its_part(folder):
    (folder / "my_tokenizer3.py").write_text(TOKENIZER)
    (folder / "a.jsonl").write_text('{"text": "ab"}\n' * 20 + '{"text": "kill"}\n')
    with pytest.raises(IndexedDataError, match=r"a worker died before input part a\.jsonl\[.*finished parts are kept"):
        build(["a.jsonl"], "out", tokenizer="my_tokenizer3:Tokenizer", workers=2, part_bytes=200)
    assert not IndexedDataset.exists("out")
    assert [name for name in os.listdir() if name.endswith(".bin")] == []


def test_a_disk_that_takes_no_more_is_an_error_that_names_the_part(folder):
    (folder / "a.txt").write_text("x" * 100_000)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(IndexedDataError, match=r"input part a\.txt: .*File too large"):
            build(["a.txt"], "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert os.listdir() == ["a.txt"]
