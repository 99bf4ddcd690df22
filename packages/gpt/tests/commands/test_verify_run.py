"""`sixfold verify-run`: made-up records with one difference each, and the checkpoints of a real tiny run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import run

from sixfold import dist_ckpt
from sixfold.gpt.commands.cli import main
from sixfold.gpt.config.train_config import RunConfig
from sixfold.gpt.observe.digest_file import DigestWriter
from sixfold.gpt.observe.metrics import FIELDS, MetricsWriter
from sixfold.gpt.observe.run_comparison import in_order, spans

NAMES = ("embedding.weight", "layers.2.attention.q.weight", "layers.10.attention.q.weight", "norm.weight")


class MadeUp:
    """Writes a run's files as a run does, each number a function of its step."""

    def __init__(self, folder: Path, name: str, config: str = "[parallel]\ndp = 1\n") -> None:
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "config.toml").write_text(config)
        self.metrics = MetricsWriter(self.folder / "metrics.jsonl")
        self.digests = DigestWriter(self.folder / "digests.jsonl")

    def note(self, kind, **fields):
        self.metrics.write(kind, **dict.fromkeys(FIELDS[kind]) | fields)

    def start(self, step=0, resumed=False, **layout):
        layout = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "ep": 1} | layout
        self.note("start", step=step, world=layout["dp"], layout=layout, versions={"torch": "2.13"})
        if resumed:
            self.note("resume", step=step, checkpoint="there", layout=layout, changed={})
        return self

    def step(self, step, **other):
        fields = {
            "loss": 3.0 / step, "grad_norm": 1.0 / (step + 1), "lr": 1e-3, "tokens": 256 * step, "samples": 8 * step,
            "batch_size": 8, "seconds": 0.1, "loss_by_dataset": {"wiki": 3.0 / step},
        }  # fmt: skip
        self.note("step", step=step, **fields | other)
        return self

    def digest(self, step, whole=None, **other):
        tensors = {name: f"{step:030d}{number:02d}" for number, name in enumerate(NAMES)} | other
        whole = whole or ("".join(other.values()) or f"{step}")
        self.digests.write(step, whole, tensors)
        self.note("digest", step=step, digest=whole, seconds=0.01)
        return self

    def steps(self, first, last, every=1):
        for step in range(first, last + 1):
            self.step(step)
            if step % every == 0:
                self.digest(step)
        return self


def verify(capsys, a, b, *options):
    """(Exit status, report)"""
    folders = [str(one.folder if isinstance(one, MadeUp) else one) for one in (a, b)]
    status = main(["verify-run", *folders, "--json", *options])
    out = capsys.readouterr()
    return status, json.loads(out.out) if status < 2 else out.err


@pytest.fixture
def two(tmp_path):
    return MadeUp(tmp_path, "a").start().digest(0), MadeUp(tmp_path, "b").start().digest(0)


def test_runs_of_the_same_numbers_agree(two, capsys):
    for one in two:
        one.steps(1, 4)
    status, found = verify(capsys, *two)
    assert (status, found["equal"], found["first"], found["agree_to"]) == (0, True, None, 4)
    assert found["verdict"] == "The runs agree in all that both have: metrics of steps 1-4; digests of steps 0-4."


NEXT = 1 + 2**-52  # one unit in the last place


@pytest.mark.parametrize(
    ("other", "what", "words"),
    [
        (
            {"loss": 1.0 * NEXT},
            "loss",
            "Weights of step 2 have the same bits: the data or the forward of step 3 differ",
        ),
        ({"grad_norm": 0.25 * NEXT}, "grad_norm", "the backward or the sum of gradients differs"),
        ({"lr": 2e-3}, "lr", "The runs do not do the same"),
        ({"tokens": 769}, "tokens", "The runs do not do the same"),
        ({"loss": None}, "loss", "At step 3 loss first differs"),
        ({"loss_by_dataset": {"wiki": 1.5}}, "loss of wiki", "At step 3 loss of wiki first differs"),
    ],
)
def test_the_first_scalar_that_differs_in_a_bit_is_named(two, capsys, other, what, words):
    two[0].steps(1, 5)
    two[1].steps(1, 2).step(3, **other).digest(3, norm="x" * 32).steps(4, 5)
    status, found = verify(capsys, *two)
    assert (status, found["first"], found["agree_to"]) == (1, {"step": 3, "what": what}, 2)
    assert words in found["verdict"], found["verdict"]
    [scalar] = [one for one in found["scalars"] if not one["same"]]
    assert scalar["name"] == what and scalar["a_bits"] != scalar["b_bits"]
    if what == "grad_norm":
        assert (scalar["a_bits"], scalar["b_bits"]) == ("0x1.0000000000000p-2", "0x1.0000000000001p-2")
    assert "No key explains it" in found["verdict"]


