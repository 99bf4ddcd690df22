"""`sixfold eval` against lm-eval's own model of transformers, on the folder that `sixfold export` writes."""

import builtins
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from model_helpers import scaled, small

from sixfold.gpt.commands import cli
from sixfold.gpt.commands.evaluate import evaluate, table
from sixfold.gpt.commands.harness_model import HarnessModel
from sixfold.gpt.commands.sample import Opened
from sixfold.gpt.commands.score import nats_per_byte
from sixfold.gpt.data.tokenizer import ByteTokenizer
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import GPTModel

HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HARNESS, reason="needs lm-eval, the extra eval")
TEXTS = ["the quick brown fox jumps over the lazy dog", "a fox is no dog", "dogs jump, and foxes are quick; " * 6]
QUESTIONS = [
    {"question": "the quick brown", "choices": [" fox", " dog", " lazy over"], "answer": 0, "text": TEXTS[0]},
    {"question": "a fox is ", "choices": ["no dog", "quick"], "answer": 1, "text": TEXTS[1]},
    {"question": TEXTS[2], "choices": ["jumps over", "a"], "answer": 0, "text": TEXTS[2]},
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: [" the", "x"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.json").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, text in TASKS.items():
        common = (
            f"task: local_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.json}}}}\n"
        )
        (folder / f"{name}.yaml").write_text(f"{common}test_split: test\nvalidation_split: null\n{text}")
    return folder


def write_model(folder, case="llama", template=False):
    """A Hugging Face folder with a byte-level BPE, a run that is an import of it, and what that exports."""
    library = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    from hf_helpers import write_folder

    from sixfold.gpt.huggingface.convert import export_model, import_model

    made = library.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<s>", "</s>"])
    if template:
        processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        made._tokenizer.post_processor = processor
    write_folder(folder / "hf", case, vocab_size=300, max_position_embeddings=64)
    bos = {"bos_token": "<s>"} if template else {}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token="</s>", pad_token="</s>", **bos
    )
    fast.save_pretrained(folder / "hf")
    import_model(folder / "hf", folder / "run")
    export_model(folder / "run", folder / "export")
    return folder / "run", folder / "export"


def asked(*args):
    return [SimpleNamespace(args=one) for one in args]


def peer_of(export):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(export), device="cpu", batch_size=2, dtype="float32", max_length=64)


PAIRS = [("the quick brown", " fox"), ("", "the lazy dog"), ("a fox is ", "no dog"), ("dog", " jumps over the lazy"),
         (TEXTS[2], " and quick"), ("the quick brown", " dog is no fox")]  # fmt: skip


@needs_harness
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "template"), [("llama", False), ("llama", True), ("mistral", False), ("gemma2", False)]
)
def test_requests_have_the_answers_of_lm_evals_own_model_of_transformers(tmp_path, case, template):
    from sixfold.gpt.commands.harness_model import harness_model
    from sixfold.gpt.commands.sample import open_run

    run, export = write_model(tmp_path, case, template)
    ours, theirs = harness_model(open_run(run), batch=4), peer_of(export)
    found, expected = (one.loglikelihood(asked(*PAIRS), disable_tqdm=True) for one in (ours, theirs))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-5, rel=1e-6)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    texts = [(text,) for text in (*TEXTS, "a")]
    found, expected = (one.loglikelihood_rolling(asked(*texts), disable_tqdm=True) for one in (ours, theirs))
    assert found == pytest.approx(expected, abs=1e-5, rel=1e-6)
    for kwargs in (
        {"until": [" the", "x"], "max_gen_toks": 12},
        {"until": "o", "max_gen_toks": 30, "do_sample": False},
    ):
        requests = [(context, dict(kwargs)) for context in ("the quick brown", "a fox is", TEXTS[2], "dog")]
        found, expected = (one.generate_until(asked(*requests), disable_tqdm=True) for one in (ours, theirs))
        assert found == expected
    assert any(found)


