"""A run whose pairs lie behind a URL: the losses of the local run, and requests made before their turn."""

from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from range_server_helpers import RangeServer

from sixfold.gpt import train
from sixfold.gpt.data import token_stream
from sixfold.gpt.observe.metrics import read_all


def losses(config):
    lines = list(read_all(Path(config.run.dir) / "metrics.jsonl"))
    return [(line["kind"], line["loss"]) for line in lines if line["kind"] in ("step", "eval")]


@pytest.mark.slow
def test_a_run_reads_pairs_behind_a_url_ahead_and_trains_as_from_files(tmp_path, monkeypatch):
    told = []
    inner = token_stream.TokenStream._look_ahead

    def look_ahead(self, samples, batch_size, *rest):
        inner(self, samples, batch_size, *rest)
        told.append((samples, self._told - samples))

    monkeypatch.setattr(token_stream.TokenStream, "_look_ahead", look_ahead)
    evaluated = ("train.steps=4", "eval.every=2", "eval.batches=1")
    near = tiny_config(tmp_path, *evaluated, run="near")
    train(near)
    assert {ahead for samples, ahead in told} == {-samples for samples, _ in told}, "a file is not told"
    files = {
        path.name: path.read_bytes()
        for prefix in near.data.blend
        for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*")
    }
    told.clear()
    with RangeServer(files, failing=0.05, delay_s=0.01) as server:
        there = [f"{server.url}/{Path(prefix).name}" for prefix in near.data.blend]
        far = tiny_config(tmp_path, *evaluated, f"data.blend={there}".replace("'", '"'), run="far")
        train(far)
    assert losses(far) == losses(near)
    assert {ahead for _, ahead in told} == {(token_stream.AHEAD + 1) * near.train.global_batch_size}
    assert server.failed, "some requests failed"