def test_tensors_whose_digests_differ_are_named_in_the_models_order(two, capsys):
    two[0].steps(1, 5)
    two[1].steps(1, 2).step(3).digest(3, **{NAMES[2]: "x" * 32, NAMES[1]: "y" * 32}).step(4, loss=9.0).digest(
        4, "other"
    )
    status, found = verify(capsys, *two)
    assert (status, found["first"]) == (1, {"step": 3, "what": "weights"})
    assert [one["name"] for one in found["tensors"]] == [NAMES[1], NAMES[2]] and found["tensors_of"] == 4
    assert found["verdict"].startswith(
        "The runs agree to step 2. At step 3 weights first differ: layers.2.attention.q.weight and 1 more. Then: loss "
        "from step 4. Loss and gradient norm of step 3 have the same bits: gradients or the optimizer's step differ."
    )


def test_other_cadences_are_compared_where_both_have_a_step(two, capsys):
    two[0].steps(1, 10, every=2)
    two[1].steps(1, 6, every=3)
    status, found = verify(capsys, *two)
    assert (status, found["steps"]["metrics"], found["steps"]["digests"]) == (0, [1, 2, 3, 4, 5, 6], [0, 6])
    two[0].step(7)
    two[1].step(7, loss=0.5)
    status, found = verify(capsys, *two)
    assert found["first"] == {"step": 7, "what": "loss"}, "a step behind the last digest of both"
    two[0].step(8)
    two[1].step(8, loss=0.5)
    assert "no digest of step" not in verify(capsys, *two)[1]["verdict"], "step 6 has one"


def test_without_a_digest_of_the_step_before_nothing_is_said_of_weights(two, capsys):
    for one in two:
        one.steps(1, 4, every=9)
    two[0].step(5)
    two[1].step(5, loss=0.5)
    assert "Weights may differ before: no digest of step 4 is in both" in verify(capsys, *two)[1]["verdict"]


def test_initial_weights_that_differ_are_told_as_that(tmp_path, capsys):
    a = MadeUp(tmp_path, "a").start().digest(0).step(1)
    b = MadeUp(tmp_path, "b").start().digest(0, norm="x" * 32).step(1)
    found = verify(capsys, a, b)[1]
    assert found["verdict"].startswith("The runs differ from the first step on. At step 0 weights first differ")
    assert "They begin with different weights" in found["verdict"]


def test_an_evaluation_that_differs_stands_behind_the_weights(two, capsys):
    for one, loss in zip(two, (1.0, 1.0 * NEXT), strict=True):
        one.steps(1, 2)
        one.note("eval", step=2, name="", loss=loss, tokens=64.0, seconds=0.1)
    found = verify(capsys, *two)[1]
    assert found["first"] == {"step": 2, "what": "validation loss"}
    assert "Training has the same bits so far" in found["verdict"]


def test_of_a_step_that_was_done_again_the_last_counts_and_the_attempts_are_compared(tmp_path, capsys):
    a = MadeUp(tmp_path, "a").start().steps(1, 6)
    b = MadeUp(tmp_path, "b").start().steps(1, 4).step(5, loss=7.0)
    b.start(4, resumed=True, dp=2).digest(4).steps(5, 6)
    status, found = verify(capsys, a, b)
    assert (status, found["equal"]) == (0, True)
    assert found["repeated"] == [
        {"run": "B", "attempt": 2, "steps": [4, 5], "equal": False, "first": {"step": 5, "what": "loss"}}
    ]
    assert [(one["start"], one["resumed"], one["ranks"]) for one in found["b"]["attempts"]] == [
        (0, False, 1),
        (4, True, 2),
    ]


def test_what_a_resume_took_back_is_not_compared(tmp_path, capsys):
    a = MadeUp(tmp_path, "a").start().steps(1, 6)
    b = MadeUp(tmp_path, "b").start().steps(1, 3).step(4, loss=7.0).step(5, loss=7.0)
    b.start(3, resumed=True)
    status, found = verify(capsys, a, b)
    assert (status, found["steps"]["metrics"]) == (0, [1, 2, 3])


