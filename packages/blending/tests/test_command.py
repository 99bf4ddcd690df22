"""``python -m sixfold.blending``: what it prints is what the API says, and every wrong input is one line."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import config, sequences_of

from sixfold.blending import BlendChange, BlendedMegatronDatasetBuilder, GPTDataset
from sixfold.blending.__main__ import main

indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which reads prefixes")

SIZES = [60, 5, 0]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Three pairs, written once: no test changes them."""
    folder = tmp_path_factory.mktemp("pairs")
    for number, name in enumerate(("wiki", "code", "math")):
        with indexed_data.IndexedDatasetBuilder(folder / f"{name}.bin", dtype=np.uint16) as builder:
            for sequence in sequences_of([30, 7, 55, 2, 19] * 4, number):
                builder.add_document(sequence)
    return [str(folder / name) for name in ("wiki", "code", "math")]


@pytest.fixture
def said(prefixes):
    wiki, code, math = prefixes
    return {
        "random_seed": 1234,
        "sequence_length": 8,
        "tokenizer": {"eod": 0, "vocab_size": 256},
        "split": "80,20,0",
        "blend": [[wiki, code], [0.7, 0.3]],
        "changes": [{"at": 40, "blend": [[wiki, math], [0.5, 0.5]]}],
        "sizes": SIZES,
    }


@pytest.fixture
def parts(prefixes):
    wiki, code, math = prefixes
    changes = [BlendChange(at=40, blend=([wiki, math], [0.5, 0.5]))]
    made = config(blend=([wiki, code], [0.7, 0.3]), split="80,20,0", changes=changes)
    return BlendedMegatronDatasetBuilder(GPTDataset, SIZES, lambda: True, made).build()


