"""Parquet, Arrow, folders of datasets, zstd and gzip: the same pair as from the same texts in JSON lines."""

import gzip
import json
import os

import pytest
from indexed_data_helpers import pair_bytes

from sixfold.indexed_data import IndexedDataError, build
from sixfold.indexed_data.cli import main

TEXTS = [f"document {i}: " + "é漢😀 \r\n"[: i % 7] * (i % 50) for i in range(3000)]


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="needs the extra sixfold-indexed-data[parquet]")


def write_jsonl(name, texts=TEXTS, key="text"):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({key: text}) + "\n" for text in texts)


def expected(texts=TEXTS):
    write_jsonl("oracle.jsonl", texts)
    build(["oracle.jsonl"], "oracle", overwrite=True)
    return pair_bytes("oracle")


def save_dataset(arrow, folder, pieces):
    """As ``Dataset.save_to_disk`` of datasets 5.2 lays it out: streams of record batches and a state.json."""
    os.makedirs(folder)
    names = [f"data-{i:05d}-of-{len(pieces):05d}.arrow" for i in range(len(pieces))]
    for name, texts in zip(names, pieces, strict=True):
        table = arrow.table({"id": list(range(len(texts))), "text": texts})
        with arrow.ipc.new_stream(os.path.join(folder, name), table.schema) as writer:
            writer.write_table(table, 100)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_format_type": None}
    with open(os.path.join(folder, "state.json"), "w", encoding="utf-8") as file:
        json.dump(state, file)
    with open(os.path.join(folder, "dataset_info.json"), "w", encoding="utf-8") as file:
        json.dump({"features": {}}, file)


def write_arrow(arrow, kind, name):
    table = arrow.table({"more": list(range(len(TEXTS))), "text": TEXTS})
    if kind == "parquet":
        arrow.parquet.write_table(table, name, row_group_size=217)
    elif kind == "large strings":
        arrow.parquet.write_table(table.set_column(1, "text", table["text"].cast(arrow.large_string())), name)
    elif kind == "dictionary":
        arrow.parquet.write_table(table.set_column(1, "text", table["text"].dictionary_encode()), name)
    elif kind == "file":
        with arrow.ipc.new_file(name, table.schema) as writer:
            writer.write_table(table, 217)
    else:
        with arrow.ipc.new_stream(name, table.schema) as writer:
            writer.write_table(table, 217)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["parquet", "large strings", "dictionary", "file", "stream"])
def test_a_table_gives_the_pair_of_its_texts(folder, arrow, kind, workers):
    pytest.importorskip("pyarrow.parquet", reason="needs the extra sixfold-indexed-data[parquet]")
    name = "a.parquet" if kind in ("parquet", "large strings", "dictionary") else "a.arrow"
    write_arrow(arrow, kind, name)
    report = build([name], "out", workers=workers, part_bytes=20_000)
    assert pair_bytes("out") == expected()
    assert (report.documents, report.bad_lines) == (len(TEXTS), 0)


def test_a_parquet_file_is_cut_at_its_row_groups_into_parts_of_about_the_same_text(folder, arrow):
    from sixfold.indexed_data.text.inputs import TextOptions, cut, sources_of

    pytest.importorskip("pyarrow.parquet", reason="needs the extra sixfold-indexed-data[parquet]")
    arrow.parquet.write_table(arrow.table({"text": ["x" * 100] * 1000}), "a.parquet", row_group_size=50,
                              use_dictionary=False)  # fmt: skip
    parts = cut(sources_of(["a.parquet"], TextOptions()), TextOptions(), 11_000)
    assert [(piece.begin, piece.end) for (piece,) in parts] == [(i, i + 2) for i in range(0, 20, 2)]


def test_a_folder_that_datasets_saved_is_read_in_the_order_of_its_list(folder, arrow):
    save_dataset(arrow, "saved", [TEXTS[:1000], [], TEXTS[1000:]])
    build(["saved"], "out")
    assert pair_bytes("out") == expected()