def test_weights_that_a_resume_did_not_get_back_are_told(tmp_path, capsys):
    a = MadeUp(tmp_path, "a").start().steps(1, 4)
    b = MadeUp(tmp_path, "b").start().steps(1, 2).start(2, resumed=True).digest(2, norm="x" * 32).steps(3, 4)
    found = verify(capsys, a, b)[1]
    assert found["first"] == {"step": 2, "what": "weights"}
    assert found["repeated"][0]["first"] == {"step": 2, "what": "weights"}


def test_lines_that_a_kill_cut_are_left_out_and_counted(two, capsys):
    for one in two:
        one.steps(1, 2)
    with (two[0].folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 3, "lo')
    with (two[0].folder / "digests.jsonl").open("a") as file:
        file.write('{"kind": "digest", "step": 3, "tens')
    status, found = verify(capsys, *two)
    assert (status, found["a"]["unreadable_lines"], found["b"]["unreadable_lines"]) == (0, 1, 0)
    assert main(["verify-run", str(two[0].folder), str(two[1].folder)]) == 0
    assert "1 line of metrics.jsonl is cut short and left out" in capsys.readouterr().out


def test_a_side_file_that_is_lost_leaves_the_digest_of_the_whole(two, capsys):
    two[0].steps(1, 2)
    two[1].steps(1, 1).step(2).digest(2, norm="x" * 32)
    (two[0].folder / "digests.jsonl").unlink()
    found = verify(capsys, *two)[1]
    assert found["first"] == {"step": 2, "what": "weights"} and found["tensors"] == []


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("[parallel]\ndp = 1\n", "[parallel]\ndp = 2\n", "add in another order (parallel.dp)"),
        ('[parallel]\ngrad_sum = "tree"\ndp = 1\n', '[parallel]\ngrad_sum = "tree"\ndp = 2\n', "No key explains it"),
        ("[train]\nseed = 1\n", "[train]\nseed = 2\n", "compute other things: train.seed"),
        ('[run]\ndir = "a"\n[log]\nevery = 1\n', '[run]\ndir = "b"\n[log]\nevery = 2\n', "No key explains it"),
        ('[run]\ndevice = "cpu"\n', '[run]\ndevice = "cuda"\n', "compute other things: run.device"),
        ("[fsdp]\nprefetch_bytes = 1\n", "[fsdp]\nprefetch_bytes = 2\n", "No key explains it"),
        ('[fsdp]\nreduce_dtype = "bfloat16"\n', "", "compute other things: fsdp.reduce_dtype"),
        ('[fsdp]\ngrad_reduce = "last"\n', "", "add in another order (fsdp.grad_reduce)"),
        ("[eval]\nbatches = 4\n", "[eval]\nbatches = 8\n", "compute other things: eval.batches"),
        (
            '[parallel]\nlayers_per_stage = [1, 3]\nschedule = "pipedream"\n',
            '[parallel]\nlayers_per_stage = [2, 2]\nschedule = "pipedream"\n',
            "compute other things: parallel.layers_per_stage",
        ),
    ],
)
def test_keys_that_can_change_bits_explain_a_difference(tmp_path, capsys, a, b, words):
    runs = [MadeUp(tmp_path, name, text).start() for name, text in (("a", a), ("b", b))]
    if "dp = 2" in b:
        runs[1].start(dp=2)
    runs[0].step(1)
    runs[1].step(1, loss=2.0)
    assert words in verify(capsys, *runs)[1]["verdict"]


def test_runs_without_a_step_in_common_cannot_be_compared(tmp_path, capsys):
    a = MadeUp(tmp_path, "a").start().step(1).step(2)
    b = MadeUp(tmp_path, "b").start(4).step(5)
    status, told = verify(capsys, a, b)
    assert status == 2 and "has steps 1-2" in told and "has steps 5" in told and "no step is in both" in told


def test_bad_use_is_status_2(tmp_path, capsys, two):
    two[0].step(1)
    assert verify(capsys, two[0], two[0]) == (2, f"sixfold: A and B are one run, {two[0].folder}; name two\n")
    assert "name two folders of runs" in verify(capsys, two[0], tmp_path / "none")[1]
    (tmp_path / "metrics.jsonl").write_text('{"kind": "else"}\n')
    assert "no line of a start" in verify(capsys, two[0], tmp_path)[1]
    assert main(["verify-run", str(two[0].folder)]) == 2


