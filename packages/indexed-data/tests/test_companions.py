"""What lies beside a pair: a manifest that verify checks, where documents come from, which tokens count."""

import gzip
import hashlib
import json
import os
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from indexed_data_helpers import pair_bytes, write_pair

from sixfold.indexed_data import (
    IndexedDataError,
    IndexedDataset,
    IndexedDatasetBuilder,
    build,
    filter_pair,
    merge,
    verify,
)
from sixfold.indexed_data.cli import main


def write_lines(name, texts):
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def manifest(prefix="out"):
    return json.loads(Path(f"{prefix}.manifest.json").read_text())


# ---- manifest


@pytest.mark.parametrize("part_bytes", [100, 1 << 20])
def test_a_manifest_says_what_a_pair_is_made_of(folder, part_bytes):
    write_lines("a.jsonl", [f"text {i}" for i in range(40)])
    with gzip.open("b.jsonl.gz", "wt") as file:
        file.write('{"text": ""}\n{"text": "more"}\n')
    build(["a.jsonl", "b.jsonl.gz"], "out", part_bytes=part_bytes)
    found = manifest()
    (made,) = found["builds"]
    assert made["inputs"] == [
        {"path": name, "bytes": os.path.getsize(name), "sha256": hashlib.sha256(Path(name).read_bytes()).hexdigest()}
        for name in ("a.jsonl", "b.jsonl.gz")
    ]
    assert (made["documents"], made["empty_documents"], made["bad_lines"]) == (41, 1, 0)
    assert (made["tokenizer"]["name"], made["tokenizer"]["eod"], made["tokenizer"]["vocab_size"]) == ("bytes", 256, 257)
    assert (made["options"]["append_eod"], made["added_by_template"]) == (True, [])
    for ending in ("idx", "bin"):
        data, at = Path(f"out.{ending}").read_bytes(), 0
        for nbytes, crc in found[ending]:
            assert zlib.crc32(data[at : at + nbytes]) == crc
            at += nbytes
        assert at == len(data)


def test_the_same_build_writes_the_same_manifest_with_any_workers(folder):
    write_lines("a.jsonl", [f"text {i}" for i in range(200)])
    for name, workers in (("one", 1), ("two", 2)):
        build(["a.jsonl"], name, workers=workers, part_bytes=2000, provenance=True)
    for ending in (".manifest.json", ".sources"):
        assert Path(f"one{ending}").read_bytes() == Path(f"two{ending}").read_bytes()


def test_verify_finds_every_changed_byte_of_a_pair_with_a_manifest(folder):
    write_lines("a.jsonl", [f"text {i}" for i in range(30)])
    build(["a.jsonl"], "out")
    assert verify("out").ok
    assert verify("out").notes == ("1 blocks of out.bin were compared with their checksums",)
    rng = np.random.default_rng(0)
    for ending in (".bin", ".idx"):
        whole = Path(f"out{ending}").read_bytes()
        for at in rng.integers(0, len(whole), 20).tolist():
            damaged = bytearray(whole)
            damaged[at] ^= 1 << int(rng.integers(8))
            Path(f"out{ending}").write_bytes(damaged)
            assert not verify("out").ok
        Path(f"out{ending}").write_bytes(whole)
    assert verify("out").ok


def test_a_pair_without_a_manifest_is_verified_as_before(folder):
    write_pair("hand", np.uint16, [[[1, 2]], [[3]]])
    assert verify("hand") == (report := verify("hand"))
    assert (report.ok, report.notes, report.tokens) == (True, (), 3)


def test_a_damaged_manifest_is_a_problem_and_no_traceback(folder, capsys):
    (folder / "a.txt").write_text("text")
    build(["a.txt"], "out")
    whole = Path("out.manifest.json").read_text()
    for text in (whole[:-10], whole.replace('"version": 2', '"version": 9'), whole.replace('"bin"', '"bon"')):
        Path("out.manifest.json").write_text(text)
        assert main(["verify", "out"]) == 1
        assert "out.manifest.json" in capsys.readouterr().err


