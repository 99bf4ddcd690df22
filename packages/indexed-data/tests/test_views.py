"""Documents left out by lists: a view reads as the pair that would have been written without them."""

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from indexed_data_helpers import write_pair

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


def remove_list(path, numbers):
    """As stage 3 of datatrove's MinHash deduplication writes it: one struct.pack("<I", doc) after the other."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(b"".join(struct.pack("<I", number) for number in numbers))


@pytest.mark.parametrize("seed", range(15))
def test_a_view_reads_as_the_pair_without_the_documents(folder, seed):
    rng = np.random.default_rng(seed)
    documents = [
        [rng.integers(0, 999, rng.integers(0, 6)).tolist() for _ in range(rng.integers(0, 4))] for _ in range(30)
    ]
    write_pair("pair", np.uint16, documents)
    dropped = rng.permutation(30)[: rng.integers(0, 31)].tolist()
    Path("drop.txt").write_text("\n".join(map(str, dropped)))
    report = filter_pair("pair", "sub", lists=["drop.txt"])
    kept = [document for number, document in enumerate(documents) if number not in dropped]
    write_pair("oracle", np.uint16, kept)
    view, oracle = IndexedDataset("sub"), IndexedDataset("oracle")
    assert (report.documents, report.dropped, report.sequences) == (len(kept), len(dropped), len(oracle))
    assert [ids.tolist() for ids in view] == [ids.tolist() for ids in oracle]
    assert np.array_equal(view.document_indices, oracle.document_indices)
    assert np.array_equal(view.sequence_lengths, oracle.sequence_lengths)
    assert [ids.tolist() for ids in view[1:7]] == [ids.tolist() for ids in oracle[1:7]]
    assert verify("sub").ok
    assert verify("sub").tokens == report.tokens == verify("oracle").tokens
    again = pickle.loads(pickle.dumps(view))
    assert [ids.tolist() for ids in again] == [ids.tolist() for ids in oracle]
    base = view.base
    assert [base[i].tolist() for i in view.kept_sequences] == [ids.tolist() for ids in oracle]
    file = IndexedDataset("sub", mmap=False)
    assert [ids.tolist() for ids in file] == [ids.tolist() for ids in oracle]


@pytest.mark.parametrize("tasks", [None, 1, 2, 5])
def test_lists_of_datatroves_tasks_leave_out_what_its_own_filter_leaves_out(folder, tasks):
    """The oracle walks each task's files as datatrove's readers and MinhashDedupFilter do."""
    rng = np.random.default_rng(3)
    names = [f"in/{i:02d}.jsonl" for i in range(5)]
    texts = {}
    os.mkdir("in")
    for name in names:
        texts[name] = [f"{name} {i}" if rng.random() < 0.8 else "" for i in range(20)]
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[name]))
    shuffled = [names[i] for i in (3, 0, 4, 1, 2)]  # the pair has another order than datatrove
    build(shuffled, "pair", provenance=True, part_bytes=300)
    dropped = set()
    count = len(names) if tasks is None else tasks
    for task in range(count):
        of_task = [text for name in names[task::count] for text in texts[name] if text]
        numbers = sorted(rng.permutation(len(of_task))[: len(of_task) // 3].tolist())
        if task != 1:  # a task without duplicates has no file
            remove_list(f"minhash/{task:06d}.remove", numbers)
            dropped |= {of_task[number] for number in numbers}
    filter_pair("pair", "view", lists=["minhash"], tasks=tasks)
    view = IndexedDataset("view")
    stored = [bytes(ids[:-1].tolist()).decode() for ids in view]
    expected = [text for name in shuffled for text in texts[name] if text and text not in dropped]
    assert stored == expected
    for number, text in enumerate(stored):
        name, line = view.provenance.of(number)
        assert texts[name][line - 1] == text
        assert view.provenance.find(name, line) == [number]
    gone = next(iter(dropped))
    name = gone.split(" ")[0]
    assert view.provenance.find(name, texts[name].index(gone) + 1) == []


@pytest.mark.parametrize("tasks", [None, 1, 2, 3])
@pytest.mark.parametrize("middle", ["", '{"text": ""}\n', "\n\n"], ids=["0 bytes", "empty texts", "blank lines"])
def test_a_file_without_a_document_is_a_file_of_datatrove_too(folder, middle, tasks):
    texts = {name: [f"{name} {i}" for i in range(4)] for name in ("a.jsonl", "c.jsonl", "d.jsonl")}
    for name, each in texts.items():
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in each))
    Path("b.jsonl").write_text(middle)
    names = ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    build(names, "pair", provenance=True)
    assert IndexedDataset("pair").provenance.files == names
    dropped = set()
    for task in range(tasks or 4):
        of_task = [text for name in names[task :: tasks or 4] for text in texts.get(name, [])]
        remove_list(f"m/{task:06d}.remove", [1] if of_task else [])
        dropped |= {*of_task[1:2]}
    filter_pair("pair", "view", lists=["m"], tasks=tasks)
    kept = {bytes(ids[:-1].tolist()).decode() for ids in IndexedDataset("view")}
    assert kept == {text for each in texts.values() for text in each} - dropped


def test_an_empty_table_is_a_file_of_datatrove_too(folder):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra sixfold-indexed-data[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra sixfold-indexed-data[parquet]")
    parquet.write_table(arrow.table({"text": arrow.array([], arrow.string())}), "a.parquet")
    parquet.write_table(arrow.table({"text": ["one", "two"]}), "b.parquet")
    build(["a.parquet", "b.parquet"], "pair", provenance=True)
    assert IndexedDataset("pair").provenance.files == ["a.parquet", "b.parquet"]


def letters(prefix):
    return "".join(chr(ids.item(0)) for ids in IndexedDataset(prefix))


def one_letter_files(*names):
    """Each file has documents of two capital letters, the first file AB."""
    for number, name in enumerate(names):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        Path(name).write_text("".join(f'{{"text": "{chr(65 + 2 * number + i)}"}}\n' for i in range(2)))


@pytest.mark.parametrize("spelled", ["absolute", "./in/b.jsonl", "in//b.jsonl", "in/../in/b.jsonl"])
def test_inputs_that_are_spelled_in_several_ways_need_datatroves_order(folder, spelled):
    one_letter_files("in/a.jsonl", "in/b.jsonl")
    second = os.path.abspath("in/b.jsonl") if spelled == "absolute" else spelled
    build(["in/a.jsonl"], "one", provenance=True)
    build([second], "two", provenance=True)
    merge(["one", "two"], "pair")
    remove_list("m/000000.remove", [1])  # B
    remove_list("m/000001.remove", [0])  # C
    with pytest.raises(IndexedDataError, match=r"pair: its inputs are spelled in several ways.*--files"):
        filter_pair("pair", "view", lists=["m"])
    assert main(["filter", "pair", "--dedup", "m", "--output", "view", "--files", "in/a.jsonl", second]) == 0
    assert letters("view") == "AD"
    filter_pair("pair", "other", lists=["m"], files=[second, "in/a.jsonl"])
    assert letters("other") == "BC"
    for wrong in (["in/a.jsonl", "in/z.jsonl"], ["in/a.jsonl", "in/a.jsonl"]):
        with pytest.raises(IndexedDataError, match="name each file that datatrove read once"):
            filter_pair("pair", "third", lists=["m"], files=wrong)


@pytest.mark.parametrize("spelling", ["./in/{}", "{}/in/{}", "in//{}"])
def test_inputs_that_are_all_spelled_alike_need_no_order(folder, spelling):
    one_letter_files("in/a.jsonl", "in/b.jsonl")
    names = [spelling.replace("{}", str(folder), 1) if spelling.count("{}") == 2 else spelling for _ in range(2)]
    build([name.replace("{}", each) for name, each in zip(names, ("b.jsonl", "a.jsonl"), strict=True)], "pair",
          provenance=True)  # fmt: skip
    remove_list("m/000000.remove", [1])
    filter_pair("pair", "view", lists=["m"])
    assert letters("view") == "CDA"


def test_two_files_of_one_name_are_not_taken_for_one(folder):
    for number, place in enumerate(("one", "two")):
        os.makedirs(f"{place}/in")
        Path(f"{place}/in/a.jsonl").write_text(f'{{"text": "{"AC"[number]}"}}\n{{"text": "{"BD"[number]}"}}\n')
        os.chdir(place)
        build(["in/a.jsonl"], "pair", provenance=True)
        os.chdir("..")
    merge(["one/pair", "two/pair"], "pair")
    remove_list("m/000000.remove", [1])
    with pytest.raises(IndexedDataError, match=r"document 2 is of line 1 of in/a\.jsonl, after line 2 of that name"):
        filter_pair("pair", "view", lists=["m"])
    Path("d.txt").write_text("3\n")
    filter_pair("pair", "view", lists=["d.txt"])
    assert letters("view") == "ABC"


def test_lists_of_exact_deduplication_lie_in_folders_of_their_buckets(folder):
    Path("a.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(10)))
    Path("b.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(10, 20)))
    build(["a.jsonl", "b.jsonl"], "pair", provenance=True)
    remove_list("exact/00000/00000.c4_dup", [3, 1])
    remove_list("exact/00000/00001.c4_dup", [0])
    remove_list("exact/00001/00000.c4_dup", [9])
    filter_pair("pair", "view", lists=["exact"])
    kept = [int(bytes(ids[:-1].tolist())) for ids in IndexedDataset("view")]
    assert kept == [i for i in range(20) if i not in (1, 3, 9, 10)]


def test_a_view_has_the_mask_of_its_pair(folder):
    with IndexedDatasetBuilder("pair.bin", np.uint16) as builder:
        for n in range(5):
            builder.add_document([n] * 4, loss_mask=[0, 0, n % 2, 1])
    Path("drop.txt").write_text("0\n3\n")
    filter_pair("pair", "view", lists="drop.txt")
    view = IndexedDataset("view")
    assert [view.loss_mask(i).tolist()[2] for i in range(3)] == [True, False, False]


REFUSED = {
    "a document that is not there": ({"d.txt": b"10\n"}, ["d.txt"], r"d\.txt: names document 10; the pair has 10"),
    "a negative number": ({"d.txt": b"-1\n"}, ["d.txt"], r"names document -1"),
    "no number": ({"d.txt": b"one\n"}, ["d.txt"], r"d\.txt: .*one number of a document per line"),
    "another ending": ({"d.csv": b"1\n"}, ["d.csv"], r"d\.csv: is no list that is read"),
    "an empty folder": ({"f/x.txt": b""}, ["f"], r"f: this folder holds no NNNNNN\.remove"),
    "a missing list": ({}, ["d.txt"], r"d\.txt: cannot be read: No such file"),
    "no lists": ({}, [], "no lists"),
    "numbers that are cut": ({"000000.remove": b"\0\0\0\0\0"}, ["000000.remove"], r"5 bytes; .* 4 bytes each"),
    "sentences": ({"00000.c4_dup": struct.pack("<IHIH", 0, 0, 0, 0)}, ["00000.c4_dup"], "names a document twice"),
    "another task": ({"000003.remove": b""}, ["000003.remove"], r"is of task 3; the pair has files of 1 tasks"),
    "too many": ({"000000.remove": b"\x0b\0\0\0"}, ["000000.remove"], r"names document 11 of task 0, which has 10"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_lists_that_do_not_fit_are_refused_and_no_view_is_left(folder, what):
    files, lists, message = REFUSED[what]
    Path("a.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(10)))
    build(["a.jsonl"], "pair", provenance=True)
    for name, data in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)
    with pytest.raises(IndexedDataError, match=message):
        filter_pair("pair", "view", lists=lists)
    assert not [name for name in os.listdir() if name.startswith("view")]


def test_without_provenance_the_lists_of_tasks_are_refused(folder):
    write_pair("pair", np.uint16, [[[1]]])
    remove_list("m/000000.remove", [0])
    with pytest.raises(IndexedDataError, match=r"pair: was built without provenance.*--provenance"):
        filter_pair("pair", "view", lists=["m"])


def test_a_view_of_a_pair_that_was_replaced_is_refused(folder):
    write_pair("pair", np.uint16, [[[1, 2]], [[3]]])
    Path("drop.txt").write_text("0\n")
    filter_pair("pair", "view", lists=["drop.txt"])
    os.mkdir("moved")
    os.rename("view.view", "moved/view.view")
    with pytest.raises(IndexedDataError, match=r"moved/pair\.idx: found No such file"):
        IndexedDataset("moved/view")
    os.rename("moved/view.view", "view.view")
    write_pair("pair", np.uint16, [[[1]], [[3, 4]]])
    with pytest.raises(IndexedDataError, match="a view belongs to its pair"):
        IndexedDataset("view")
    assert not verify("view").ok


def test_a_view_in_a_folder_that_is_a_link_finds_its_pair(folder):
    write_pair("pair", np.uint16, [[[1]], [[2, 3]]])
    (folder / "far" / "away").mkdir(parents=True)
    (folder / "data").symlink_to(folder / "far" / "away", target_is_directory=True)
    (folder / "gone.txt").write_text("0\n")
    report = filter_pair("pair", "data/view", lists=["gone.txt"])
    assert report.dropped == 1
    for name in ("data/view", "far/away/view", str(folder / "data" / "view")):
        assert len(IndexedDataset(name).document_indices) - 1 == report.documents


def test_views_are_not_joined_nor_filtered_again_nor_written_over(folder):
    write_pair("pair", np.uint16, [[[1, 2]], [[3]]])
    Path("drop.txt").write_text("0\n")
    filter_pair("pair", "view", lists=["drop.txt"])
    with pytest.raises(IndexedDataError, match="is a view, which is not joined"):
        merge(["view", "view"], "out")
    with pytest.raises(IndexedDataError, match="is a view; filter its pair"):
        filter_pair("view", "more", lists=["drop.txt"])
    with pytest.raises(IndexedDataError, match=r"view\.view is there already"):
        filter_pair("pair", "view", lists=["drop.txt"])
    with pytest.raises(IndexedDataError, match=r"pair\.idx is there already"):
        filter_pair("pair", "pair", lists=["drop.txt"], overwrite=True)
    filter_pair("pair", "view", lists=["drop.txt"], overwrite=True)
    for data in (Path("view.view").read_bytes()[:-5], b"SIXVIEW\0", b"text"):
        Path("view.view").write_bytes(data)
        with pytest.raises(IndexedDataError, match=r"view\.view"):
            IndexedDataset("view")


def test_the_command_writes_and_shows_a_view(folder, capsys):
    write_pair("pair", np.uint16, [[[1, 2]], [[3]]])
    Path("drop.txt").write_text("0\n")
    assert main(["filter", "pair", "--dedup", "drop.txt", "--output", "view", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 1
    assert main(["show", "view", "0"]) == 0
    assert capsys.readouterr().out == "3\n"
    assert main(["info", "view", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 1
    assert main(["verify", "view"]) == 0
