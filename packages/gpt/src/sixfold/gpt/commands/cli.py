"""The command ``sixfold``: verbs, exit status, and one line for an error.

    argv --> cli (this file) --> train | resize | demo | prepare | plot | timeline | sample | export | import | ...

Exit status: 0 done, 1 the run failed (or two runs differ), 2 configuration or usage, 143 asked to stop and saved, 137
ended at once by a second signal, not saved. A verb imports what it needs when it runs; a wrong configuration is refused
before torch is imported, a rank started or a folder made.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from sixfold.gpt.commands import plan_and_doctor, watch_run
from sixfold.gpt.commands.arguments import (
    add_configuration,
    at_least_one,
    at_least_zero,
    minutes,
    node_addresses,
)
from sixfold.gpt.commands.train import run_train
from sixfold.gpt.errors import ConfigError, raised_inside
from sixfold.gpt.launch.interrupt import INTERRUPTED
from sixfold.gpt.launch.spawn import RankError, is_typed
from sixfold.gpt.launch.stop_signals import early_signals

_EMA = "the average of the weights in their place (optimizer.ema_decay)"


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit status. An error of a sixfold package or of the operating system is one line on stderr; any other is a
        fault of this program and leaves its traceback.
    """
    try:
        args = _parse(argv)
        return int(args.run(args))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as error:
        return _fail(error, 2)
    except RankError as error:
        return _fail(error, error.exit_code)
    except Exception as error:
        inside = raised_inside(error)
        if is_typed(inside) or isinstance(inside, OSError):
            return _fail(error, 1)
        raise


def _fail(error: BaseException, status: int) -> int:
    sys.stdout.flush()
    print(f"sixfold: {error}", file=sys.stderr, flush=True)
    return status


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    args.given = sys.argv[1:] if argv is None else argv
    # argparse stops filling a list at the next option; files and overrides may stand anywhere.
    if rest and args.verb in ("train", "plan") and not any(word.startswith("-") for word in rest):
        args.words += rest
        rest = []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.verb in ("train", "plan") and not args.words and not args.preset:
        parser.error(f"{args.verb} needs a CONFIG, or --preset with the name of a model")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sixfold", description="Train a GPT from a TOML file.")
    parser.add_argument("--version", action=_Version, help="print the versions of the packages and end")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_train(verbs)
    demo = verbs.add_parser(
        "demo", help="train on this Python's documentation, kill and resume the run, plot it; about 4 minutes"
    )
    demo.add_argument("--dir", type=Path, default=Path("sixfold-demo"), help="folder for all files (%(default)s)")
    demo.add_argument("--minutes", type=minutes, default=3.0, help="how long to train (%(default)s)")
    demo.add_argument(
        "--ranks", type=at_least_one, default=2, help="ranks: first a pipeline, then sharded (%(default)s)"
    )
    demo.set_defaults(run=_demo)

    _add_prepare(verbs)

    plot = verbs.add_parser("plot", help="draw the losses of runs")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder or metrics.jsonl")
    plot.add_argument("--out", type=Path, default=Path("loss.svg"), help=".svg or .png (%(default)s)")
    plot.add_argument("--x", choices=("step", "tokens", "seconds"), default="step")
    plot.add_argument("--by-dataset", action="store_true", help="also draw a curve for each dataset of the blend")
    plot.add_argument("--events", action="store_true", help="also draw failures, recoveries and checkpoints")
    plot.set_defaults(run=_plot)

    sample = verbs.add_parser("sample", help="generate text with a trained model")
    sample.add_argument("path", type=Path, metavar="PATH", help="run folder or checkpoint folder")
    sample.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to continue (default: the start of a document); may be several",
    )
    sample.add_argument("--tokenizer", default="", help="a tokenizer.json or bytes (default: the run's own)")
    sample.add_argument("--eod-token", default="", metavar="NAME", help="token of the tokenizer that ends a document")
    sample.add_argument("--tokens", type=at_least_one, default=200, help="most tokens to generate (%(default)s)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, help="0 always takes the likeliest token (%(default)s)"
    )
    sample.add_argument(
        "--top-k", type=int, default=50, help="sample from the K likeliest tokens; 0: from all (%(default)s)"
    )
    sample.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that together have probability P; 1: from all",
    )
    sample.add_argument(
        "--drop",
        type=at_least_one,
        default=1,
        metavar="N",
        help="so many of the oldest tokens leave when the context is full; more is faster (%(default)s)",
    )
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--json", action="store_true", help="print one JSON object for each prompt")
    sample.add_argument("--ema", action="store_true", help=_EMA)
    sample.set_defaults(run=_sample)

    _add_eval(verbs)
    timeline = verbs.add_parser("timeline", help="draw a measured pipeline step above its simulation")
    timeline.add_argument("run_dir", type=Path, metavar="RUN", help="run folder, trained with log.timeline_steps")
    timeline.add_argument("--step", type=at_least_one, help="one of log.timeline_steps (default: the newest)")
    timeline.add_argument(
        "--out", type=Path, default=Path("timeline.svg"), help=".svg, .png, .json for Perfetto, .txt (%(default)s)"
    )
    timeline.set_defaults(run=_timeline)
    _huggingface_verbs(verbs)
    _verbs_of_run_folders(verbs)
    plan_and_doctor.add_verbs(verbs)
    watch_run.add_verbs(verbs)
    return parser


