"""``sixfold demo``: the whole of Sixfold in about four minutes on two cores, without a network, a GPU or a flag.

    cpython_corpus.py --> prepare.py --> a pipeline of ranks --SIGKILL--> sharded data parallel --> score, plot, sample
                                 (this file: the plot of the play, its clock and summary.json)

All ranks of the first half are killed, and the run is started anew. The second half is kept alive: one rank of it is
killed, and the others go on.

Everything lies in one folder; demo.toml in it is an ordinary config that `sixfold train` takes. A demo that was run
before in the same folder is replaced; any other folder with content is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt import retention
from sixfold.gpt.commands.train import run_kept_alive, train_rank
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.data.cpython_corpus import Corpus, cpython_corpus
from sixfold.gpt.data.prepare import PreparedCorpus, prepare_cpython
from sixfold.gpt.errors import ConfigError, TrainError
from sixfold.gpt.launch.spawn import RankError, start_ranks, warm_up
from sixfold.gpt.launch.stop_signals import STOPPED
from sixfold.gpt.machine.devices import cpu_has_bfloat16
from sixfold.gpt.observe.metrics import MetricsTail, ProgressLine

# A first guess, for the learning rate of the first half only; the number of updates is set at the resume, from what
# this machine did until then.
GUESSED_TOKENS_PER_SECOND = 20_000.0
SEQ_LENGTH = 256
GLOBAL_BATCH = 8
SAMPLE_TOKENS = 400
_BEGINS = "# a demo begins here"

TOML = """\
# Written by `sixfold demo`. The same run by hand: sixfold train {toml}

[model]
num_layers = 4
hidden_size = 192
num_attention_heads = 3
ffn_hidden_size = 512
vocab_size = 257

[data]
blend = {blend}
weights = {weights}
valid = {valid}
seq_length = {seq_length}

[parallel]
pp = {ranks}
dp = 1

[train]
steps = {steps}
global_batch_size = {global_batch}
micro_batch_size = {micro_batch}
precision = "{precision}"

[optimizer]
lr = 2e-3

[schedule]
shape = "cosine"
warmup_steps = {warmup}
min_lr_ratio = 0.05

[checkpoint]
every = {every}
background = false

[elastic]
memory_every = 5