def test_steps_are_told_as_spans_and_tensors_in_the_models_order():
    assert spans([1, 2, 3, 4, 6, 8, 9, 10]) == "1-4, 6, 8-10"
    assert spans(range(0, 101, 10)) == "0-100 by 10"
    assert (spans([0, 2]), spans([7]), spans([])) == ("0, 2", "7", "")
    names = ["head.weight", "norm.weight", "layers.10.q", "layers.2.q", "embedding.weight"]
    assert sorted(names, key=in_order) == names[::-1]


# ---- with checkpoints of a real run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs of one configuration, and their folder."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        config = tiny_config(folder, "train.steps=4", "log.digest_every=1", "checkpoint.every=2", "checkpoint.keep=9")
        run(replace(config, run=RunConfig(dir=str(folder / name), device="cpu", timeout_seconds=120.0)), 1)
    return folder


@pytest.fixture
def copies(trained, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def change(run_dir, step, key, what):
    """Save a checkpoint again with one tensor changed."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    state = dist_ckpt.load_plain_tensors(folder)
    common = dist_ckpt.load_common_state_dict(folder)
    what(state[key])
    shutil.rmtree(folder)
    sharded = {name: dist_ckpt.ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in state.items()}
    dist_ckpt.save(common | sharded, folder)


@pytest.mark.slow
def test_two_runs_of_one_configuration_agree_to_the_last_bit(copies, capsys):
    status, found = verify(capsys, *copies)
    assert (status, found["checkpoints_compared"]) == (0, [2, 4]), found["verdict"]
    assert found["steps"]["digests"] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_weight_of_a_checkpoint_that_differs_is_told_with_its_elements_and_their_largest_difference(copies, capsys):
    def twist(tensor):
        tensor[0, :3] += 0.5
        tensor[1, 0] -= 2.0

    change(copies[1], 2, "model.layers.1.attention.q.weight", twist)
    status, found = verify(capsys, *copies)
    assert (status, found["first"], found["checkpoints_compared"]) == (1, {"step": 2, "what": "weights"}, [2])
    [tensor] = found["tensors"]
    assert (tensor["name"], tensor["count"]) == ("layers.1.attention.q.weight", 4)
    assert tensor["max_abs"] == pytest.approx(2.0, abs=1e-6)
    assert verify(capsys, *copies, "--no-checkpoints")[0] == 0, "digests and metrics are those of before"
    assert main(["verify-run", *map(str, copies)]) == 1
    assert "layers.1.attention.q.weight: 4 elements, by 2.000e+00 at most" in capsys.readouterr().out


@pytest.mark.slow
def test_a_moment_that_differs_alone_is_the_optimizers_state(copies, capsys):
    change(copies[1], 4, "optimizer.state.exp_avg.model.norm.weight", lambda tensor: tensor.add_(1.0))
    found = verify(capsys, *copies)[1]
    assert found["first"] == {"step": 4, "what": "optimizer state"} and found["checkpoints_compared"] == [2, 4]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told_and_the_rest_compared(copies, capsys):
    [file] = sorted((copies[1] / "checkpoints" / "step-00000002").glob("*.distcp"))
    raw = bytearray(file.read_bytes())
    for at in range(0, len(raw), 64):
        raw[at] ^= 1
    file.write_bytes(bytes(raw))
    status, found = verify(capsys, *copies)
    assert (status, found["equal"], found["first"]) == (1, False, None)
    assert [one["step"] for one in found["damaged"]] == [2] and found["checkpoints_compared"] == [4]
    assert "The checkpoint of step 2 cannot be compared" in found["verdict"]


@pytest.mark.slow
def test_a_weight_that_was_changed_within_a_run_differs_from_that_step_on(trained, tmp_path, capsys):
    """A fault as a person meets it: one bit of one weight in the checkpoint that a run goes on from."""
    folder = tmp_path / "b"
    shutil.copytree(trained / "b", folder)

    def flip(tensor):
        tensor.view(torch.int32)[5] ^= 1

    change(folder, 2, "model.norm.weight", flip)
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    text = (folder / "config.toml").read_text()
    config = type(tiny_config(tmp_path)).from_text(text.replace(str(trained / "b"), str(folder)))
    run(config, 1)
    status, found = verify(capsys, trained / "a", folder, "--no-checkpoints")
    assert (status, found["first"], found["agree_to"]) == (1, {"step": 2, "what": "weights"}, 1)
    assert [one["name"] for one in found["tensors"]] == ["norm.weight"]
    assert found["repeated"][0]["first"] == {"step": 2, "what": "weights"}
