"""The examples of the doors differ from the usual code in one line; the two exchange checkpoints at any size."""

import difflib
import os
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import retention, tools

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["dcp_fsdp2", "dcp_accelerate", "dcp_titan"]


def texts_of(name):
    """An example, and the usual code: the line that it shows in a comment in place of the next one."""
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines(keepends=True)
    (at,) = [n for n, line in enumerate(lines) if line.startswith("# from torch.distributed.checkpoint import")]
    usual = [*lines[: at + 1], lines[at].removeprefix("# "), *lines[at + 2 :]]
    return "".join(lines), "".join(usual)


def module_of(name, usual):
    """Its functions, of the package or of torch alone."""
    module = types.ModuleType(name)
    exec(compile(texts_of(name)[usual], f"{name}.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_example_differs_from_the_usual_code_in_one_line(name):
    ours, usual = texts_of(name)
    changes = [line for line in difflib.ndiff(usual.splitlines(), ours.splitlines()) if line[:2] in ("+ ", "- ")]
    assert len(changes) == 2  # one goes, one comes
    assert changes[0].startswith("- from torch.distributed.checkpoint import")
    assert changes[1].startswith("+ from sixfold.dist_ckpt")
    assert "sixfold" not in usual.replace("# isort: skip", "")


def run_example(rank, ranks, name, call, usual, folder):
    torch.set_num_threads(1)
    return getattr(module_of(name, usual), call)(str(folder))


def close(a, b):
    return len(a) == len(b) and all(abs(x - y) < 1e-5 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["dcp_fsdp2", "dcp_accelerate"])
@pytest.mark.slow
def test_a_run_goes_on_at_other_numbers_of_ranks_and_in_the_other_code(tmp_path, name):
    expected = run_ranks(run_example, 2, name, "save", False, tmp_path / "ours")
    assert expected == run_ranks(run_example, 2, name, "save", True, tmp_path / "usual")
    for ranks, usual, folder in ((2, False, "ours"), (1, False, "ours"), (2, False, "usual"), (1, True, "ours")):
        found = run_ranks(run_example, ranks, name, "resume", usual, tmp_path / folder)
        assert all(close(losses, expected[0]) for losses in found), (ranks, usual, folder)
        assert ranks != 2 or found == expected  # at its own layout to the bit
    folders = [tmp_path / "ours"] if name == "dcp_fsdp2" else sorted((tmp_path / "ours").iterdir())
    assert [tools.inspect(folder)["integrity"] for folder in folders] == [True] * len(folders)
    assert all(tools.verify(folder)["ok"] for folder in folders)


@pytest.mark.parametrize("name", ["dcp_fsdp2"])
@pytest.mark.slow
def test_a_run_of_one_rank_goes_on_at_two(tmp_path, name):
    (expected,) = run_ranks(run_example, 1, name, "save", False, tmp_path / "c")
    found = run_ranks(run_example, 2, name, "resume", False, tmp_path / "c")
    assert all(close(losses, expected) for losses in found)


def straight(rank, ranks, folder, asynchronous):
    """Six steps without a stop; then a run that stops at four and goes on."""
    titan = module_of("dcp_titan", False)
    trainer = titan.Trainer(str(folder / "straight"), seed=0, asynchronous=asynchronous)
    expected = trainer.train(6)
    trainer.checkpoints.close()
    assert titan.save(str(folder / "run"), asynchronous) == expected[:4]
    dist.barrier()
    losses = titan.resume(str(folder / "run"), asynchronous)
    dist.barrier()
    return losses == expected, sorted(os.listdir(folder / "run"))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.slow
def test_titans_manager_saves_purges_and_goes_on_bitwise(tmp_path, asynchronous):
    results = run_ranks(straight, 2, tmp_path, asynchronous)
    assert [same for same, _ in results] == [True, True]
    steps = [name for name in results[0][1] if name.startswith("step-")]
    assert steps[-2:] == ["step-5", "step-6"]
    assert not {"step-1", "step-2"} & set(steps)
    assert results[0][1] == steps  # nothing beside the steps, that a purge by name would stumble over
    assert all(tools.verify(tmp_path / "run" / step)["ok"] for step in steps)
    assert run_ranks(titan_in_the_usual_code, 2, tmp_path) == [6, 6]


def titan_in_the_usual_code(rank, ranks, folder):
    """torchtitan as it is finds the newest step of such a folder and loads it."""
    usual = module_of("dcp_titan", True)
    trainer = usual.Trainer(str(folder / "run"), seed=3, asynchronous=False)
    assert trainer.checkpoints.load()
    trainer.checkpoints.close()
    return trainer.train_state.step


def purge_in_mid_save(rank, ranks, folder):
    """A purge runs while a save to the same root is under way: it looks for step-N and finds no half one."""
    titan = module_of("dcp_titan", False)
    seen = []

    class Looking(torch_dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            seen.append(sorted(name for name in os.listdir(folder) if not name.startswith(".")))
            return super().resolve_data(write_item)

    state = {"w": torch.arange(4.0), "step": 1}
    writer = titan.FileSystemWriter(str(folder / "step-1"))
    torch_dcp.save(state, storage_writer=writer, planner=Looking(), no_dist=True)
    return seen


def test_a_purge_by_name_never_sees_a_save_that_is_under_way(tmp_path):
    (seen,) = run_ranks(purge_in_mid_save, 1, tmp_path)
    assert seen == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def first_weights(rank, ranks, folder):
    titan = module_of("dcp_titan", False)
    trainer = titan.Trainer(str(folder / "run"), seed=5, asynchronous=False)
    trainer.checkpoints.load_hf(str(folder / "hf"))
    trainer.checkpoints.close()
    return {key: value.full_tensor().tolist() for key, value in trainer.model.state_dict().items()}


@pytest.mark.slow
def test_the_first_weights_come_from_a_hugging_face_folder_at_any_layout(tmp_path):
    safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    torch.manual_seed(9)
    whole = {"0.weight": (7, 6), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,)}
    whole = {key: torch.randn(shape) for key, shape in whole.items()}
    (tmp_path / "hf").mkdir()
    safe.save_file(whole, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    expected = {key: value.tolist() for key, value in whole.items()}
    for ranks in (1, 2):
        assert run_ranks(first_weights, ranks, tmp_path) == [expected] * ranks


def named_by_retention(rank, ranks, folder):
    titan = module_of("dcp_titan", False)
    for step in (1, 2, 3):
        writer = titan.FileSystemWriter(retention.step_path(folder, step))
        torch_dcp.save({"w": torch.full((2,), float(step))}, storage_writer=writer)


def test_folders_named_by_retention_are_listed_and_pruned(tmp_path):
    run_ranks(named_by_retention, 1, tmp_path)
    assert [step for step, _ in retention.checkpoints(tmp_path)] == [1, 2, 3]
    retention.prune(tmp_path, keep_last=1)
    found = dist_ckpt.load_plain_tensors(retention.latest(tmp_path))
    assert found["w"].tolist() == [3.0, 3.0]
