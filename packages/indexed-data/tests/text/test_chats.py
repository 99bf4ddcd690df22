"""Conversations by chat templates: the ids that transformers gives, and a mask of what the assistant says."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from sixfold.indexed_data import IndexedDataError, IndexedDataset, build, verify
from sixfold.indexed_data.text.build import BuildNote
from sixfold.indexed_data.text.chat_templates import chat_encoder

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's way: what was said before the last turn is written otherwise than in its own turn.
CHANGING = "{% for message in messages %}{{ '' if loop.last else 'old ' }}{{ message.content }}<|im_end|>{% endfor %}"
CHATS = [
    [("system", "be short"), ("user", "what is a cat"), ("assistant", "an animal")],
    [("user", "and a dog"), ("assistant", "another one"), ("user", "thanks"), ("assistant", "welcome")],
    [("user", "no answer to this")],
    [("assistant", "hello"), ("user", "hello to you")],
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_chats("chats.jsonl", CHATS)
    return tmp_path


def write_chats(name, chats):
    rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def tokenizer(folder):
    transformers = pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|im_start|>", "<|im_end|>", "<eod>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator([content for chat in CHATS for _, content in chat], trainer)

    def save(template, eos="<eod>", trim_offsets=None):
        if trim_offsets is not None:
            bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)
        made = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bpe, eos_token=eos, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
        )
        made.chat_template = template
        made.save_pretrained("model")
        return bpe

    return save


def expected(bpe, chat, marked, ends_with_eod):
    """(ids, mask) piece by piece, by the letters of the template: special tokens end every piece."""
    ids, mask = [], []

    def add(piece, counts):
        found = bpe.encode(piece, add_special_tokens=False).ids
        ids.extend(found)
        mask.extend([counts] * len(found))

    for role, content in chat:
        says = role == "assistant"
        add(f"<|im_start|>{role}\n", False)
        add(content, says)
        add("<|im_end|>", says)
        add("\n", says and not marked)  # a marked template says where the answer ends
    if ends_with_eod:
        mask.append(mask[-1])
        ids.append(2)
    return ids, mask


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_a_conversation_has_the_ids_of_its_template_and_counts_what_the_assistant_says(
    folder, tokenizer, template, workers
):
    bpe = tokenizer(template)
    build(["chats.jsonl"], "out", tokenizer="model", messages_key="messages", workers=workers, part_bytes=200)
    data = IndexedDataset("out")
    assert len(data) == len(CHATS)
    for number, chat in enumerate(CHATS):
        ids, mask = expected(bpe, chat, template == MARKED, ends_with_eod=True)
        assert data[number].tolist() == ids
        assert data.loss_mask(number).tolist() == mask
    assert verify("out").ok


def test_ids_equal_those_of_transformers(folder, tokenizer):
    transformers = pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    tokenizer(MARKED)
    build(["chats.jsonl"], "out", tokenizer="model", messages_key="messages", append_eod=False)
    theirs = transformers.AutoTokenizer.from_pretrained("model")
    for number, chat in enumerate(CHATS):
        messages = [{"role": role, "content": content} for role, content in chat]
        made = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert IndexedDataset("out")[number].tolist() == made["input_ids"]
        assert IndexedDataset("out").loss_mask(number).tolist() == [bool(each) for each in made["assistant_masks"]]


BLANKS = {
    "an end": [("user", "what"), ("assistant", "an answer "), ("user", "secret"), ("assistant", "bye")],
    "a beginning": [("user", "what"), ("assistant", " an answer"), ("user", "secret"), ("assistant", "bye")],
    "a later one": [("user", "what"), ("assistant", "an answer"), ("user", "secret"), ("assistant", "\tbye")],
    "nothing else": [("user", "what"), ("assistant", " "), ("user", "secret"), ("assistant", "bye\n")],
}


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("where", BLANKS)
def test_marked_answers_with_blanks_at_their_edges_count_and_nothing_else_does(folder, tokenizer, where, trim_offsets):
    """With ``trim_offsets``, as in Pythia's files, transformers' own mask has the user's turns or lacks answers."""
    bpe = tokenizer(MARKED, trim_offsets=trim_offsets)
    write_chats("chats.jsonl", [BLANKS[where]])
    build(["chats.jsonl"], "out", tokenizer="model", messages_key="messages")
    ids, mask = expected(bpe, BLANKS[where], marked=True, ends_with_eod=True)
    assert IndexedDataset("out")[0].tolist() == ids
    assert IndexedDataset("out").loss_mask(0).tolist() == mask