[run]
dir = {run}
device = "cpu"
timeout_seconds = 120.0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Batch sizes that fit both layouts of ``ranks`` ranks."""

    ranks: int

    @property
    def sharded(self) -> int:
        """Samples of a microbatch when every rank takes its share of the global batch at once."""
        return max(1, GLOBAL_BATCH // self.ranks)

    @property
    def total(self) -> int:
        """Samples of a step."""
        return self.sharded * self.ranks

    @property
    def pipeline(self) -> int:
        """Samples of a microbatch of the pipeline: half of the other where that divides."""
        return self.sharded // 2 if self.sharded % 2 == 0 else 1


@dataclass(kw_only=True)
class FirstHalf:
    """Watches the pipeline's metrics and kills its ranks near half of the time, once a checkpoint lies behind them."""

    metrics: Path
    seconds: float
    most_steps: int
    line: ProgressLine
    tail: MetricsTail = field(init=False)
    pids: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    saved_step: int = 0
    killed: bool = False

    def __post_init__(self) -> None:
        self.tail = MetricsTail(self.metrics, offset=0)

    def watch(self) -> None:
        """Called about ten times a second while the ranks run."""
        self.line.poll()
        self.read()
        if self._is_time() and not self.killed:
            self.killed = True
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)

    def read(self) -> None:
        """Take in what the ranks wrote since the last call."""
        for record in self.tail.read():
            if record["kind"] == "start":
                self.pids = [int(rank["pid"]) for rank in record["ranks"]]
            elif record["kind"] == "step":
                self.steps.append(record)
            elif record["kind"] == "save":
                self.saved_step = int(record["step"])

    def _is_time(self) -> bool:
        if not self.steps or not self.saved_step or self.last["step"] <= self.saved_step:
            return False
        half = time.time() - self.steps[0]["time"] >= self.seconds
        return half or int(self.last["step"]) >= self.most_steps

    @property
    def last(self) -> dict[str, Any]:
        """The newest step line."""
        return self.steps[-1]

    def steps_for(self, seconds: float) -> int:
        """Updates that this machine does in ``seconds``, by the median of what it did."""
        each = sorted(float(record["seconds"]) for record in self.steps)
        return max(1, int(seconds / each[len(each) // 2]))


@dataclass(kw_only=True)
class OneLoss:
    """Watches the second half, kills its last rank once, and sees what comes of it."""

    tail: MetricsTail
    at_step: int
    pids: list[int] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    killed: tuple[int, float] | None = None  # the step that was done, and when

    def watch(self) -> None:
        """Called about ten times a second while the ranks run."""
        for record in self.tail.read():
            self.records.append(record)
            if record["kind"] == "start":
                self.pids = [int(rank["pid"]) for rank in record["ranks"]]
            elif record["kind"] == "step" and self.killed is None and int(record["step"]) >= self.at_step:
                self.killed = int(record["step"]), time.time()
                os.kill(self.pids[-1], signal.SIGKILL)

    def told(self) -> dict[str, Any]:
        """What `summary.json` has of it; empty if there was no time for it."""
        behind = [one for one in self.records if self.killed and one["time"] > self.killed[1]]
        recovery = next((one for one in behind if one["kind"] == "recovery"), None)
        if self.killed is None or recovery is None:
            return {}
        steps = [one for one in behind[behind.index(recovery) :] if one["kind"] == "step"]
        again = next((one for one in steps if one["step"] == self.killed[0]), None)  # or that step was not lost
        before = next(one for one in self.records if one["kind"] == "step" and one["step"] == self.killed[0])
        return {} if not steps else {
            "after_step": self.killed[0],
            "source": recovery["source"],
            "from_step": recovery["step"],
            "seconds_to_the_next_update": steps[0]["time"] - self.killed[1],
            "loss": before["loss"],
            "loss_again": before["loss"] if again is None else again["loss"],
        }  # fmt: skip


def demo(folder: Path, *, minutes: float = 3.0, ranks: int = 2) -> int:
    """Run the demo in ``folder``, which then holds summary.json.

    Args:
        minutes: how long to train, both halves together.
        ranks: stages of the pipeline, then data-parallel ranks.
    Returns:
        The exit status: 0, or 143 if SIGTERM stopped it.
    Raises:
        ConfigError: the folder holds something else. TrainError: a run failed.
    """
    began = time.time()
    folder = folder.resolve()
    warm_up()  # torch loads in another process while the text is collected here
    _clear(folder)
    corpus = cpython_corpus()
    prepared = prepare_cpython(folder / "data" / "cpython", corpus)
    size = sum(len(d) for documents in (*corpus.train.values(), corpus.valid) for d in documents)
    _say(f"Text: {size:,} bytes of documentation from this Python, 10 % kept aside (sha256 {corpus.sha256[:16]}...)")

    config = _config(folder, prepared, minutes=minutes, ranks=ranks)
    model = f"{config.model.num_parameters:,} parameters"
    _say(f"First half: a GPT of {model} as a pipeline of {ranks} stages, one per process")
    first = _first_half(config, minutes * 30, ranks)
    if first is None:
        return STOPPED
    _say(f"Killed all {ranks} processes (SIGKILL) after step {first.last['step']}, loss {first.last['loss']:.4f}")

    second = _resumed_config(folder, first, minutes=minutes, ranks=ranks)
    _say(f"Second half: the same run, fully sharded data parallel over {ranks} processes")
    resume = _second_half(second, ranks)
    if resume is None:
        return STOPPED
    after = resume["first"]
    before = next(step["loss"] for step in first.steps if step["step"] == after["step"])
    _say(
        f"Resumed at step {resume['step']}; the loss of step {after['step']} was {before:.6f} as a pipeline before the "
        f"kill and is {after['loss']:.6f} sharded after it"
    )
    if loss := resume["loss"]:
        _say(
            f"Killed one of its processes after step {loss['after_step']}; {loss['seconds_to_the_next_update']:.1f} s "
            f"later the next update was done, from step {loss['from_step']} in {loss['source']}. The loss of step "
            f"{loss['after_step']} was {loss['loss']:.6f}, and is {loss['loss_again']:.6f} now"
        )
    summary = {
        "seconds_to_first_loss": first.steps[0]["time"] - began,
        "layouts": [f"pp{ranks}", f"dp{ranks}"],
        "killed_after_step": first.last["step"],
        "resumed_at_step": resume["step"],
        "one_rank_killed": resume["loss"],
        "tokens": resume["last"]["tokens"],
        "corpus_sha256": corpus.sha256,
        "run": second.run.dir,
        "train_data": [pair.prefix for pair in prepared.train],
        "valid_data": prepared.valid.prefix,
    }
    measured = _score_and_sample(second, ranks)
    if measured is None:
        return STOPPED
    _finish(folder, second, corpus, summary, measured, int(resume["last"]["step"]))
    _say(f"Done in {time.time() - began:.0f} s; the first loss came after {summary['seconds_to_first_loss']:.1f} s.")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


# What a demo makes in its folders; by hand `sixfold train` and `timeline` make more.
_MADE = {
    "data": r"cpython-(topics|docstrings|valid)\.(bin|idx|json|bin\..*|idx\..*)",
    "run": r"config\.toml|metrics\.jsonl|checkpoints|tensorboard|profile|timeline|\.config\.toml\.\d+",
}


def _is_demo(folder: Path) -> bool:
    """Whether its demo.toml begins as a demo's does."""
    try:
        with (folder / "demo.toml").open(encoding="utf-8") as file:
            return file.readline().startswith(("# Written by `sixfold demo`", _BEGINS))
    except (OSError, UnicodeDecodeError):
        return False


def _clear(folder: Path) -> None:
    """Make room for a demo: replace an older one, refuse anything else."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give --dir a folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_demo(folder):
        raise ConfigError(f"{folder} holds files that no demo wrote; give --dir a new or empty folder")
    for name, known in _MADE.items():
        for path in sorted((folder / name).glob("*")):
            if not re.fullmatch(known, path.name):
                raise ConfigError(
                    f"{folder} holds files that no demo wrote, as {path}; give --dir a new or empty folder"
                )
    for name in _MADE:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("summary.json", "loss.svg", "loss.png"):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.toml").write_text(f"{_BEGINS}\n", encoding="utf-8")


def _config(folder: Path, prepared: PreparedCorpus, *, minutes: float, ranks: int) -> TrainConfig:
    """Write demo.toml and read it: the run as its first half sees it."""
    batches = Batches(ranks=ranks)
    steps = max(40, int(minutes * 60 * GUESSED_TOKENS_PER_SECOND / (batches.total * SEQ_LENGTH)))
    tokens = [pair.tokens for pair in prepared.train]
    path = folder / "demo.toml"
    text = TOML.format(
        toml=path,
        blend=json.dumps([pair.prefix for pair in prepared.train]),
        weights=json.dumps([round(n / sum(tokens), 4) for n in tokens]),
        valid=json.dumps([prepared.valid.prefix]),
        run=json.dumps(str(folder / "run")),
        seq_length=SEQ_LENGTH,
        ranks=ranks,
        steps=steps,
        global_batch=batches.total,
        micro_batch=batches.pipeline,
        precision="bf16" if cpu_has_bfloat16() else "fp32",
        warmup=max(2, min(100, steps // 20)),
        every=max(5, steps // 24),
    )
    path.write_text(text, encoding="utf-8")
    return TrainConfig.from_toml(path)


def _resumed_config(folder: Path, first: FirstHalf, *, minutes: float, ranks: int) -> TrainConfig:
    """The run as its second half sees it: another layout, and as many updates as the time left allows."""
    steps = max(first.saved_step + first.steps_for(minutes * 30), int(first.last["step"]) + 5)
    changes = (
        "parallel.pp=1",
        f"parallel.dp={ranks}",
        'parallel.sharding="optim_grads_params"',
        f"train.micro_batch_size={Batches(ranks=ranks).sharded}",
        f"train.steps={steps}",
        'checkpoint.resume="must"',
    )
    return TrainConfig.from_toml(folder / "demo.toml", overrides=changes)


def _first_half(config: TrainConfig, seconds: float, ranks: int) -> FirstHalf | None:
    """Train until the kill. None if SIGTERM came."""
    metrics = Path(config.run.dir) / "metrics.jsonl"
    line = ProgressLine(metrics, config.train.steps)
    first = FirstHalf(metrics=metrics, seconds=seconds, most_steps=config.train.steps * 9 // 10, line=line)
    try:
        status = start_ranks(train_rank, ranks, (config,), watch=first.watch)
    except RankError as error:
        if not (first.killed and error.killed_by == signal.SIGKILL):
            raise
        first.read()  # a step may have ended between the last look and the kill
        return first
    finally:
        line.close()
    if status == STOPPED:
        return None
    raise TrainError(
        f"the first half ended by itself after {len(first.steps)} steps; it was to be killed before. Use more --minutes"
    )


def _second_half(config: TrainConfig, ranks: int) -> dict[str, Any] | None:
    """Resume and finish, with the loss of a rank half way. None if SIGTERM came.

    Returns:
        Where it resumed, its first and its last step line, and what the loss cost.
    """
    tail = MetricsTail(Path(config.run.dir) / "metrics.jsonl")
    loss = OneLoss(tail=tail, at_step=_between(config))
    if run_kept_alive(config, ranks, loss.watch) == STOPPED:
        return None
    loss.watch()
    resumes = [r for r in loss.records if r["kind"] == "resume"]
    steps = [r for r in loss.records if r["kind"] == "step"]
    if not resumes or not steps:
        raise TrainError(f"{config.run.dir}/metrics.jsonl has no resumed step; the second half did not train")
    return {"step": resumes[0]["step"], "first": steps[0], "last": steps[-1], "loss": loss.told()}


def _between(config: TrainConfig) -> int:
    """The step half way between the newest checkpoint and the end."""
    newest = max((step for step, _ in retention.checkpoints(Path(config.run.dir) / "checkpoints")), default=0)
    return (newest + config.train.steps) // 2


def _finish(
    folder: Path, config: TrainConfig, corpus: Corpus, summary: dict[str, Any], measured: tuple[float, str], step: int
) -> None:
    """Plot, write summary.json and say where everything lies."""
    from sixfold.gpt.commands.reference_losses import references
    from sixfold.gpt.observe.loss_plot import plot

    lines = references([d for documents in corpus.train.values() for d in documents], corpus.valid)
    score, text = measured
    svg, png = folder / "loss.svg", folder / "loss.png"
    for out in (svg, png):
        plot(
            [config.run.dir],
            out,
            references=lines,
            unit="nats per byte",
            title=f"sixfold demo: {config.model.num_parameters:,} parameters, {summary['tokens']:,} tokens",
            marks={f"whole validation text {score:.3f}": (step, score)},
        )
    summary = {"nats_per_byte": score, "references": lines} | summary | {"plot": str(svg), "sample": text}
    draft = folder / "summary.json.part"
    draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / "summary.json")
    _report(folder, summary, lines)


def score_rank(config: TrainConfig, out: Path) -> int:
    """Body of one rank of the measurement: its share of the validation text, then its share of the sample.

    Each rank holds the whole model, whatever layout trained it, and writes ``out/RANK.json``.
    """
    from sixfold.gpt.commands.sample import open_run, sample
    from sixfold.gpt.commands.score import nats_per_byte
    from sixfold.gpt.launch.rendezvous import detect
    from sixfold.indexed_data import IndexedDataset

    here = detect(os.environ)
    assert here is not None, "start_ranks makes every process a rank"
    opened = open_run(config.run.dir)
    model, tokenizer = opened.model, opened.tokenizer
    length = config.data.seq_length
    with IndexedDataset(config.data.valid_prefixes[0]) as valid:
        assert valid.tokens is not None, "a mapped pair has its tokens as one array"
        share = (here.rank, here.size)
        nats = nats_per_byte(model, valid.tokens, seq_length=length, eod=tokenizer.eod, share=share)
    texts, left = list[str](), SAMPLE_TOKENS // here.size
    while left > 0:
        texts.append(sample(model, tokenizer, tokens=left, seed=here.rank + here.size * len(texts), context=length))
        left -= len(tokenizer.encode(texts[-1])) + 1
    (out / f"{here.rank}.json").write_text(json.dumps({"nats": nats, "text": "\n\n".join(texts)}), encoding="utf-8")
    return 0


def _score_and_sample(config: TrainConfig, ranks: int) -> tuple[float, str] | None:
    """Nats per byte of the whole validation text, and a few documents that the model writes; None after SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="sixfold-") as out:
        if start_ranks(score_rank, ranks, (config, Path(out))) == STOPPED:
            return None
        parts = [json.loads(Path(out, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return math.fsum(part["nats"] for part in parts), "\n\n".join(part["text"] for part in parts)


def _report(folder: Path, summary: Mapping[str, Any], lines: Mapping[str, float]) -> None:
    _say("\nA sample:\n" + "-" * 72 + f"\n{summary['sample']}\n" + "-" * 72)
    others = ", ".join(f"{name} {value:.3f}" for name, value in lines.items())
    _say(f"\nWhole validation text: {summary['nats_per_byte']:.4f} nats per byte ({others})")
    _say(f"Everything lies in {folder}:")
    for name, what in (
        ("loss.svg, loss.png", "the losses against those lines"),
        ("summary.json", "the figures above"),
        ("demo.toml", "the config; change it and call `sixfold train`"),
        ("run/", "metrics.jsonl, checkpoints; `sixfold sample` reads it"),
        ("data/", "the text as token pairs"),
    ):
        _say(f"  {name:<20} {what}")
