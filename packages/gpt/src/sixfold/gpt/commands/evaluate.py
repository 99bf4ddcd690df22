"""``sixfold eval``: a trained model on tasks of EleutherAI's harness.

    run, checkpoint or Hugging Face folder --> open_any --> harness_model.py --> lm-eval's simple_evaluate
                                                  (this file) --> table, RUN/lm-eval-step-*.json

The harness comes with the extra ``eval``; tasks whose data it does not bring are fetched by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sixfold.gpt.commands.harness_model import NO_HARNESS, harness_model
from sixfold.gpt.commands.sample import open_run
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.commands.sample import Opened


def evaluate(
    path: str | Path,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch: int = 8,
    gen_tokens: int | None = None,
    tokenizer: str = "",
    eod_token: str = "",
    ema: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Evaluate a model, and write the results beside the metrics of its run.

    Args:
        path: run folder, checkpoint folder or folder of an export.
        tasks: names of lm-eval's tasks or of those below ``include_path``.
        shots: examples before each question; None: as the task says.
        limit: questions of each task at most.
        batch: rows that are read at once.
        gen_tokens: most tokens of an answer, in place of what tasks say.
        tokenizer, eod_token: as of `tokenizer_for`; "" are the run's own.
        ema: the average of the weights in their place.
    Returns:
        ``results`` of each task as lm-eval gives them, ``versions``, ``n-shot``, ``samples``, ``model``, ``lm_eval``;
        ``file``: the path that was written, None if the model is of no run.
    Raises:
        ConfigError: lm-eval is not installed, a task is not known, or the path is no model.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(NO_HARNESS) from error
    known = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [name for name in tasks if not known.match_tasks([name])]:
        place = include_path or "(not given)"
        raise ConfigError(f"tasks {', '.join(unknown)} are neither lm-eval's nor below --include {place}; name others")
    names = known.match_tasks(list(tasks))
    with _opened(Path(path), tokenizer, eod_token, ema) as (run, checkpoint):
        _move(run, device)
        found = lm_eval.simple_evaluate(
            model=harness_model(run, batch=batch), tasks=names, task_manager=known, num_fewshot=shots, limit=limit,
            gen_kwargs=None if gen_tokens is None else {"max_gen_toks": gen_tokens}, log_samples=False,
            bootstrap_iters=1000,
        )  # fmt: skip
    assert found is not None, "lm-eval gives nothing on other ranks than the first, and there is one"
    results = {key: found[key] for key in ("results", "versions", "n-shot", "higher_is_better") if key in found}
    results |= {"samples": found.get("n-samples", {}), "limit": limit, "model": str(path), "ema": ema}
    results |= {"lm_eval": lm_eval.__version__} | ({} if checkpoint is None else {"checkpoint": checkpoint.name})
    as_json: dict[str, Any] = json.loads(json.dumps(results, default=str))  # lm-eval's numbers may be numpy's
    written = None if checkpoint is None else _write(checkpoint, as_json)
    return as_json | {"file": None if written is None else str(written)}


def table(results: dict[str, Any]) -> str:
    """Tasks, metrics and values as lines of text."""
    rows = [("task", "metric", "value", "stderr", "shots")]
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if not kind or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{name}_stderr,{kind}", "")
            stderr = f"{error:.4f}" if isinstance(error, float) else ""
            label = name if kind == "none" else f"{name} ({kind})"
            rows.append((task, label, f"{value:.4f}", stderr, str(results.get("n-shot", {}).get(task, ""))))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


@contextmanager
def _opened(path: Path, tokenizer: str, eod_token: str, ema: bool) -> Iterator[tuple[Opened, Path | None]]:
    """A model, and the folder of its checkpoint if that is in a run. An export is imported into a temporary folder."""
    from sixfold.gpt.checkpoints.training_state import find

    if (path / "config.json").is_file() and not (path / "checkpoints").is_dir():
        from sixfold.gpt.huggingface.convert import import_model

        with TemporaryDirectory() as folder:
            import_model(path, Path(folder, "run"))
            yield open_run(Path(folder, "run"), tokenizer, eod_token, ema=ema), None
        return
    checkpoint = find(path)
    in_run = checkpoint.parent.name == "checkpoints" and (checkpoint.parent.parent / "config.toml").is_file()
    yield open_run(checkpoint, tokenizer, eod_token, ema=ema), checkpoint if in_run else None


def _move(run: Opened, device: str) -> None:
    """Move the model to ``device``."""
    try:
        run.model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        why = str(error).splitlines()[0]
        raise ConfigError(f"device is {device!r}, which this machine does not have ({why}); take cpu") from error


def _write(checkpoint: Path, results: dict[str, Any]) -> Path:
    """Write a new file into the run of a checkpoint; nothing is written over."""
    run, number = checkpoint.absolute().parent.parent, 1
    while True:
        path = run / f"lm-eval-{checkpoint.name}{f'-{number}' if number > 1 else ''}.json"
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(results, file, indent=2)
            return path
        except FileExistsError:
            number += 1
