"""No command writes over or removes a file that it did not make in this run, or that is not provably its own."""

import json
from contextlib import ExitStack

import pytest
from gpt_helpers import tiny_config

from sixfold.gpt import TrainConfig, train
from sixfold.gpt.checkpoints import starting_point
from sixfold.gpt.commands import cli, demo
from sixfold.gpt.data import prepare as prepare_module
from sixfold.gpt.data.prepare import prepare
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.files.run_dir import check_run_dir, write_config
from sixfold.gpt.observe import timeline
from sixfold.gpt.observe.metrics import MetricsWriter
from sixfold.indexed_data import IndexedDataError
from sixfold.pipeline import Costs, one_f_one_b, simulate
from sixfold.pipeline.drawing.trace import write_trace


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("out", ["corpus", "./corpus", "sub/../corpus"])
@pytest.mark.parametrize("text", ['{"text": "hello"}\n{"text": "world"}\n', "not one object of JSON\n"])
def test_the_corpus_itself_is_never_written_over_nor_removed(tmp_path, monkeypatch, capsys, text, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "corpus.json").write_text(text)
    before = files_of(tmp_path)
    assert cli.main(["prepare", "corpus.json", "--out", out]) == 2
    assert files_of(tmp_path) == before
    said = capsys.readouterr().err
    assert "corpus.json" in said and "choose another --out" in said


def test_notes_that_have_the_name_of_the_pairs_note_stay(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "notes.json").write_text('{"dear": "diary"}')
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match=r"notes\.json"):
        prepare([tmp_path / "a.txt"], tmp_path / "notes")
    assert files_of(tmp_path) == before


def test_the_remedy_of_a_taken_name_works(tmp_path):
    (tmp_path / "corpus.json").write_text('{"text": "hello"}\n')
    with pytest.raises(ConfigError, match="choose another --out"):
        prepare([tmp_path / "corpus.json"], tmp_path / "corpus")
    assert prepare([tmp_path / "corpus.json"], tmp_path / "another").documents == 1


def test_a_note_that_a_killed_prepare_left_is_no_hindrance(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    prepare([tmp_path / "a.txt"], tmp_path / "p")
    for suffix in (".bin", ".idx"):  # killed before the pair appeared
        (tmp_path / f"p{suffix}").unlink()
    assert prepare([tmp_path / "a.txt"], tmp_path / "p").tokens == 6


def test_a_failed_prepare_leaves_the_note_that_was_there_before_it(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    prepare([tmp_path / "a.txt"], tmp_path / "p")
    note = (tmp_path / "p.json").read_bytes()
    for suffix in (".bin", ".idx"):
        (tmp_path / f"p{suffix}").unlink()
    (tmp_path / "bad.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(IndexedDataError):
        prepare([tmp_path / "bad.jsonl"], tmp_path / "p")
    assert (tmp_path / "p.json").read_bytes() == note


def test_a_note_that_appears_while_prepare_looks_is_not_written_over(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello")
    real = prepare_module.recorded_identity

    def slow(prefix):
        found = real(prefix)
        (tmp_path / "p.json").write_text("another program's")
        return found

    monkeypatch.setattr(prepare_module, "recorded_identity", slow)
    with pytest.raises(ConfigError, match=r"p\.json"):
        prepare([tmp_path / "a.txt"], tmp_path / "p")
    assert files_of(tmp_path)["p.json"] == b"another program's"


def test_the_demos_corpus_takes_no_file_of_another(tmp_path):
    (tmp_path / "cp-valid.json").write_text(json.dumps({"dear": "diary"}))
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match=r"cp-valid\.json"):
        prepare_module.prepare_cpython(tmp_path / "cp", CORPUS)
    assert files_of(tmp_path) == before, "nothing of the three pairs was made either"


CORPUS = prepare_module.Corpus(train={"topics": [b"topic"], "docstrings": [b"text"]}, valid=[b"valid"], sha256="0" * 64)


# ---- outputs of the other verbs


RUN = [{"kind": "start", "time": 1.0, "step": 0}, {"kind": "step", "time": 2.0, "step": 1, "tokens": 64, "loss": 3.0}]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
@pytest.mark.slow
def test_a_plot_replaces_its_own_picture_and_no_other(tmp_path, capsys, suffix):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra plot")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RUN))
    out = tmp_path / f"mine{suffix}"
    out.write_bytes(b"a drawing of mine, on which I sat with sixfold friends")
    words = ["plot", str(tmp_path), "--out", str(out)]
    assert cli.main(words) == 2
    assert out.read_bytes().startswith(b"a drawing of mine") and "choose another --out" in capsys.readouterr().err
    out.unlink()
    assert cli.main(words) == 0 and cli.main(words) == 0, "the second time over its own"


COSTS = Costs(forward=(1.0, 1.0), backward_input=(1.0, 1.0), backward_weight=(1.0, 1.0))


@pytest.mark.parametrize("suffix", [".svg", ".txt", ".json"])
def test_a_timeline_replaces_its_own_picture_and_no_other(tmp_path, suffix):
    program = one_f_one_b(ranks=2, microbatches=3)
    folder = timeline.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "step-00000007.txt").write_text(str(program))
    (folder / "step-00000007.json").write_text(write_trace({"measured": simulate(program, COSTS)}))
    out = tmp_path / f"mine{suffix}"
    out.write_text("{}")
    with pytest.raises(ConfigError, match=r"mine.* exists and nothing says that sixfold wrote it"):
        timeline.show(tmp_path, out)
    assert out.read_text() == "{}"
    out.unlink()
    timeline.show(tmp_path, out)
    first = out.read_bytes()
    timeline.show(tmp_path, out)
    assert out.read_bytes() == first
    if suffix == ".json":
        assert json.loads(first)["traceEvents"]


def test_doctor_refuses_anothers_file_before_it_measures(tmp_path, capsys):
    out = tmp_path / "package.json"
    out.write_text('{"name": "my-app"}')
    assert cli.main(["doctor", "--dir", str(tmp_path), "--out", str(out)]) == 2
    assert out.read_text() == '{"name": "my-app"}' and "doctor did not write it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", "[model]\nnum_layers = 2\n"),
        ("config.toml", "not toml at all ["),
        ("metrics.jsonl", '{"loss": 1}\n'),
    ],
)
def test_a_run_takes_no_folder_whose_files_no_run_wrote(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"no run wrote the {name}"):
        check_run_dir(str(tmp_path))
    assert (tmp_path / name).read_text() == text


