"""What the lines of metrics.jsonl say of a comparison without a majority, for the next attempt."""

import json

import pytest

from sixfold.gpt.training.replica_check import doubtful_step


@pytest.mark.parametrize(
    ("told", "doubtful"),
    [
        ("", None),
        ("agree 1, agree 2", None),
        ("agree 1, undecided 2", 2),
        ("differ 2", None),  # that rank is named, and nothing is in doubt
        ("undecided 4, agree 0, agree 2", 4),
        ("undecided 4, agree 2, agree 4", None),
        ("undecided 4, agree 5", None),
        ("undecided 4, differ 5", 4),
        ("undecided 4, agree 4, undecided 6", 6),
        ("undecided 4, undecided 3, agree 3", None),
    ],
)
def test_a_doubt_lasts_until_the_run_has_agreed_on_that_step_or_a_later_one(tmp_path, told, doubtful):
    lines = [{"kind": "start", "step": 0, "text": "replicas"}]
    for one in told.split(", ") if told else []:
        result, step = one.split()
        lines += [{"kind": "replicas", "step": int(step), "result": result}, {"kind": "step", "step": int(step)}]
    path = tmp_path / "metrics.jsonl"
    assert doubtful_step(path) is None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "replicas", "st')
    assert doubtful_step(path) == doubtful