@pytest.fixture
def run(tmp_path, capsys):
    """Exit code, stdout and stderr of one command; CONFIG stands for the file of ``said``."""

    def run(said, *arguments):
        path = tmp_path / "config.json"
        path.write_text(said if isinstance(said, str) else json.dumps(said))
        code = main([str(path) if argument == "CONFIG" else str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("position", "split"), [(0, "train"), (55, "train"), (3, "valid")])
def test_why_prints_what_the_dataset_says(run, said, parts, position, split):
    why = parts[("train", "valid").index(split)].why(position)
    assert run(said, "why", "CONFIG", position, "--split", split) == (0, f"{why}\n", "")
    code, text, _ = run(said, "why", "CONFIG", position, "--split", split, "--json")
    assert code == 0
    assert json.loads(text) == asdict(why) | {"ranges": [asdict(part) for part in why.ranges]}


def test_the_byte_of_a_token_holds_that_token(run, said, parts):
    expected = parts[0][7]["tokens"].tolist()
    for token, id_ in enumerate(expected):
        code, text, _ = run(said, "why", "CONFIG", 7, "--token", token, "--json")
        found = json.loads(text)
        assert code == 0
        assert (found["position"], found["token"]) == (7, token)
        with open(found["range"]["path"], "rb") as file:
            file.seek(found["byte"])
            assert int.from_bytes(file.read(2), "little") == id_
        assert found["range"]["byte_begin"] <= found["byte"] < found["range"]["byte_end"]
    code, text, _ = run(said, "why", "CONFIG", 7, "--token", 7)
    assert (code, text.split(": ")[0]) == (0, "position 7 token 7")
    assert text.endswith(f", byte {found['byte']}\n")


def test_draw_shows_dataset_and_sample_of_every_position(run, said, parts, prefixes):
    code, text, _ = run(said, "draw", "CONFIG", "--begin", 35, "--count", 13)
    lines = text.splitlines()
    pairs = [tuple(map(int, pair.split("."))) for line in lines[3:] for pair in line.split(": ")[1].split()]
    dataset_B, sample_B = parts[0].locate(range(35, 48))
    assert code == 0
    assert pairs == list(zip(dataset_B.tolist(), sample_B.tolist(), strict=True))
    counts = np.bincount(dataset_B, minlength=3).tolist()
    epochs = parts[0].epochs(48)
    assert lines[:3] == [
        f"dataset {i} ({Path(prefixes[i]).name}): {counts[i]} of 13; {epochs[i]:.4g} epochs in 0..47" for i in range(3)
    ]
    assert [line.split(":")[0] for line in lines[3:]] == ["35", "43"]


def test_draw_of_one_dataset_ends_with_its_epoch(run, said, prefixes):
    alone = said | {"blend": [prefixes[:1], None], "changes": [], "split": "1", "sizes": [None, 0, 0]}
    samples = (4 * (30 + 7 + 55 + 2 + 19) - 1) // 8  # 56
    code, text, _ = run(alone, "draw", "CONFIG", "--begin", samples - 2)
    assert (code, text) == (
        0,
        f"dataset 0 (wiki): 2 of 2; {56 * 8 / 452:.4g} epochs in 0..55\n"
        f"{samples - 2}: 0.{samples - 2} 0.{samples - 1}\n",
    )


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_the_other_orders_are_explained_too(run, said, tmp_path, order):
    cache = str(tmp_path / "cache")
    other = said | {"order": order, "changes": [], "path_to_cache": cache, "sizes": [60, 0, 0], "split": "1"}
    code, text, _ = run(other, "why", "CONFIG", 11, "--json")
    assert code == 0
    assert sum(part["length"] for part in json.loads(text)["ranges"]) == 8
    _, text, _ = run(other, "why", "CONFIG", 11)
    assert text.splitlines()[1].startswith("  document "), "an index has no epochs to tell of"
    empty = other | {"split": "80,20", "sizes": [60, 0, 0]}
    code, _, text = run(empty, "why", "CONFIG", 0, "--split", "valid")
    assert (code, text) == (1, "sixfold.blending: position 0: there are no samples\n")
    code, text, _ = run(other, "draw", "CONFIG", "--count", 20)
    assert code == 0
    assert text.startswith("dataset 0 (")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, ["why", "nowhere.json", 0], "nowhere.json"),
        ("{", ["draw", "CONFIG"], "is no JSON"),
        ("[]", ["draw", "CONFIG"], "holds a list; it is an object of config fields"),
        ({"seed": 1}, ["draw", "CONFIG"], "has the field 'seed'; fields are"),
        ({"split_matrix": []}, ["draw", "CONFIG"], "has the field 'split_matrix'"),
        ({"random_seed": ...}, ["draw", "CONFIG"], "has no 'random_seed'; it needs"),
        ({"sizes": 5}, ["draw", "CONFIG"], "sizes is 5; it is three counts"),
        ({"sizes": [1, 2]}, ["draw", "CONFIG"], "sizes is [1, 2]; it is three counts"),
        ({"sequence_length": "8"}, ["draw", "CONFIG"], "sequence_length is '8'"),
        ({"changes": 5}, ["draw", "CONFIG"], "of another type"),
        ({"changes": [{"from": 5}]}, ["draw", "CONFIG"], "of another type"),
        ({"dataset_names": ["a"]}, ["draw", "CONFIG"], "of another type"),
        ({"tokenizer": "gpt2"}, ["draw", "CONFIG"], "tokenizer is 'gpt2'; it is an object"),
        ({"tokenizer": {"eod": -1}}, ["draw", "CONFIG"], "tokenizer.eod is -1"),
        ({"blend": [["nowhere"], [1]]}, ["draw", "CONFIG"], "nowhere.idx or nowhere.bin is missing"),
        ({}, ["draw", "CONFIG", "--begin", -1], "--begin is -1"),
        ({}, ["draw", "CONFIG", "--count", 0], "--count is 0"),
        ({}, ["why", "CONFIG", -1], "position -1 is not in"),
        ({}, ["why", "CONFIG", 10**30], "positions are object"),
        ({}, ["why", "CONFIG", 0, "--token", 8], "has tokens 0..7 without padding; token 8"),
        ({}, ["why", "CONFIG", 0, "--token", -1], "token -1 is none"),
        ({}, ["why", "CONFIG", 0, "--split", "test"], "there is no test part"),
        (
            {"multiple_validation_sets": True},
            ["why", "CONFIG", 0, "--split", "valid"],
            "valid is 2 datasets of their own",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_1(run, said, change, arguments, message):
    given = change if isinstance(change, str) else {k: v for k, v in (said | change).items() if v is not ...}
    code, out, error = run(given, *arguments)
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert error.startswith("sixfold.blending: ")
    assert message in error


def test_a_damaged_pair_is_one_line_too(run, said, prefixes, tmp_path):
    damaged = tmp_path / "damaged"
    for end in (".bin", ".idx"):
        content = Path(prefixes[0] + end).read_bytes()
        damaged.with_suffix(end).write_bytes(content[:20] if end == ".idx" else content)
    code, out, error = run(said | {"blend": [[str(damaged)], [1]]}, "why", "CONFIG", 0)
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert str(damaged) in error


@pytest.mark.parametrize("arguments", [[], ["why"], ["why", "c.json", "x"], ["paint", "c.json"], ["draw", "c", "-q"]])
def test_a_wrong_command_line_is_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: python -m sixfold.blending" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_module(said, parts, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(said))
    command = [sys.executable, "-m", "sixfold.blending", "why", str(path), "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{parts[0].why(5)}\n", "")


def test_packing_prints_what_each_way_costs(said, tmp_path, capsys):
    file = tmp_path / "blend.json"
    file.write_text(json.dumps(said))
    assert main(["packing", str(file), "--documents", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["wiki", "code", "math"]
    for costs in found.values():
        assert [cost["packing"] for cost in costs] == ["concatenate", "next_fit", "first_fit_8", "best_fit"]
    assert main(["packing", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "wiki: all documents, 369 tokens"
    assert lines[1].startswith("  concatenate  47 rows, 7 padding, ")
    assert main(["packing", str(file), "--documents", "0"]) == 1
    assert "--documents is 0; it is a whole number >= 1" in capsys.readouterr().err
