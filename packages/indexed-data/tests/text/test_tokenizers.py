"""What encodes: whole documents, ids exact or refused, and one tokenizer for all parts of a build."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from indexed_data_helpers import pair_bytes

from sixfold.indexed_data import IndexedDataError, IndexedDataset, build
from sixfold.indexed_data.cli import main
from sixfold.indexed_data.text.build import BuildNote

# ---- Hugging Face files


@pytest.fixture
def words(folder):
    """The words tokenizer, not saved yet: id i is the word "wi"."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    vocabulary = {f"w{i}": i for i in range(100)} | {"<pad>": 100, "<eod>": 101, "<cls>": 102}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return tokenizer


def some_words(n):
    return [i * 7 % 100 for i in range(n)]


def text_of(ids):
    return " ".join(f"w{i}" for i in ids)


SPOILED = {
    "truncation": (lambda t: t.enable_truncation(512), "truncation to 512 tokens"),
    "truncation to the left": (lambda t: t.enable_truncation(3, direction="left"), "truncation to 3 tokens"),
    "padding": (lambda t: t.enable_padding(length=64, pad_id=100, pad_token="<pad>"), "padding with <pad>"),
    "padding to a multiple": (lambda t: t.enable_padding(pad_to_multiple_of=128, pad_token="<pad>"), "padding with"),
    "both": (lambda t: (t.enable_truncation(10), t.enable_padding(length=10, pad_token="<pad>")), "truncation to 10"),
}


@pytest.mark.parametrize(("what", "workers"), [*((what, 1) for what in SPOILED), ("both", 2)])
@pytest.mark.slow
def test_a_file_with_truncation_or_padding_stores_whole_documents_and_says_so_once(folder, words, what, workers):
    spoil, note = SPOILED[what]
    spoil(words)
    words.save("words.json")
    documents = [some_words(n) for n in (1, 51, 5_000)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text_of(ids)}) + "\n" for ids in documents))
    with pytest.warns(BuildNote, match=note) as said:
        report = build(["a.jsonl"], "out", tokenizer="words.json", eod_token="<eod>", workers=workers, part_bytes=300)
    assert [ids.tolist() for ids in IndexedDataset("out")] == [[*ids, 101] for ids in documents]
    assert [str(each.message) for each in said] == list(report.notes)
    assert len(report.notes) == (2 if what == "both" else 1)