def _add_train(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = verbs.add_parser("train", help="train from a TOML file; resumes the run in run.dir")
    add_configuration(train)
    train.add_argument(
        "--ranks",
        type=at_least_one,
        help="ranks to start on this machine (default: product of the degrees, else one per GPU)",
    )
    train.add_argument(
        "--max-restarts",
        type=at_least_zero,
        default=0,
        metavar="N",
        help="restart all ranks from the newest checkpoint, at most N times (%(default)s), if a rank was killed or "
        "lost; not if the configuration, the data, a NaN or a full disk would end the run again",
    )
    train.add_argument(
        "--keep-alive",
        action="store_true",
        help="when a rank is killed, stopped or fails, put another process in its place and go on, see [elastic]",
    )
    train.add_argument(
        "--nodes",
        type=node_addresses,
        metavar="HOST:PORT,...",
        help="with --keep-alive: all machines of the run, the same list on each; --ranks is then of each machine",
    )
    train.add_argument("--node", type=at_least_zero, metavar="N", help="which of --nodes this one is, from 0")
    train.add_argument(
        "--profile-memory",
        action="store_true",
        help="snapshots of rank 0's GPU memory in updates 1 and 2; log.memory_steps and log.memory_ranks say others",
    )
    train.add_argument("--print-config", action="store_true", help="print the resolved TOML and end")
    train.set_defaults(run=run_train)


def _add_eval(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = verbs.add_parser("eval", help="evaluate a trained model on tasks of EleutherAI's lm-eval; extra: eval")
    verb.add_argument("path", type=Path, metavar="PATH", help="run folder, checkpoint folder or folder of an export")
    verb.add_argument("--tasks", required=True, metavar="A,B", help="names of tasks; * and ? stand for any letters")
    verb.add_argument("--include", type=Path, metavar="DIR", help="folder with further tasks, as lm-eval's YAML files")
    verb.add_argument(
        "--shots", type=at_least_zero, metavar="N", help="examples before each question (default: the task's)"
    )
    verb.add_argument("--limit", type=at_least_one, metavar="N", help="questions of each task at most")
    verb.add_argument("--batch", type=at_least_one, default=8, metavar="N", help="rows read at once (%(default)s)")
    verb.add_argument(
        "--gen-tokens", type=at_least_one, metavar="N", help="most tokens of an answer (default: the task's)"
    )
    verb.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    verb.add_argument("--tokenizer", default="", help="a tokenizer.json or bytes (default: the run's own)")
    verb.add_argument("--eod-token", default="", metavar="NAME", help="token of the tokenizer that ends a document")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.add_argument("--ema", action="store_true", help=_EMA)
    verb.set_defaults(run=_eval)


class _Version(argparse.Action):
    """Looks the versions up when they are asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for name in ("gpt", "indexed-data", "blending", "dist-ckpt", "pipeline", "fsdp"):
            print(f"sixfold-{name} {version(f'sixfold-{name}')}")
        parser.exit()


def _huggingface_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = verbs.add_parser("export", help="write a run's model as a Hugging Face folder")
    export.add_argument("path", type=Path, metavar="PATH", help="run folder or checkpoint folder")
    export.add_argument("out", metavar="OUT_DIR", help="a folder that does not exist or is empty")
    export.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    export.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="default: dtype of the checkpoint; runs have fp32"
    )
    export.add_argument(
        "--max-shard-bytes", type=at_least_one, metavar="N", help="most bytes of values per file (5000000000)"
    )
    export.add_argument("--ema", action="store_true", help=_EMA)
    export.add_argument(
        "--lora", action="store_true", help="the adapters alone, as peft writes them; default: added to the weights"
    )
    export.set_defaults(run=_export)

    bring = verbs.add_parser("import", help="make a run folder of a Hugging Face folder, with a checkpoint of step 0")
    bring.add_argument("hf_dir", metavar="HF_DIR", help="folder with config.json and safetensors")
    bring.add_argument("run_dir", metavar="RUN_DIR", help="a folder that does not exist or is empty")
    bring.set_defaults(run=_import)


def _verbs_of_run_folders(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = verbs.add_parser("resize", help="have a run that is kept alive go on with another number of ranks")
    verb.add_argument("run_dir", type=Path, metavar="RUN", help="run folder, trained with --keep-alive")
    verb.add_argument("ranks", type=at_least_one, metavar="RANKS", help="see elastic.dp")
    verb.set_defaults(run=_resize)

    verb = verbs.add_parser(
        "verify-run", help="compare two runs bit by bit: the step, and the tensor or number, in which they first differ"
    )
    verb.add_argument("a", type=Path, metavar="A", help="folder of a run")
    verb.add_argument("b", type=Path, metavar="B", help="folder of another run")
    verb.add_argument("--no-checkpoints", action="store_true", help="compare metrics and digests alone")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=_verify_run)


def _add_prepare(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    prepare = verbs.add_parser("prepare", help="make token files of text; a document is a .txt file or a .jsonl line")
    prepare.add_argument("inputs", nargs="*", metavar="INPUT", help=".txt and .jsonl files")
    prepare.add_argument("--cpython", action="store_true", help="the demo's corpus instead of files")
    prepare.add_argument(
        "--out", required=True, metavar="PREFIX", help="path of the .bin and .idx files, without extension"
    )
    prepare.add_argument(
        "--tokenizer",
        default="bytes",
        help="a tokenizer.json, a folder with one, or bytes: a token per byte (%(default)s)",
    )
    prepare.add_argument(
        "--eod-token",
        default="",
        metavar="NAME",
        help="token that ends a document (default: the tokenizer's eos_token or a usual name)",
    )
    prepare.add_argument("--key", default="text", help="key of the text in a .jsonl line (%(default)s)")
    prepare.add_argument(
        "--documents",
        choices=("file", "paragraph", "line"),
        default="file",
        help="what is a document in a .txt file (%(default)s)",
    )
    prepare.add_argument(
        "--template", action="store_true", help="also store what the tokenizer's template adds, such as a BOS"
    )
    prepare.add_argument(
        "--messages-key",
        default="",
        metavar="NAME",
        help="key of the conversation in a .jsonl line, a list of messages; training counts what the assistant says",
    )
    prepare.add_argument(
        "--special-tokens",
        choices=("text", "ids"),
        default="text",
        help="how a text that spells a special token is stored: as text, or as the token's id (%(default)s)",
    )
    prepare.add_argument("--workers", type=at_least_one, default=1, help="processes (%(default)s)")
    prepare.set_defaults(run=_prepare)


def _demo(args: argparse.Namespace) -> int:
    from sixfold.gpt.commands.demo import demo

    with early_signals():
        return demo(args.dir, minutes=args.minutes, ranks=args.ranks)


def _prepare(args: argparse.Namespace) -> int:
    from sixfold.gpt.data import prepare

    if not args.cpython:
        names = ("tokenizer", "eod_token", "key", "documents", "template", "messages_key", "special_tokens", "workers")
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)  # notes of the build
            warnings.showwarning = lambda message, *_, **__: print(f"sixfold: {message}", file=sys.stderr)
            print(prepare.prepare(args.inputs, args.out, **{name: getattr(args, name) for name in names}))
        return 0
    if args.inputs or args.tokenizer != "bytes" or args.eod_token:
        raise ConfigError("prepare --cpython takes no other INPUT and writes bytes; prepare the files by a second call")
    corpus = prepare.prepare_cpython(args.out)
    for pair in (*corpus.train, corpus.valid):
        print(pair)
    print(f"sha256 of the text: {corpus.sha256}")
    return 0


def _plot(args: argparse.Namespace) -> int:
    from sixfold.gpt.observe.loss_plot import plot

    plot(args.runs, args.out, x=args.x, by_dataset=args.by_dataset, events=args.events)
    print(args.out)
    return 0


def _sample(args: argparse.Namespace) -> int:
    from sixfold.gpt.commands.sample import sample_run_many, stream_run

    names = ("tokenizer", "eod_token", "ema", "tokens", "temperature", "top_k", "top_p", "seed", "drop")
    options, prompts = {name: getattr(args, name) for name in names}, args.prompt or [""]
    if len(prompts) == 1:
        texts = [stream_run(args.path, prompts[0], **options)]
    else:
        texts = [iter([text]) for text in sample_run_many(args.path, prompts, **options)]
    for prompt, pieces in zip(prompts, texts, strict=True):
        if args.json:
            print(json.dumps({"prompt": prompt, "text": "".join(pieces), "seed": args.seed}))
            continue
        print(prompt, end="", flush=True)
        for piece in pieces:  # as it is written
            print(piece, end="", flush=True)
        print()
    return 0


def _eval(args: argparse.Namespace) -> int:
    from sixfold.gpt.commands.evaluate import evaluate, table

    names = ("shots", "limit", "batch", "gen_tokens", "tokenizer", "eod_token", "ema", "device")
    options = {name: getattr(args, name) for name in names}
    found = evaluate(args.path, args.tasks.split(","), include_path=args.include, **options)
    print(json.dumps(found) if args.json else table(found))
    if found["file"] and not args.json:
        print(found["file"])
    return 0


def _timeline(args: argparse.Namespace) -> int:
    from sixfold.gpt.observe.timeline import show

    said = show(args.run_dir, args.out, step=args.step)
    print(f"{args.out}: {said}")
    return 0


def _resize(args: argparse.Namespace) -> int:
    from sixfold.gpt.elastic.sizes import ask

    ask(args.run_dir, args.ranks)
    ranks = f"{args.ranks} rank{'s' * (args.ranks > 1)}"
    print(f"asked for {ranks}; the run's own terminal and metrics.jsonl say what comes of it")
    return 0


def _verify_run(args: argparse.Namespace) -> int:
    from sixfold.gpt.commands.verify_run import as_text, verify_run

    found = verify_run(args.a, args.b, checkpoints=not args.no_checkpoints)
    print(json.dumps(found) if args.json else as_text(found))
    return 0 if found["equal"] else 1


def _export(args: argparse.Namespace) -> int:
    if args.lora:
        from sixfold.gpt.huggingface.adapters import export_adapters

        if args.dtype or args.max_shard_bytes:
            raise ConfigError(
                "export --lora writes one file in the dtype of the checkpoint; leave --dtype and --max-shard-bytes out"
            )
        print(export_adapters(args.path, args.out, step=args.step, ema=args.ema))
        return 0
    from sixfold.gpt.huggingface.convert import MAX_SHARD_BYTES, export_model

    shard = args.max_shard_bytes or MAX_SHARD_BYTES
    print(export_model(args.path, args.out, step=args.step, dtype=args.dtype, max_shard_bytes=shard, ema=args.ema))
    return 0


def _import(args: argparse.Namespace) -> int:
    from sixfold.gpt.huggingface.convert import import_model

    print(import_model(args.hf_dir, args.run_dir))
    return 0