@needs_harness
@pytest.mark.slow
def test_the_results_of_tasks_are_those_of_the_peer_and_lie_in_the_run(tmp_path, tasks, capsys):
    import lm_eval
    from lm_eval.tasks import TaskManager

    run, export = write_model(tmp_path)
    names = [f"local_{name}" for name in TASKS]
    theirs = lm_eval.simple_evaluate(
        model=peer_of(export), tasks=names, bootstrap_iters=10, log_samples=False,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]  # fmt: skip
    words = ["--tasks", ",".join(names), "--include", str(tasks)]
    for path in (run, export):
        capsys.readouterr()
        assert cli.main(["eval", str(path), *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert set(found["results"]) == set(names)
        for name in names:
            for key, value in theirs[name].items():
                if "stderr" not in key and isinstance(value, float):
                    assert found["results"][name][key] == pytest.approx(value, rel=1e-5), (name, key)
    assert found["file"] is None, "an export is no run"
    assert cli.main(["eval", str(run), *words, "--limit", "1"]) == 0
    said = capsys.readouterr().out
    assert "local_rolling" in said and "bits_per_byte" in said and "lm-eval-step-00000000-2.json" in said
    files = sorted(path.name for path in run.glob("lm-eval-*"))
    assert files == ["lm-eval-step-00000000-2.json", "lm-eval-step-00000000.json"]
    first = json.loads((run / "lm-eval-step-00000000.json").read_text())
    assert first["limit"] is None and first["lm_eval"] == lm_eval.__version__ and first["checkpoint"] == "step-00000000"
    with pytest.raises(ConfigError, match="device is 'gpu', which this machine does not have"):
        evaluate(run, ["local_choices"], include_path=tasks, device="gpu")
    with pytest.raises(ConfigError, match="tasks no_such_task are neither"):
        evaluate(run, ["local_choices", "no_such_task"], include_path=tasks)


def of_bytes(*, document_mask, context=16):
    """A model of bytes, without the harness."""
    model = scaled(GPTModel(small(vocab_size=257)).eval(), 4.0)
    run = Opened(model=model, context=context, tokenizer=ByteTokenizer(), document_mask=document_mask)
    return HarnessModel(run, 3)


@pytest.mark.parametrize("mask", [True, False])
def test_likelihoods_are_those_of_the_score_of_a_document(mask):
    model, text = of_bytes(document_mask=mask, context=64), b"the quick brown fox"
    ids = [256, *text, 256]
    nats = nats_per_byte(model.run.model, torch.tensor(ids).numpy(), seq_length=64, eod=256, document_mask=mask)
    pairs = [(None, [256], [*text, 256]), (None, [256], list(text[:3])), (None, [256, *text[:3]], [*text[3:], 256])]
    whole, begin, rest = (value for value, _ in model._loglikelihood_tokens(pairs))
    assert whole == pytest.approx(-nats * len(text), rel=1e-5)
    assert begin + rest == pytest.approx(whole, rel=1e-5)


def test_a_text_without_a_context_begins_as_the_model_was_trained():
    likelihoods = [
        of_bytes(document_mask=mask)._loglikelihood_tokens([(None, [256], [97, 98])])[0][0] for mask in (True, False)
    ]
    assert likelihoods[0] != pytest.approx(likelihoods[1], rel=1e-4), (
        "the end of a document is seen by what follows, or not"
    )


def test_greedy_continuations_are_known_as_such_and_answers_are_those_of_sample():
    from sixfold.gpt.commands.sample import sample

    model = of_bytes(document_mask=True, context=40)
    expected = [sample(model.run.model, ByteTokenizer(), text, tokens=9, temperature=0) for text in ("ab", "c", "")]
    answers = model.generate_until(asked(*((text, {"until": [], "max_gen_toks": 9}) for text in ("ab", "c", ""))))
    assert answers == expected
    longest = model.generate_until(
        asked(("ab", {"until": expected[0][3], "max_gen_toks": 9}), ("c", {"max_gen_toks": 4}))
    )
    assert longest == [expected[0].split(expected[0][3])[0], expected[1][:4]]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (("a", {"max_gen_toks": 40}), "answers of 40 tokens, and the model's context is 16"),
        (("a", {"num_beams": 4, "max_gen_toks": 4}), "asks for num_beams"),
    ],
)
def test_an_answer_that_cannot_be_given_is_refused(request_, words):
    with pytest.raises(ConfigError, match=words):
        of_bytes(document_mask=True).generate_until(asked(request_))


def test_a_continuation_longer_than_the_context_is_refused():
    with pytest.raises(ConfigError, match="asks for 17 tokens behind a context, and the model takes 16"):
        of_bytes(document_mask=True)._loglikelihood_tokens([(None, [256], [1] * 17)])


def test_without_lm_eval_the_extra_is_named(tmp_path, monkeypatch, capsys):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("lm_eval"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["eval", str(tmp_path), "--tasks", "arc_easy"]) == 2
    assert "pip install 'sixfold-gpt[eval]'" in capsys.readouterr().err


def test_a_table_has_a_line_for_each_metric():
    found = {
        "results": {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.25, "f1,strict": 1, "name": "t"}},
        "n-shot": {"t": 2},
    }
    assert table(found).splitlines() == [
        "task  metric       value   stderr  shots",
        "t     acc          0.5000  0.2500  2",
        "t     f1 (strict)  1.0000          2",
    ]