def test_a_run_takes_its_own_folder_also_when_it_ended_before_its_first_line(tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(config.to_toml())
    check_run_dir(str(tmp_path / "run"))
    for first in ("", '{"ki', '{"kind": "start", "st', '{"kind": "start", "step": 0}\n'):
        (tmp_path / "run/metrics.jsonl").write_text(first)
        check_run_dir(str(tmp_path / "run"))


def test_a_config_of_the_users_own_in_the_folder_of_a_run_stays_as_it_was_written(tmp_path, capsys):
    """A run folder that an import made has a config.toml to complete; overrides of one start are not for the next."""
    config = tiny_config(tmp_path, "train.steps=7")
    run, text = tmp_path / "run", config.to_toml()
    own = (tmp_path / "tiny.toml").read_text()
    only_model, rest = text.split("\n\n", 1)
    tables = [table for table in rest.split("\n\n") if table.startswith(("[data]", "[train]", "[optimizer]", "[run]"))]
    for mine in (own, "# mine\n" + text, "\n\n".join([only_model, *tables]) + "\n", text.replace("0.003", "3e-3")):
        run.mkdir(exist_ok=True)
        (run / "config.toml").write_text(mine)
        write_config(config)
        assert (run / "config.toml").read_text() == mine
        assert TrainConfig.from_toml(run / "config.resolved.toml") == config
        assert "config.toml is not as a run writes it, and stays" in capsys.readouterr().err
    for ours in (only_model + "\n", text, tiny_config(tmp_path).to_toml()):  # of an import, and of runs
        (run / "config.toml").write_text(ours)
        write_config(config)
        assert (run / "config.toml").read_text() == text
        assert not capsys.readouterr().err


def test_a_start_that_is_refused_because_another_came_first_leaves_the_configuration_of_that_one(tmp_path, monkeypatch):
    """Both saw an empty folder; the other was the first to hold it."""
    other, mine = (tiny_config(tmp_path, f"optimizer.lr={lr}") for lr in (1e-3, 5e-3))
    run = tmp_path / "run"

    def look(*arguments, **options):
        check_run_dir(*arguments, **options)
        opened.enter_context(MetricsWriter(run / "metrics.jsonl"))
        write_config(other)

    monkeypatch.setattr(starting_point, "check_run_dir", look)
    with ExitStack() as opened, pytest.raises(ConfigError, match="another run is at work there"):
        train(mine)
    assert TrainConfig.from_toml(run / "config.toml") == other
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "metrics.jsonl"]


def test_a_demo_removes_nothing_that_no_demo_made(tmp_path):
    demo._clear(tmp_path / "out")
    (tmp_path / "out/data").mkdir()
    (tmp_path / "out/data/cpython-topics.bin").touch()
    (tmp_path / "out/data/thesis.jsonl").write_text("years of work")
    with pytest.raises(ConfigError, match=r"files that no demo wrote, as .*thesis\.jsonl"):
        demo._clear(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out/data").iterdir()} == {"cpython-topics.bin", "thesis.jsonl"}
    (tmp_path / "own").mkdir()
    (tmp_path / "own/demo.toml").write_text("[model]\n")
    (tmp_path / "own/run").mkdir()
    with pytest.raises(ConfigError, match="holds files that no demo wrote"):
        demo._clear(tmp_path / "own")