def test_a_writer_that_replaces_a_pair_takes_its_companions_away_and_only_ours(folder):
    write_lines("a.jsonl", ["one", "two"])
    build(["a.jsonl"], "out", provenance=True)
    Path("out.mask").write_text("mine")
    with IndexedDatasetBuilder("out.bin", np.uint16) as builder:
        builder.add_document([1])
    assert sorted(os.listdir()) == ["a.jsonl", "out.bin", "out.idx", "out.mask"]
    assert Path("out.mask").read_text() == "mine"


@pytest.mark.parametrize("name", ["out.manifest.json", "out.sources", "out.mask"])
def test_a_file_of_somebody_else_under_a_companions_name_is_refused_before_the_work(folder, name):
    write_lines("a.jsonl", ["one"])
    Path(name).write_text('{"format": "mine"}')
    with pytest.raises(IndexedDataError, match=rf"^{name}: this file is not one that this package wrote"):
        build(["a.jsonl"], "out", provenance=True)
    assert sorted(os.listdir()) == ["a.jsonl", name]
    builder = IndexedDatasetBuilder("out.bin", np.uint16)
    builder.add_document([1], loss_mask=[True])
    if name == "out.mask":
        with pytest.raises(IndexedDataError, match="not one that this package wrote"):
            builder.finalize()
    builder.abort()


def test_merged_pairs_have_the_manifests_of_both_and_unknown_ones_are_told_as_unknown(folder):
    write_lines("a.jsonl", ["one", "two"])
    write_lines("b.jsonl", ["three"])
    build(["a.jsonl"], "a")
    build(["b.jsonl"], "b")
    write_pair("hand", np.uint16, [[[1, 2]], [[3]]])
    merge(["a", "hand", "b"], "out")
    assert manifest()["builds"] == [*manifest("a")["builds"], None, *manifest("b")["builds"]]
    assert verify("out").ok
    assert len(manifest()["bin"]) == 3
    Path("a.idx").write_bytes(pair_bytes("hand")[0])
    Path("a.bin").write_bytes(pair_bytes("hand")[1])
    with pytest.raises(IndexedDataError, match="the checksum that the manifest says"):
        merge(["a", "b"], "other")
    merge(["hand", "hand"], "plain")
    assert not os.path.exists("plain.manifest.json")


# ---- provenance


def test_each_document_knows_its_file_and_line_and_each_line_its_documents(folder):
    """The oracle reads the files line by line."""
    rng = np.random.default_rng(1)
    expected = []
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        lines = []
        for number in range(1, 120):
            kind = rng.integers(6)
            if kind == 0:
                lines.append("")
            elif kind == 1:
                lines.append('{"text": ""}')
            elif kind == 2:
                lines.append("no json")
            else:
                lines.append(json.dumps({"text": f"{name} {number}"}))
                expected.append((name, number))
        Path(name).write_text("\n".join(lines))
    names = ["a.jsonl", "b.jsonl", "c.jsonl"]
    for workers, part_bytes in ((1, 150), (1, 1 << 20), (2, 700)):
        build(names, "out", part_bytes=part_bytes, workers=workers, provenance=True, on_error="skip", overwrite=True)
        data = IndexedDataset("out")
        assert [data.provenance.of(i) for i in range(len(data))] == expected
        for document, (name, line) in enumerate(expected):
            assert bytes(data[document][:-1].tolist()).decode() == f"{name} {line}"
            assert data.provenance.find(name, line) == [document]
        missing = next(line for line in range(1, 120) if ("a.jsonl", line) not in expected)
        assert data.provenance.find("a.jsonl", missing) == []


def test_a_file_that_was_given_twice_has_two_documents_of_a_line(folder):
    write_lines("a.jsonl", ["one", "two", "three"])
    build(["a.jsonl", "a.jsonl"], "out", provenance=True)
    assert IndexedDataset("out").provenance.find("a.jsonl", 2) == [1, 4]


def test_paragraphs_lines_and_whole_files_have_the_line_where_they_begin(folder):
    Path("a.txt").write_text("one\nmore\n\n\ntwo\n\nthree\n")
    for kind, lines in (("paragraph", [1, 5, 7]), ("line", [1, 2, 5, 7]), ("file", [1])):
        build(["a.txt"], "out", text_documents=kind, provenance=True, overwrite=True)
        found = IndexedDataset("out").provenance
        assert [found.of(i)[1] for i in range(found.documents)] == lines


