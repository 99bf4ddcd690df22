"""Documents taken down and datasets retired in a run that goes on: at a resume, at another layout."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gpt_helpers import plain_losses, tiny_config
from run_helpers import JOB_S

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt import ConfigError, TrainConfig, global_batches, train
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.training.loop import train_in
from sixfold.indexed_data import IndexedDataset

RUN = ("train.steps=4", "checkpoint.every=2")


def train_rank(rank, ranks, text):
    world = World(rank=rank, size=ranks, local_rank=rank, store=ranktest.store(), device=torch.device("cpu"))
    train_in(TrainConfig.from_text(text), world)


def losses(config):
    text = (Path(config.run.dir) / "metrics.jsonl").read_text()
    return [entry["loss"] for entry in map(json.loads, text.splitlines()) if entry["kind"] == "step"]


def goes_on(config, source):
    """A run folder that stands at step 2 of another run."""
    shutil.copytree(
        Path(source.run.dir, "checkpoints/step-00000002"), Path(config.run.dir, "checkpoints/step-00000002")
    )
    shutil.copy(Path(source.run.dir) / "config.toml", config.run.dir)


def remove(prefix):
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        path.unlink()


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.slow
def test_documents_of_a_file_are_taken_down_at_a_resume_at_another_layout(packing, tmp_path):
    options = (*RUN, f"data.packing={packing}")
    plain = tiny_config(tmp_path, *options, run="plain")
    train(plain)
    gone = range(0, 108, 2)  # of the 120 documents of wiki, those that training reads
    (tmp_path / "gone.txt").write_text("".join(f"{number}\n" for number in gone))
    change = f'data.changes=[{{at = 16, drop = {{wiki = "{tmp_path}/gone.txt"}}}}]'
    cut = tiny_config(tmp_path, *options, change, "parallel.dp=2", run="cut")
    goes_on(cut, plain)
    ranktest.run_ranks(train_rank, 2, cut.to_toml(), timeout=JOB_S)
    whole = plain_losses(tiny_config(tmp_path, *options, change), 4)
    assert whole[:2] == plain_losses(plain, 4)[:2], "nothing before the change moves"
    assert whole[2] != losses(plain)[2]
    assert losses(cut) == pytest.approx(whole[2:], rel=1e-6)
    wiki = IndexedDataset(tmp_path / "wiki")
    before, after = (list(global_batches(each)) for each in (plain, cut))
    for step in range(4):
        same = torch.equal(before[step].tokens, after[step].tokens)
        assert same == (step < 2)
    told = [row.tolist() for batch in after[2:] for row in batch.tokens]
    dropped = [wiki[number][:12].tolist() for number in gone if wiki[number].size > 12]
    assert not any(ids == row[at : at + 12] for ids in dropped for row in told for at in range(len(row) - 11))
    earlier = tiny_config(tmp_path, *options, change.replace("at = 16", "at = 8"), run="earlier")
    goes_on(earlier, plain)
    with pytest.raises(ConfigError, match=r"cannot change data\.changes"):
        train(earlier)


@pytest.mark.parametrize("weights", ["[0.7, 0.3]", "[]"])
@pytest.mark.slow
def test_a_run_goes_on_without_a_dataset_that_left_the_blend_and_was_deleted(weights, tmp_path):
    code = tmp_path / "code"
    options = (*RUN, f"data.weights={weights}", f'data.changes=[{{at = 16, blend = ["{code}"]}}]')
    plain = tiny_config(tmp_path, *options, run="plain")
    train(plain)
    runs = [tiny_config(tmp_path, *options, f"parallel.{layout}=2", run=layout) for layout in ("dp", "pp")]
    again = tiny_config(tmp_path, *options, run="again")
    read = tiny_config(tmp_path, *options, "eval.every=2", run="read")
    fresh = tiny_config(tmp_path, *options, run="fresh")
    remove(tmp_path / "wiki")
    for config in runs:
        goes_on(config, plain)
        ranktest.run_ranks(train_rank, 2, config.to_toml(), timeout=JOB_S)
        assert losses(config) == pytest.approx(losses(plain)[2:], rel=1e-6)
    goes_on(again, runs[0])
    shutil.copytree(
        Path(runs[0].run.dir, "checkpoints/step-00000004"), Path(again.run.dir, "checkpoints/step-00000004")
    )
    train(TrainConfig.from_text(again.to_toml().replace("steps = 4", "steps = 5")))  # of a run without the files
    assert len(losses(again)) == 1
    goes_on(read, plain)
    with pytest.raises(ConfigError, match=r"validation reads a part of it \(data\.split 90,10,0\)"):
        train(read)
    with pytest.raises(Exception, match=r"wiki\.idx"):
        train(fresh)