def test_marked_answers_of_a_tokenizer_that_drops_blanks_count_up_to_their_end(folder, tokenizer):
    transformers = pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eod>": 0, "a": 1, "b": 2, "c": 3, "?": 4}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eod>")
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n{{ m.content }}\n{% endgeneration %}"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    made.save_pretrained("words")
    write_chats("chats.jsonl", [[("user", "a b"), ("assistant", " c a "), ("user", "b"), ("assistant", "a")]])
    build(["chats.jsonl"], "out", tokenizer="words", messages_key="messages", append_eod=False)
    assert IndexedDataset("out")[0].tolist() == [1, 2, 3, 1, 2, 1]
    assert IndexedDataset("out").loss_mask(0).tolist() == [False, False, True, True, False, True]


def test_a_conversation_that_its_template_refuses_is_a_bad_line(folder, tokenizer):
    tokenizer("{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + PLAIN)
    with pytest.raises(IndexedDataError, match=r"chats\.jsonl:1: .*the user begins"):
        build(["chats.jsonl"], "out", tokenizer="model", messages_key="messages")
    report = build(["chats.jsonl"], "out", tokenizer="model", messages_key="messages", on_error="skip")
    assert (report.documents, report.bad_lines) == (2, 2)


def test_what_is_wrong_with_every_conversation_ends_the_build_also_where_bad_lines_are_skipped(folder, monkeypatch):
    """A tokenizer without tokenizer.json does not know where its tokens lie."""
    transformers = pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    encode = chat_encoder("model")
    slow = SimpleNamespace(chat_template=MARKED)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: slow)
    own = SimpleNamespace(vocab_size=9, eod=8, encode=list, encode_chat=encode)
    monkeypatch.setitem(sys.modules, "slow", SimpleNamespace(__name__="slow", make=lambda: own))
    with pytest.raises(IndexedDataError, match=r"chats\.jsonl:1: .*model has no tokenizer\.json.*generation"):
        build(["chats.jsonl"], "out", tokenizer="slow:make", messages_key="messages", on_error="skip")


def test_a_template_that_rewrites_earlier_turns_is_refused_with_what_to_do(folder, tokenizer):
    tokenizer(CHANGING)
    with pytest.raises(IndexedDataError, match=r"chats\.jsonl:1: .*the turns before message 2.*\{% generation %\}"):
        build(["chats.jsonl"], "out", tokenizer="model", messages_key="messages")


def test_a_message_that_spells_a_special_token_is_refused_or_taken_as_asked(folder, tokenizer):
    bpe = tokenizer(PLAIN)
    write_chats("bad.jsonl", [[("user", "stop <|im_end|> now"), ("assistant", "no")]])
    with pytest.raises(IndexedDataError, match=r"bad\.jsonl:1: a message spells the special token <\|im_end\|>"):
        build(["bad.jsonl"], "out", tokenizer="model", messages_key="messages")
    build(["bad.jsonl"], "out", tokenizer="model", messages_key="messages", special_tokens="ids")
    assert IndexedDataset("out")[0].tolist().count(bpe.token_to_id("<|im_end|>")) == 3


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_a_template_that_ends_turns_with_the_eod_is_refused_or_taken_without_another_end(folder, tokenizer, template):
    bpe = tokenizer(template, eos="<|im_end|>")
    options = {"tokenizer": "model", "messages_key": "messages"}
    with pytest.raises(IndexedDataError, match=r"chats\.jsonl:1: .*ends turns with the EOD .*--eod-token.*the eod -1"):
        build(["chats.jsonl"], "out", on_error="skip", **options)
    with pytest.warns(BuildNote, match="documents contain the EOD"):
        build(["chats.jsonl"], "bare", append_eod=False, **options)
    build(["chats.jsonl"], "other", eod_token="<eod>", **options)
    for number, chat in enumerate(CHATS):
        ids, _ = expected(bpe, chat, False, ends_with_eod=False)
        assert IndexedDataset("bare")[number].tolist() == ids
        assert IndexedDataset("other")[number].tolist() == [*ids, bpe.token_to_id("<eod>")]


def test_conversations_of_which_nothing_counts_are_told(folder, tokenizer):
    tokenizer(PLAIN)
    write_chats("roles.jsonl", [[("Assistant", "x"), ("gpt", "y")], [("user", "x"), ("assistant", "y")]])
    with pytest.warns(BuildNote, match="1 conversations have no token that counts"):
        build(["roles.jsonl"], "out", tokenizer="model", messages_key="messages")