def test_provenance_survives_merging_and_what_had_none_is_unknown(folder):
    write_lines("a.jsonl", ["one", "two"])
    write_lines("b.jsonl", ["three", "", "four"])
    build(["a.jsonl"], "a", provenance=True)
    build(["b.jsonl"], "b", provenance=True)
    write_pair("hand", np.uint16, [[[1, 2]], [[3]]])
    merge(["hand", "a", "hand", "b", "hand"], "out")
    found = IndexedDataset("out").provenance
    known = [("a.jsonl", 1), ("a.jsonl", 2), None, None, ("b.jsonl", 1), ("b.jsonl", 3)]
    assert [found.of(i) for i in range(10)] == [None, None, *known, None, None]
    assert found.find("b.jsonl", 3) == [7]
    assert verify("out").ok
    build(["a.jsonl"], "bare")
    assert IndexedDataset("bare").provenance is None


def test_what_a_pair_does_not_have_is_refused_by_name(folder):
    write_lines("a.jsonl", ["one"])
    build(["a.jsonl"], "out", provenance=True)
    found = IndexedDataset("out").provenance
    with pytest.raises(IndexedDataError, match=r"no document comes from 'b\.jsonl'; the pair was built from a\.jsonl"):
        found.find("b.jsonl", 1)
    build(["a.jsonl", "a.jsonl"], "twice", provenance=True)
    with pytest.raises(IndexedDataError, match=r"the pair was built from a\.jsonl$"):
        IndexedDataset("twice").provenance.find("b.jsonl", 1)
    with pytest.raises(IndexedDataError, match="document 1 is asked for; there are 1"):
        found.of(1)


def test_a_companion_of_another_pair_is_refused_when_it_is_asked(folder):
    write_lines("a.jsonl", ["one", "two"])
    build(["a.jsonl"], "out", provenance=True)
    write_pair("hand", np.uint16, [[[1, 2]], [[3]]])
    os.replace("hand.bin", "out.bin")
    os.replace("hand.idx", "out.idx")
    data = IndexedDataset("out")
    assert data[1].tolist() == [3]
    with pytest.raises(IndexedDataError, match="a companion belongs to its pair"):
        data.provenance  # noqa: B018
    assert not verify("out").ok


# ---- masks


def random_documents(rng, count):
    documents = []
    for _ in range(count):
        ids = rng.integers(0, 500, rng.integers(0, 40))
        kind = rng.integers(4)
        mask = None if kind == 0 else np.full(ids.size, kind == 1) if kind < 3 else rng.random(ids.size) < 0.5
        documents.append((ids, mask))
    return documents


def write_masked(prefix, documents):
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for ids, mask in documents:
            builder.add_document(ids, loss_mask=mask)


@pytest.mark.parametrize("seed", range(20))
def test_a_mask_is_given_back_as_it_was_given_and_true_where_none_was(folder, seed):
    rng = np.random.default_rng(seed)
    first, second = random_documents(rng, 15), random_documents(rng, 15)
    plain = [(ids, None) for ids, _ in random_documents(rng, 5)]
    for prefix, documents in (("a", first), ("b", second), ("plain", plain)):
        write_masked(prefix, documents)
    merge(["a", "plain", "b", "a"], "out")
    assert not os.path.exists("plain.mask")
    for prefix, documents in (("a", first), ("plain", plain), ("out", [*first, *plain, *second, *first])):
        data = IndexedDataset(prefix)
        for number, (ids, mask) in enumerate(documents):
            oracle = np.ones(ids.size, bool) if mask is None else mask
            assert np.array_equal(data.loss_mask(number), oracle)
            if ids.size:
                offset = int(rng.integers(ids.size))
                length = int(rng.integers(ids.size - offset + 1))
                assert np.array_equal(data.loss_mask(number, offset, length), oracle[offset : offset + length])
        assert verify(prefix).ok