def test_dropout_of_a_file_is_switched_off(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    vocabulary = {"a": 0, "b": 1, "ab": 2, "abab": 3}
    model = tokenizers.models.BPE(vocabulary, [("a", "b"), ("ab", "ab")], dropout=0.9)
    tokenizers.Tokenizer(model).save("words.json")
    (folder / "a.txt").write_text("abab" * 50)
    with pytest.warns(BuildNote, match=r"dropout of 0\.9 is switched off"):
        build(["a.txt"], "out", tokenizer="words.json", append_eod=False)
    assert IndexedDataset("out")[0].tolist() == [3] * 50


def test_the_command_says_what_was_switched_off_on_stderr(folder, words, capsys):
    words.enable_truncation(5)
    words.save("words.json")
    (folder / "a.txt").write_text("w1")
    argv = ["build", "a.txt", "--output", "out", "--tokenizer", "words.json", "--eod-token", "<eod>", "--json"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    note = "words.json: truncation to 5 tokens is switched off: documents are stored whole"
    assert printed.err == f"sixfold-data: note: {note}\n"
    assert json.loads(printed.out)["notes"] == [note]


def test_a_file_without_truncation_or_padding_gives_no_note(folder, words, recwarn):
    words.save("words.json")
    (folder / "a.txt").write_text("w1 w2")
    assert build(["a.txt"], "out", tokenizer="words.json", eod_token="<eod>").notes == ()
    assert not [each for each in recwarn if issubclass(each.category, BuildNote)]


@pytest.mark.parametrize("form", [Path, os.fsencode, os.path.abspath])
def test_a_file_is_taken_by_every_form_of_its_path(folder, words, form):
    words.save("words.json")
    (folder / "a.txt").write_text("w1 w2")
    build(["a.txt"], "out", tokenizer=form("words.json"), eod_token="<eod>")
    assert IndexedDataset("out")[0].tolist() == [1, 2, 101]


def test_special_tokens_of_a_template_are_not_added(folder, words):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<cls> $A", special_tokens=[("<cls>", 102)])
    words.save("words.json")
    (folder / "a.txt").write_text("w1 w2")
    build(["a.txt"], "out", tokenizer="words.json", eod_token="<eod>")
    assert IndexedDataset("out")[0].tolist() == [1, 2, 101]


# ---- what tokenizers give back

OUTPUTS = {  # expression: the ids that it means, None for what is to be refused
    "[5, 6]": [5, 6],
    "(5, 6)": [5, 6],
    "iter([5, 6])": [5, 6],
    "range(5, 7)": [5, 6],
    "np.array([5, 6])": [5, 6],
    "np.array([5, 6], np.uint8)": [5, 6],
    "np.array([5, 6], '>i2')": [5, 6],
    "np.array([5, 6], np.uint64)": [5, 6],
    "np.array([5, 6], object)": [5, 6],
    "np.array([])": [],
    "[]": [],
    "[5, -1]": None,
    "[5, 300]": None,
    "[5, 70_000]": None,
    "np.array([5, -1], np.int8)": None,
    "np.array([5, -1], np.int16)": None,
    "np.array([5, -20_000], np.int16)": None,
    "np.array([5, -1])": None,
    "np.array([5, 2**64 - 1], np.uint64)": None,
    "np.array([5, 300])": None,
    "np.array([5.0, 6.0])": None,
    "np.array([True, False])": None,
    "[5, 6.0]": None,
    "['5', '6']": None,
    "[5, '6']": None,
    "'56'": None,
    "b'56'": None,
    "np.array(['5'])": None,
    "{'input_ids': [5, 6]}": None,
    "[[5, 6]]": None,
    "None": None,
}


@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.slow
def test_what_a_tokenizer_gives_is_stored_exactly_or_refused(folder, append_eod, monkeypatch):
    module = f"outputs_{append_eod}"
    (folder / f"{module}.py").write_text(
        "import numpy as np\nexpression = None\nclass T:\n    vocab_size, eod = 300, 299\n"
        "    def encode(self, text):\n        return eval(expression)\n"
    )
    (folder / "a.txt").write_text("text")
    for expression, ids in OUTPUTS.items():
        build(["a.txt"], "bytes", overwrite=True)  # any build, so that the folder is the same for all
        sys.modules.pop(module, None)
        monkeypatch.syspath_prepend(str(folder))
        __import__(module)
        sys.modules[module].expression = expression
        call = partial(build, ["a.txt"], "out", tokenizer=f"{module}:T", append_eod=append_eod, overwrite=True)
        if ids is None or (expression.startswith("iter") and not append_eod):
            with pytest.raises(IndexedDataError, match=r"a\.txt:1: tokenizer"):
                print(expression, call())
        else:
            call()
            assert IndexedDataset("out")[0].tolist() == [*ids, *[299] * append_eod], expression


WRONG = ["= 0, None", "= 'many', None", "= 9, 9", "= 9, -1", "= 9, '<eod>'", "= 9, 1.5"]


@pytest.mark.parametrize("wrong", range(len(WRONG)))
def test_a_vocabulary_or_end_that_cannot_be_is_refused_when_the_tokenizer_is_made(folder, wrong):
    code = f"class T:\n    vocab_size, eod {WRONG[wrong]}\n    def encode(self, text):\n        return [1]\n"
    (folder / f"wrong_end_{wrong}.py").write_text(code)
    (folder / "a.txt").write_text("text")
    with pytest.raises(IndexedDataError, match="an eod below vocab_size"):
        build(["a.txt"], "out", tokenizer=f"wrong_end_{wrong}:T")


def test_what_a_tokenizer_object_lacks_is_told_with_its_values_and_the_remedies_work(folder):
    """An object of Hugging Face's classes: its end is ``eos_token_id``, and ``vocab_size`` leaves out added tokens."""
    (folder / "a.txt").write_text("text")
    module = "class T:\n    vocab_size = 9\n    {}\n    def encode(self, text):\n        return [1]\n"
    (folder / "lacking.py").write_text(module.format("eos_token_id = 9"))
    with pytest.raises(IndexedDataError, match=r"lacking:T has no EOD to append; .* an attribute eod,.*append_eod"):
        build(["a.txt"], "out", tokenizer="lacking:T")
    (folder / "lacking_more.py").write_text(module.format("eos_token_id = eod = 9"))
    with pytest.raises(IndexedDataError, match=r"vocab_size is 9 and its eod 9.* len\(tokenizer\)"):
        build(["a.txt"], "out", tokenizer="lacking_more:T")
    (folder / "lacking_none.py").write_text(module.format("vocab_size = 10; eod = 9"))
    build(["a.txt"], "out", tokenizer="lacking_none:T")
    assert IndexedDataset("out")[0].tolist() == [1, 9]


def test_a_module_without_a_file_makes_tokenizers_too(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "typed_in", ModuleType("typed_in"))
    sys.modules["typed_in"].make = lambda: SimpleNamespace(vocab_size=9, eod=8, encode=lambda text: [1])
    (folder / "a.txt").write_text("text")
    build(["a.txt"], "out", tokenizer="typed_in:make")
    assert IndexedDataset("out")[0].tolist() == [1, 8]


def test_numpy_integers_are_a_vocabulary_and_an_end(folder):
    (folder / "numpied.py").write_text(
        "import numpy as np\nclass T:\n    vocab_size, eod = np.int64(9), np.uint8(8)\n    encode = lambda *_: [1]\n"
    )
    (folder / "a.txt").write_text("text")
    build(["a.txt"], "out", tokenizer="numpied:T")
    assert IndexedDataset("out")[0].tolist() == [1, 8]


# ---- one tokenizer for all parts

SHIFTED = """
import helper_of_mine
class T:
    vocab_size, eod = {vocab_size}, {eod}
    def encode(self, text):
        return helper_of_mine.encode(text)
"""
HELPER = "def encode(text):\n    return [ord(c) % 50 + {shift} for c in text]\n"
KILLED = """
import os, sys, signal
from sixfold.indexed_data import build

def stop(done, total):
    if done == 2 and sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

report = build(["a.jsonl"], sys.argv[1], tokenizer=sys.argv[3], part_bytes=400, progress=stop, append_eod=True,
               eod_token="<eod>" if sys.argv[3].endswith(".json") else None)
print(*report.notes)
"""


def write_module(vocab_size=100, eod=99, shift=0):
    with open("shifted.py", "w") as file:
        file.write(SHIFTED.format(vocab_size=vocab_size, eod=eod))
    with open("helper_of_mine.py", "w") as file:
        file.write(HELPER.format(shift=shift))


def run(output, how, tokenizer="shifted:T"):
    """A build in a process of its own, as after a kill: what it printed, and its warnings."""
    command = [sys.executable, "-B", "-c", KILLED, output, how, tokenizer]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (0 if how == "whole" else -9), done.stderr
    return done.stdout.strip()


@pytest.fixture
def numbered(folder):
    lines = (json.dumps({"text": f"document {i:03d}"}) + "\n" for i in range(60))
    (folder / "a.jsonl").write_text("".join(lines))
    write_module()


CHANGES = {
    "nothing": ({}, ""),
    "the end": ({"eod": 98}, "other encoding.eod, encoding.files"),
    "a module that it uses": ({"shift": 7}, "other encoding.files, encoding.probe"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.slow
def test_a_killed_build_whose_tokenizer_was_edited_starts_anew_and_says_so(folder, numbered, what):
    changes, said = CHANGES[what]
    run("out", "kill")
    assert os.path.exists("out.building/part-00001.json")
    write_module(**changes)
    notes = run("out", "whole")
    encoded = [[ord(c) % 50 + changes.get("shift", 0) for c in f"document {i:03d}"] for i in range(60)]
    assert [ids.tolist() for ids in IndexedDataset("out")] == [[*ids, changes.get("eod", 99)] for ids in encoded]
    assert said in notes
    assert ("2 finished parts" in notes) == (what != "nothing")


READS = {  # file: (the module that has its ids from there, the file's content, what the note says)
    "table.py": ("from table import IDS", "IDS = {{'zebra': {}}}", "encoding.files"),
    "table.json": ("import json\nIDS = json.load(open('table.json'))", '{{"zebra": {}}}', "ids of the same documents"),
}


@pytest.mark.parametrize("file", READS)
def test_a_build_whose_vocabulary_was_edited_where_no_probe_sees_it_starts_anew(folder, file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # its time and size do not tell the edited module
    module, content, said = READS[file]
    encode = "encode = lambda _, text: [IDS.get(word, 0) for word in text.split()]"
    (folder / "reads.py").write_text(f"{module}\nclass T:\n    vocab_size, eod = 100, 99\n    {encode}\n")
    (folder / "a.jsonl").write_text('{"text": "a zebra"}\n{"text": ""}\n' * 40)
    call = partial(build, ["a.jsonl"], "out", tokenizer="reads:T", part_bytes=400)
    (folder / file).write_text(content.format(1))
    with pytest.raises(KeyboardInterrupt):
        call(progress=stop_after_two)
    for name in ("reads", "table"):  # as in another process
        sys.modules.pop(name, None)
    (folder / file).write_text(content.format(2))
    with pytest.warns(BuildNote, match=f"2 finished parts were made with other {said}; they are dropped"):
        call()
    for name in ("reads", "table"):
        sys.modules.pop(name, None)
    assert [ids.tolist() for ids in IndexedDataset("out")] == [[0, 2, 99]] * 40


def test_parts_of_a_tokenizer_that_encodes_as_before_are_kept(folder):
    """Also those with lines that made no document."""
    lines = ('{"text": "a zebra"}\n', '{"text": ""}\n', "\n", "no JSON\n")
    (folder / "a.jsonl").write_text("".join(lines) * 40)
    call = partial(build, ["a.jsonl"], "out", part_bytes=400, on_error="skip")
    with pytest.raises(KeyboardInterrupt):
        call(progress=stop_after_two)
    before = os.stat("out.building/part-00001.bin").st_mtime_ns
    with pytest.raises(KeyboardInterrupt):
        call(progress=stop_after_two)
    assert os.stat("out.building/part-00001.bin").st_mtime_ns == before
    report = call()
    assert (report.notes, report.documents, report.bad_lines) == ((), 40, 40)


@pytest.mark.slow
def test_a_killed_build_whose_tokenizer_file_was_replaced_within_its_time_and_size_starts_anew(folder, words):
    lines = (json.dumps({"text": f"w{i % 100} w1"}) + "\n" for i in range(100))
    (folder / "a.jsonl").write_text("".join(lines))
    words.save("words.json")
    status = os.stat("words.json")
    run("out", "kill", "words.json")
    data = (folder / "words.json").read_text().replace('"w1": 1,', '"w1": 2,').replace('"w2": 2,', '"w2": 1,')
    (folder / "words.json").write_text(data)
    os.utime("words.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat("words.json").st_size == status.st_size
    assert "encoding.files" in run("out", "whole", "words.json")
    swapped = {1: 2, 2: 1}
    assert [ids.tolist() for ids in IndexedDataset("out")] == [[swapped.get(i, i), 2, 101] for i in range(100)]


def stop_after_two(done, total):
    if done == 2:
        raise KeyboardInterrupt


OPTIONS = {
    "json_key": {"json_key": "body"},
    "text_documents": {"text_documents": "line"},
    "format": {"format": "jsonl"},
    "append_eod": {"append_eod": False},
    "dtype": {"dtype": "int32"},
    "on_error": {"on_error": "skip"},
    "part_bytes": {"part_bytes": 600},
}


def test_parts_with_lines_that_were_skipped_for_their_ids_are_kept(folder):
    """Their texts make the EOD, so they are no documents."""
    encode = "encode = lambda _, text: [299 if letter == '@' else 1 for letter in text]"
    (folder / "ends.py").write_text(f"class T:\n    vocab_size, eod = 300, 299\n    {encode}\n")
    (folder / "a.jsonl").write_text('{"text": "a@b"}\n{"text": "a zebra"}\n' * 40)
    call = partial(build, ["a.jsonl"], "out", tokenizer="ends:T", part_bytes=400, on_error="skip")
    with pytest.raises(KeyboardInterrupt):
        call(progress=stop_after_two)
    report = call()
    assert (report.notes, report.documents, report.bad_lines) == ((), 40, 40)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.slow
def test_parts_of_every_other_option_are_dropped_by_name(folder, option):
    lines = (json.dumps({"text": f"document {i:03d}", "body": f"another {i:04d}"}) + "\n" for i in range(60))
    (folder / "a.jsonl").write_text("".join(lines))
    with pytest.raises(KeyboardInterrupt):
        build(["a.jsonl"], "out", part_bytes=400, progress=stop_after_two)
    changed = {"part_bytes": 400, **OPTIONS[option]}
    with pytest.warns(BuildNote, match=rf"2 finished parts were made with other .*{option}"):
        build(["a.jsonl"], "out", **changed)
    build(["a.jsonl"], "whole", **changed)
    assert pair_bytes("out") == pair_bytes("whole")


def test_an_input_edited_within_its_size_and_time_is_another_input(folder, numbered):
    with pytest.raises(KeyboardInterrupt):
        build(["a.jsonl"], "out", part_bytes=400, progress=stop_after_two)
    status = os.stat("a.jsonl")
    (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text().replace("document", "DOCUMENT"))
    os.utime("a.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.warns(BuildNote, match="other inputs"):
        build(["a.jsonl"], "out", part_bytes=400)
    build(["a.jsonl"], "whole")
    assert pair_bytes("out") == pair_bytes("whole")


def append():
    with open("a.jsonl", "a") as file:
        file.write('{"text": "more"}\n')


def edit():
    with open("a.jsonl", "r+") as file:
        file.write(json.dumps({"text": "DOCUMENT 000"}) + "\n")


@pytest.mark.parametrize("change", [append, edit, lambda: os.rename("a.jsonl", "b.jsonl")])
def test_an_input_that_changes_while_it_is_read_makes_no_pair(folder, numbered, change):
    with pytest.raises(IndexedDataError, match=r"a\.jsonl: changed while it was read"):
        build(["a.jsonl"], "out", part_bytes=400, progress=lambda done, total: change() if done == total else None)
    assert not [name for name in os.listdir() if name.startswith("out")]


@pytest.mark.slow
def test_workers_that_load_another_tokenizer_end_the_build(folder):
    """An edited module that the build's process has loaded already: its workers load the new one."""
    lines = (json.dumps({"text": f"document {i:03d}"}) + "\n" for i in range(40))
    (folder / "a.jsonl").write_text("".join(lines))
    code = "class T:\n    vocab_size, eod = 200, 199\n    encode = lambda _, text: [ord(c) % 50 + {} for c in text]\n"
    (folder / "edited_meanwhile.py").write_text(code.format(0))
    build(["a.jsonl"], "out", tokenizer="edited_meanwhile:T")
    (folder / "edited_meanwhile.py").write_text(code.format(10))
    with pytest.raises(IndexedDataError, match=r"differs in a worker process \(probe\)"):
        build(["a.jsonl"], "out2", tokenizer="edited_meanwhile:T", workers=2, part_bytes=400)
    assert not IndexedDataset.exists("out2")