def test_a_bos_before_a_leading_answer_is_not_said_by_it(folder, tokenizer):
    transformers = pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    tokenizer("{{ bos_token }}" + PLAIN)
    model = transformers.AutoTokenizer.from_pretrained("model")
    model.bos_token = "<|im_start|>"
    model.save_pretrained("model")
    write_chats("first.jsonl", [[("assistant", "hello"), ("user", "x"), ("assistant", "y")]])
    build(["first.jsonl"], "out", tokenizer="model", messages_key="messages")
    data = IndexedDataset("out")
    says = [i for i, counts in zip(data[0].tolist(), data.loss_mask(0), strict=True) if counts]
    assert model.decode(says[:-1]) == "hello<|im_end|>\ny<|im_end|>\n"


TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}"
    "{% endif %}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
TOOL = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
CALLING = [
    {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now"}]},
    {"role": "assistant", "content": None, "tool_calls": CALL},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "it is 42"},
]


@pytest.mark.parametrize("tools", [None, [], TOOL, json.dumps(TOOL)], ids=["none", "empty", "list", "text"])
def test_tools_calls_and_parts_reach_the_template(folder, tokenizer, tools):
    transformers = pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    tokenizer(TOOLS)
    Path("calls.jsonl").write_text(json.dumps({"messages": CALLING, "tools": tools}) + "\n")
    build(["calls.jsonl"], "out", tokenizer="model", messages_key="messages", append_eod=False)
    theirs = transformers.AutoTokenizer.from_pretrained("model")
    made = theirs.apply_chat_template(CALLING, tools=TOOL if tools else None, return_dict=True)["input_ids"]
    data = IndexedDataset("out")
    assert data[0].tolist() == made
    assert ("tools" in theirs.decode(made)) == bool(tools)
    says = theirs.decode([i for i, counts in zip(made, data.loss_mask(0), strict=True) if counts])
    assert says == json.dumps(CALL[0]) + "<|im_end|>\nit is 42<|im_end|>\n"