def test_a_mask_that_does_not_fit_is_refused_and_changes_nothing(folder):
    builder = IndexedDatasetBuilder("out.bin", np.uint16)
    builder.add_document([1, 2, 3], loss_mask=[0, 1, 1])
    with pytest.raises(IndexedDataError, match=r"document 1: loss_mask has shape \(1,\), the document has 2 ids"):
        builder.add_document([4, 5], loss_mask=[1])
    with pytest.raises(IndexedDataError, match="it holds bools, or 0 and 1"):
        builder.add_document([4, 5], loss_mask=[1, 2])
    with pytest.raises(IndexedDataError, match="it holds bools, or 0 and 1"):
        builder.add_document([4, 5], loss_mask=[1.0, 0.0])
    builder.add_document([6], loss_mask=[0])
    builder.add_document([7])
    builder.finalize()
    data = IndexedDataset("out")
    assert [data.loss_mask(i).tolist() for i in range(3)] == [[False, True, True], [False], [True]]


def test_a_damaged_mask_is_refused(folder):
    write_masked("out", [(np.arange(9), np.arange(9) % 2 == 0)])
    whole = Path("out.mask").read_bytes()
    for damaged in (whole[:-3], whole[:20], b"x" * len(whole), whole[:8] + b"\x09" + whole[9:]):
        Path("out.mask").write_bytes(damaged)
        with pytest.raises(IndexedDataError, match=r"out\.mask"):
            IndexedDataset("out").loss_mask(0)
        assert not verify("out").ok
    Path("out.mask").write_bytes(whole[:64] + np.array([5, 3], "<i8").tobytes() + whole[80:])
    assert "a mask changes at tokens of the pair, in order" in [problem.rule for problem in verify("out").problems]
    with pytest.raises(IndexedDataError, match=r"out\.mask: found flips .* out of order"):
        IndexedDataset("out").loss_mask(0)


# ---- replaced pairs, and files that are not those of the pair


def masked(prefix, first, begin):
    """Six documents of eight ids from ``first`` on, which count from token ``begin`` on."""
    write_masked(prefix, [(first + i + np.arange(8), np.arange(8) >= begin) for i in range(6)])


def written_by_another_program(prefix, first):
    write_pair("other", np.uint16, [[(first + i + np.arange(8)).tolist()] for i in range(6)])
    for ending in (".bin", ".idx"):
        os.replace(f"other{ending}", f"{prefix}{ending}")


def test_a_pair_of_the_same_lengths_and_other_ids_has_no_mask_no_provenance_and_no_view(folder):
    masked("out", 100, 3)
    Path("drop.txt").write_text("0\n")
    filter_pair("out", "view", lists=["drop.txt"])
    write_lines("a.jsonl", ["one", "two"])
    build(["a.jsonl"], "a", provenance=True)
    write_lines("b.jsonl", ["six", "ten"])
    build(["b.jsonl"], "b")
    os.remove("a.manifest.json")
    written_by_another_program("out", 500)
    for ending in (".bin", ".idx"):
        os.replace(f"b{ending}", f"a{ending}")
    with pytest.raises(IndexedDataError, match=r"out\.mask: .*other ids.*a companion belongs to its pair"):
        IndexedDataset("out").loss_mask(3)
    with pytest.raises(IndexedDataError, match=r"a\.sources: .*a companion belongs to its pair"):
        IndexedDataset("a").provenance  # noqa: B018
    with pytest.raises(IndexedDataError, match=r"view\.view: .*a view belongs to its pair"):
        IndexedDataset("view")
    assert not any(verify(prefix).ok for prefix in ("out", "a", "view"))


def test_a_copied_pair_keeps_what_lies_beside_it(folder):
    write_lines("a.jsonl", ["one", "two"])
    build(["a.jsonl"], "a", provenance=True)
    for name in [name for name in os.listdir() if name.startswith("a.") and name != "a.jsonl"]:
        Path("copy" + name.removeprefix("a")).write_bytes(Path(name).read_bytes())
    assert IndexedDataset("copy").provenance.of(1) == ("a.jsonl", 2)
    assert verify("copy").ok


@pytest.mark.parametrize("new_mask", [True, False], ids=["another mask", "no mask"])
@pytest.mark.parametrize("mmap", [True, False])
def test_an_open_reader_has_the_mask_of_the_pair_that_it_opened_or_none(folder, mmap, new_mask):
    """The same ids with another mask: only that the pair was replaced tells them apart."""
    masked("out", 100, 3)
    asked, late = IndexedDataset("out", mmap=mmap), IndexedDataset("out", mmap=mmap)
    expected = asked.loss_mask(3).tolist()
    masked("out", 100, 0) if new_mask else written_by_another_program("out", 100)
    assert asked.loss_mask(3).tolist() == expected
    with pytest.raises(IndexedDataError, match="the pair was replaced since it was opened"):
        late.loss_mask(3)
    with pytest.raises(IndexedDataError, match="the pair was replaced since it was opened"):
        late.provenance  # noqa: B018