def test_folders_that_cannot_be_read_say_what_to_give(folder, arrow):
    save_dataset(arrow, "both/train", [TEXTS[:3]])
    (folder / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(IndexedDataError, match=r"^both: is a folder of several splits; .*: both/train, both/test$"):
        build(["both"], "out")
    state = json.loads((folder / "both/train/state.json").read_text()) | {"_indices_data_files": [{"filename": "i"}]}
    (folder / "both/train/state.json").write_text(json.dumps(state))
    with pytest.raises(IndexedDataError, match=r"picked by a list of indices.*flatten_indices"):
        build(["both/train"], "out")
    (folder / "both/train/state.json").write_text("{")
    with pytest.raises(IndexedDataError, match="its list of files cannot be read"):
        build(["both/train"], "out")


def test_rows_without_text_are_named_by_their_number(folder, arrow):
    pytest.importorskip("pyarrow.parquet", reason="needs the extra sixfold-indexed-data[parquet]")
    bad = arrow.array([b"ab", None, b"c\xffd", b"", b"e"], arrow.binary()).cast(arrow.string(), safe=False)
    arrow.parquet.write_table(arrow.table({"text": bad}), "a.parquet", row_group_size=2)
    with pytest.raises(IndexedDataError, match=r"^a\.parquet:2: no string in column 'text': it is null"):
        build(["a.parquet"], "out")
    report = build(["a.parquet"], "out", on_error="skip", part_bytes=1)
    assert [error.partition(": ")[0] for error in report.errors] == ["a.parquet:2", "a.parquet:3"]
    assert "not UTF-8: byte 0xff at column 2" in report.errors[1]
    assert (report.documents, report.empty_documents, report.tokens) == (2, 1, 3 + 2)


def test_a_wrong_column_or_a_damaged_table_is_told_before_anything_is_written(folder, arrow):
    pytest.importorskip("pyarrow.parquet", reason="needs the extra sixfold-indexed-data[parquet]")
    arrow.parquet.write_table(arrow.table({"body": ["a"], "n": [1]}), "a.parquet")
    with pytest.raises(IndexedDataError, match=r"no column 'text', its columns are body, n; .*--json-key"):
        build(["a.parquet"], "out")
    with pytest.raises(IndexedDataError, match=r"column 'n' is of type int64; a text column has strings"):
        build(["a.parquet"], "out", json_key="n")
    build(["a.parquet"], "out", json_key="body")
    os.truncate("a.parquet", os.path.getsize("a.parquet") - 3)
    with pytest.raises(IndexedDataError, match=r"^a\.parquet: cannot be read"):
        build(["a.parquet"], "out2", json_key="body")
    assert sorted(os.listdir()) == ["a.parquet", "out.bin", "out.idx", "out.manifest.json"]


def test_without_pyarrow_the_error_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (folder / "a.parquet").write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    assert main(["build", "a.parquet", "--output", "out"]) == 1
    assert "pip install 'sixfold-indexed-data[parquet]'" in capsys.readouterr().err


# ---- compressed text


def zstd(data, **options):
    zstandard = pytest.importorskip("zstandard", reason="needs the extra sixfold-indexed-data[zstd]")
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.ZSTD", "a.jsonl.gz", "a.jsonl.gz.1"])
def test_compressed_lines_give_the_pair_of_the_lines(folder, name):
    write_jsonl("plain.jsonl")
    data = (folder / "plain.jsonl").read_bytes()
    half = len(data) // 2
    # Two frames: what `cat a.zst b.zst` and parallel compressors write.
    pack = gzip.compress if ".gz" in name else zstd
    (folder / name).write_bytes(pack(data[:half]) + pack(data[half:]))
    build([name], "out")
    assert pair_bytes("out") == expected()


def test_a_cut_or_damaged_zstd_file_is_an_error_and_no_shorter_pair(folder):
    write_jsonl("plain.jsonl")
    whole = zstd((folder / "plain.jsonl").read_bytes(), write_checksum=True)
    for data in (whole[:-5], whole[: len(whole) // 2], b"text, by another name", whole + b"more"):
        (folder / "a.jsonl.zst").write_bytes(data)
        with pytest.raises(IndexedDataError, match=r"a\.jsonl\.zst: cannot be read"):
            build(["a.jsonl.zst"], "out")
    assert "out.bin" not in os.listdir()


def test_without_zstandard_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (folder / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(IndexedDataError, match=r"needs the zstandard package: pip install 'sixfold-indexed-data\[zstd"):
        build(["a.txt.zst"], "out")


@pytest.mark.parametrize("value", [{"text": "a"}, ["a", "b"]], ids=["struct", "list"])
def test_a_column_of_structs_or_lists_of_strings_is_no_text(folder, arrow, value):
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": [value]}), "a.parquet")
    with pytest.raises(IndexedDataError, match=r"a\.parquet:1: no string in column 'text': it is a (dict|list)"):
        build(["a.parquet"], "out")


def test_two_columns_of_the_name_are_refused(folder, arrow):
    from pyarrow import parquet

    table = arrow.Table.from_arrays([arrow.array(["A"]), arrow.array(["B"])], names=["text", "text"])
    parquet.write_table(table, "a.parquet")
    with pytest.raises(IndexedDataError, match=r"a\.parquet: has 2 columns 'text'"):
        build(["a.parquet"], "out")


def test_a_column_that_is_named_as_a_field_of_another_is_taken_by_its_name(folder, arrow):
    struct = arrow.array([{"b": 1}] * len(TEXTS))
    arrow.parquet.write_table(arrow.table({"a": struct, "a.b": TEXTS}), "table.parquet")
    build(["table.parquet"], "out", json_key="a.b")
    assert pair_bytes("out") == expected()
