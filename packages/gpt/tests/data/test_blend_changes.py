"""What data.changes says, as blending takes it, and which pairs a run opens."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from gpt_helpers import tiny_config, write_pair

from sixfold.gpt import ConfigError, TrainConfig
from sixfold.gpt.config.resume_rules import resume_changes
from sixfold.gpt.data.blend_changes import blend_changes, prefixes_to_open, prefixes_with_tokenizer
from sixfold.gpt.data.token_stream import build_datasets, continue_data, preflight


def changed(folder, *entries, options=()):
    return tiny_config(folder, "train.steps=8", f"data.changes=[{', '.join(entries)}]", *options)


def dropped(folder, drop, options=()):
    return changed(folder, f"{{at = 16, drop = {drop}}}", options=options)


def test_a_key_is_a_prefix_or_a_name_and_documents_stand_there_or_in_a_file(tmp_path):
    wiki, code = (str(tmp_path / name) for name in ("wiki", "code"))
    (tmp_path / "gone.txt").write_text("7\n\n 3 \n")
    found = [
        ("{wiki = [5, 2]}", {wiki: [5, 2]}),
        (f'{{"{code}" = [0], wiki = [1]}}', {code: [0], wiki: [1]}),
        (f'{{code = "{tmp_path}/gone.txt"}}', {code: [7, 3]}),
    ]
    for drop, expected in found:
        config = dropped(tmp_path, drop)
        (change,) = blend_changes(config.data)
        assert (change.at, change.blend, change.drop) == (16, None, expected)
        assert blend_changes(TrainConfig.from_text(config.to_toml()).data) == [change], "through a checkpoint"
    named = dropped(tmp_path, "{w = [5]}", options=('data.names=["w", "c"]',))
    assert blend_changes(named.data)[0].drop == {wiki: [5]}


def test_a_change_may_have_a_blend_and_documents(tmp_path):
    config = changed(tmp_path, "{at = 16, weights = [1, 3], drop = {wiki = [1]}}", "{at = 24, drop = {code = [2]}}")
    first, second = blend_changes(config.data)
    assert first.blend == (list(config.data.blend), [1.0, 3.0]) and second.blend is None
    assert [list(change.drop.values()) for change in (first, second)] == [[[1]], [[2]]]


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("{wikki = [1]}", "data.changes[0].drop names 'wikki', of which training reads nothing; it names datasets of"),
        ("{wiki = [-1]}", "data.changes.drop.wiki[0] is -1; it is >= 0"),
        ("{wiki = 3}", "data.changes.drop.wiki is 3 (int); it is a list"),
        ("[1]", "data.changes.drop is [1] (list); it is a table"),
        ("{}", "changes nothing; give blend, weights or drop"),
        ('{wiki = [1], "FOLDER/wiki" = [2]}', "data.changes[0].drop names wiki twice"),
    ],
)
def test_what_drops_nothing_that_there_is_is_refused(drop, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        dropped(tmp_path, drop.replace("FOLDER", str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "which cannot be read (No such file or directory); it is a list of numbers of documents, or a text"),
        ("", "has no number of a document; write one on each line"),
        ("3\n4,5\n", "has '4,5'; it has the number of a document on each line"),
        ("-3\n", "has '-3'; it has the number of a document on each line"),
    ],
)
def test_a_file_that_is_no_list_of_documents_is_named(text, message, tmp_path):
    if text is not None:
        (tmp_path / "gone.txt").write_text(text)
    config = dropped(tmp_path, f'{{wiki = "{tmp_path}/gone.txt"}}')
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        blend_changes(config.data)
    assert "data.changes[0].drop.wiki" in str(raised.value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        preflight(config)


def test_folders_and_files_may_move_and_what_was_dropped_may_not_be_another(tmp_path):
    old = dropped(tmp_path, "{wiki = [1, 2]}")
    resume_changes(old, dropped(tmp_path, f'{{"{tmp_path}/wiki" = [1, 2]}}'), step=4)
    resume_changes(old, dropped(tmp_path, "{wiki = [1]}"), step=2)
    with pytest.raises(ConfigError, match=r"cannot change data\.changes"):
        resume_changes(old, dropped(tmp_path, "{code = [1, 2]}"), step=4)
    of_file = dropped(tmp_path, '{wiki = "gone.txt"}')
    resume_changes(of_file, dropped(tmp_path, '{wiki = "moved/gone.txt"}'), step=4)  # the data compares the documents
    assert asdict(of_file)["data"]["changes"][0]["drop"] == {"wiki": "gone.txt"}


def test_a_list_may_become_a_file_of_the_same_documents_and_others_are_refused_by_key(tmp_path):
    gone = tmp_path / "gone.txt"
    gone.write_text("7\n3\n")
    listed, in_file = dropped(tmp_path, "{wiki = [3, 7]}"), dropped(tmp_path, f'{{wiki = "{gone}"}}')
    state = json.loads(json.dumps(build_datasets(listed)[0].state_dict(32)))
    resume_changes(listed, in_file, step=4)
    continue_data(build_datasets(in_file)[0], state, in_file)
    for text, told in (("3\n", "1 documents, and the run has taken down 2,"), ("3\n8\n", "has taken down 2, others,")):
        gone.write_text(text)
        with pytest.raises(ConfigError, match=rf"data\.changes\[0\]\.drop\.wiki \(the file .*gone\.txt\) .*{told}"):
            continue_data(build_datasets(in_file)[0], state, in_file)


def test_a_deleted_pair_is_not_opened_once_it_has_left_the_blend(tmp_path):
    code = str(tmp_path / "code")
    left = f'{{at = 16, blend = ["{code}"]}}'
    zero = "{at = 16, weights = [0, 1]}"
    back = f'{{at = 24, weights = [1, 1], blend = ["{tmp_path}/wiki", "{code}"]}}'
    configs = {
        name: changed(tmp_path, *some) for name, some in {"left": [left], "zero": [zero], "back": [left, back]}.items()
    }
    assert [configs[name].data.retired_prefixes for name in configs] == [(str(tmp_path / "wiki"),)] * 2 + [()]
    assert tiny_config(tmp_path, "data.weights=[0, 1]").data.retired_prefixes == ()
    write_pair(tmp_path / "held", 20, 3)
    split = changed(tmp_path, left, options=("eval.every=2",))
    held = changed(tmp_path, left, options=("eval.every=2", f'data.valid=["{tmp_path}/held"]', "data.split=98,2,0"))
    for end in ("idx", "bin"):
        Path(f"{tmp_path}/wiki.{end}").unlink()
    for name in ("left", "zero"):
        assert prefixes_to_open(configs[name]) == (code,)
        preflight(configs[name])
    with pytest.raises(Exception, match=r"wiki\.idx"):
        preflight(configs["back"])
    with pytest.raises(ConfigError, match=r"training reads it no more, and validation reads a part of it"):
        prefixes_to_open(split)
    assert prefixes_to_open(held) == (code, f"{tmp_path}/held")


def test_the_end_of_a_document_is_known_when_the_pair_that_told_it_was_deleted(tmp_path):
    code = str(tmp_path / "code")
    alone = (f"data.blend=['{tmp_path}/wiki']", "data.weights=[]")
    config = changed(tmp_path, f'{{at = 16, blend = ["{code}"]}}', options=alone)
    told = {"name": "bytes", "identity": {"class": "ByteTokenizer"}}
    (tmp_path / "code.json").write_text(json.dumps(told))
    assert prefixes_with_tokenizer(config.data) == config.data.blend, "as it was while the pair is there"
    for end in ("idx", "bin"):
        Path(f"{tmp_path}/wiki.{end}").unlink()
    assert prefixes_with_tokenizer(config.data) == (str(tmp_path / "wiki"), code)