def test_the_base_of_an_open_view_is_the_pair_that_it_opened(folder):
    masked("out", 100, 3)
    Path("drop.txt").write_text("0\n")
    filter_pair("out", "view", lists=["drop.txt"])
    view = IndexedDataset("view")
    masked("out", 900, 3)
    assert view[0].tolist() == list(range(101, 109))
    with pytest.raises(IndexedDataError, match="the pair was replaced since it was opened"):
        view.base  # noqa: B018


def masked_build(prefix):
    """A pair with a manifest, a mask and provenance."""
    write_lines("a.jsonl", ["one", "two"])
    build(["a.jsonl"], "a", provenance=True, overwrite=True)
    masked("m", 1, 2)
    merge(["a", "m"], prefix, overwrite=True)


@pytest.mark.parametrize("ending", [".mask", ".sources"])
def test_what_a_manifest_names_and_is_not_there_or_is_another_is_refused(folder, ending):
    masked_build("out")
    assert set(manifest()["beside"]) == {".mask", ".sources"}
    assert verify("out").ok
    whole = Path(f"out{ending}").read_bytes()

    def ask():
        data = IndexedDataset("out")
        return data.loss_mask(0) if ending == ".mask" else data.provenance

    os.remove(f"out{ending}")
    for _ in range(2):  # one that is not there, and one of the same pair with other content
        with pytest.raises(IndexedDataError, match=rf"out\{ending}: .*the companions that its manifest names"):
            ask()
        rules = [problem.rule for problem in verify("out").problems]
        assert rules == ["a pair has the companions that its manifest names"]
        masked("m", 1, 5)
        write_lines("a.jsonl", ["", "one", "two"])
        build(["a.jsonl"], "a", provenance=True, overwrite=True)
        merge(["a", "m"], "other", overwrite=True)
        os.replace(f"other{ending}", f"out{ending}")
    Path(f"out{ending}").write_bytes(whole)
    assert verify("out").ok
    text = Path("out.manifest.json").read_text()
    Path("out.manifest.json").write_text(text.replace(f'"{ending}":', '".other":'))
    assert [problem.rule for problem in verify("out").problems] == ["a manifest can be read"]


def test_verify_finds_each_flipped_bit_of_what_lies_beside_a_pair_and_never_raises(folder):
    masked_build("out")
    os.remove("out.manifest.json")  # their own checksums tell
    Path("drop.txt").write_text("0\n3\n")
    filter_pair("out", "view", lists=["drop.txt"])
    for name, prefix in (("out.mask", "out"), ("out.sources", "out"), ("view.view", "view")):
        whole = Path(name).read_bytes()
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            Path(name).write_bytes(damaged)
            assert not verify(prefix).ok, (name, at)
            with suppress(IndexedDataError):
                IndexedDataset(prefix).loss_mask(1)
            with suppress(IndexedDataError):
                IndexedDataset(prefix).provenance.of(1)
        Path(name).write_bytes(whole)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"formaT": "sixfold-indexed-data manifest"}'])
def test_a_manifest_that_is_none_is_a_problem_of_its_pair(folder, content):
    write_lines("a.jsonl", ["one", "two"])
    build(["a.jsonl"], "out")
    Path("out.manifest.json").write_bytes(content)
    assert [problem.rule for problem in verify("out").problems] == ["a manifest begins with its format"]
    with pytest.raises(IndexedDataError, match=r"out\.manifest\.json: .*a manifest begins with its format"):
        merge(["out", "out"], "two")


def test_a_manifest_without_one_of_its_fields_is_a_problem(folder):
    write_lines("a.jsonl", ["one", "two"])
    build(["a.jsonl"], "out", provenance=True)
    whole = manifest()
    for key in whole:
        Path("out.manifest.json").write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
        assert not verify("out").ok
    for key in whole:
        for value in ([], 1, "x", None, {"a": 1}):
            Path("out.manifest.json").write_text(json.dumps({**whole, key: value}))
            verify("out")