def test_content_that_the_template_does_not_write_as_text_is_refused(folder, tokenizer):
    tokenizer(PLAIN)
    options = {"tokenizer": "model", "messages_key": "messages"}
    Path("parts.jsonl").write_text(json.dumps({"messages": CALLING[:1]}) + "\n")
    with pytest.raises(IndexedDataError, match=r"parts\.jsonl:1: .*content of message 0 is a list of parts, which"):
        build(["parts.jsonl"], "out", **options)
    write_chats("empty.jsonl", [[("assistant", "")]])
    build(["empty.jsonl"], "empty", **options)
    Path("null.jsonl").write_text(json.dumps({"messages": CALLING[1:2]}) + "\n")
    with suppress(IndexedDataError):  # transformers 5.23 gives templates an empty text for null; older ones "None"
        build(["null.jsonl"], "null", **options)
        assert IndexedDataset("null")[0].tolist() == IndexedDataset("empty")[0].tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "<|im_end|>", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": "<|im_end|>"}]},
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "a <|im_end|>"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"f": {"<|im_end|>": 1}}]}]},
        {"messages": CALLING, "tools": [{"name": "<|im_end|>"}]},
    ],
    ids=["role", "name", "reasoning", "part", "argument", "tool"],
)
def test_special_tokens_are_found_in_all_that_reaches_the_template(folder, tokenizer, row):
    tokenizer(TOOLS)
    Path("bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(IndexedDataError, match=r"bad\.jsonl:1: a message spells the special token <\|im_end\|>"):
        build(["bad.jsonl"], "out", tokenizer="model", messages_key="messages")


def test_a_table_with_a_column_of_tools_is_refused(folder, tokenizer):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra sixfold-indexed-data[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra sixfold-indexed-data[parquet]")
    tokenizer(TOOLS)
    table = arrow.table({"messages": [[{"role": "user", "content": "x"}]], "tools": ["[]"]})
    parquet.write_table(table, "a.parquet")
    with pytest.raises(IndexedDataError, match=r"a\.parquet: has a column 'tools'"):
        build(["a.parquet"], "out", tokenizer="model", messages_key="messages")


LINES = {
    "no list": ('{"messages": "hello"}', r"no list of messages at 'messages'"),
    "no key": ('{"text": "hello"}', r"no list of messages at 'messages'"),
    "no role": ('{"messages": [{"content": "x"}]}', r"message 0 at 'messages' has no role or no content"),
    "no text": ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', r"has no role or no content"),
    "null": ('{"messages": [{"role": "user", "content": null}]}', r"has no role or no content"),
    "tools": ('{"messages": [{"role": "user", "content": "x"}], "tools": {"f": 1}}', r"no list of tools at 'tools'"),
    "tools as text": ('{"messages": [{"role": "user", "content": "x"}], "tools": "f"}', r"no list of tools at 'tools'"),
}


@pytest.mark.parametrize("what", LINES)
def test_what_is_no_conversation_is_a_bad_line(folder, tokenizer, what):
    tokenizer(PLAIN)
    line, reason = LINES[what]
    Path("bad.jsonl").write_text(line + "\n")
    with pytest.raises(IndexedDataError, match=rf"bad\.jsonl:1: .*{reason}"):
        build(["bad.jsonl"], "out", tokenizer="model", messages_key="messages")


def test_conversations_need_a_template_and_keys(folder, tokenizer):
    with pytest.raises(IndexedDataError, match="tokenizer bytes has no chat template"):
        build(["chats.jsonl"], "out", messages_key="messages")
    tokenizer(None)
    with pytest.raises(IndexedDataError, match="tokenizer model has no chat template"):
        build(["chats.jsonl"], "out", tokenizer="model", messages_key="messages")
    tokenizer(PLAIN)
    Path("a.txt").write_text("text")
    with pytest.raises(IndexedDataError, match=r"a\.txt: messages_key is given, and a text file has no keys"):
        build(["a.txt"], "out", tokenizer="model", messages_key="messages")
    assert not [name for name in os.listdir() if name.startswith("out")]


def test_conversations_of_a_table_are_those_of_its_rows(folder, tokenizer):
    arrow = pytest.importorskip("pyarrow", reason="needs the extra sixfold-indexed-data[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra sixfold-indexed-data[parquet]")
    tokenizer(MARKED)
    rows = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    parquet.write_table(arrow.table({"messages": rows}), "a.parquet", row_group_size=2)
    build(["a.parquet"], "table", tokenizer="model", messages_key="messages")
    build(["chats.jsonl"], "lines", tokenizer="model", messages_key="messages")
    for ending in (".bin", ".idx", ".mask"):
        assert Path(f"table{ending}").read_bytes() == Path(f"lines{ending}").read_bytes()


OWN = """
class Own:
    vocab_size, eod = 300, 299

    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages):
        ids = [byte for message in messages for byte in message["content"].encode()]
        mask = [message["role"] == "assistant" for message in messages for _ in message["content"].encode()]
        return ids, mask{cut}


def make():
    return Own()
"""


def test_your_own_tokenizer_encodes_conversations_too(folder):
    Path("own_chat.py").write_text(OWN.format(cut=""))
    build(["chats.jsonl"], "out", tokenizer="own_chat:make", messages_key="messages")
    data = IndexedDataset("out")
    for number, chat in enumerate(CHATS):
        assert bytes(data[number][:-1].tolist()).decode() == "".join(content for _, content in chat)
        mask = [role == "assistant" for role, content in chat for _ in content]
        assert data.loss_mask(number).tolist() == [*mask, mask[-1]]
    Path("cut_chat.py").write_text(OWN.format(cut="[:-1]"))
    with pytest.raises(IndexedDataError, match=r"chats\.jsonl:1: .*encode_chat gave 29 values of a mask for 30 ids"):
        build(["chats.jsonl"], "out2", tokenizer="cut_chat:make", messages_key="messages")


def test_a_killed_build_of_conversations_goes_on_from_its_parts(folder):
    Path("own_chat2.py").write_text(OWN.format(cut=""))
    options = {"tokenizer": "own_chat2:make", "messages_key": "messages", "part_bytes": 100}
    write_chats("many.jsonl", CHATS * 20)
    build(["many.jsonl"], "whole", **options)

    def stop(done, total):
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(["many.jsonl"], "out", progress=stop, **options)
    assert [name for name in os.listdir("out.building") if name.endswith(".mask")]
    build(["many.jsonl"], "out", **options)
    for ending in (".bin", ".idx", ".mask"):
        assert Path(f"out{ending}").read_bytes() == Path(f"whole{ending}").read_bytes()
