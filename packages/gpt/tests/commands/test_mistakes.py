# ruff: noqa: E501 - a line of the table is a line of the terminal
"""What a mistake looks like to who made it: the command, and the one line that it ends with.

Read the table: each entry is what is wrong, the words behind ``sixfold train tiny.toml`` (or the whole command), the
exit status (2: configuration or usage; 1: the run failed) and the line; ``...`` stands for what the machine decides.
The commands run in this process, with a rank in place of the ranks; mistakes of several ranks are in ranks/.
"""

import json
import os
import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest
from gpt_helpers import TINY, write_pair

from sixfold.gpt.commands import cli
from sixfold.gpt.commands import train as train_verb
from sixfold.gpt.observe.metrics import MetricsWriter

TORCHRUN = "RANK=0 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29999"
POD = "WORLD_SIZE=2 MASTER_ADDR=localhost"

# what is wrong | words; VARIABLE=value in front are the launcher's | exit status | the line
TABLE = r"""
--- the file
no such file            | !train none.toml                      | 2 | none.toml: No such file or directory; give the path of a TOML configuration
a folder                | !train .                              | 2 | .: Is a directory; give the path of a TOML configuration
not TOML                | !train torn.toml                      | 2 | torn.toml: not TOML: Invalid value (at line 1, column 5)
a key in no table       | !train flat.toml                      | 2 | seq_length = 32 is in no table; the nearest key is data.seq_length
a key is missing        | !train no-lr.toml                     | 2 | optimizer.lr is not given, and there is no default; write it into the configuration, or optimizer.lr=VALUE behind its path
--- keys and values
a table misspelt        | trian.steps=3                         | 2 | [trian] is not a table of the configuration; the nearest is [train]
a key of another name   | optimizer.learning_rate=1             | 2 | optimizer.learning_rate is not a key of [optimizer]; the nearest is optimizer.lr
no value                | train.steps                           | 2 | override 'train.steps' is not section.key=value, as in optimizer.lr=1e-3
a text for a number     | train.steps=ten                       | 2 | train.steps is 'ten' (str); it is a whole number
a fraction              | train.steps=1.5                       | 2 | train.steps is 1.5 (float); it is a whole number
a text for a truth      | train.compile=yes                     | 2 | train.compile is 'yes' (str); it is true or false
below its range         | train.micro_batch_size=0              | 2 | train.micro_batch_size is 0; it is >= 1
not a number            | optimizer.lr=nan                      | 2 | optimizer.lr is nan; it is finite
an unknown choice       | train.precision=fp16                  | 2 | train.precision is 'fp16'; it is one of bf16, fp32, fp8; the nearest is bf16
an unknown schedule     | parallel.schedule=1f1b                | 2 | parallel.schedule is '1f1b'; it is one of ...; the nearest is one_f_one_b
deadline too short      | run.timeout_seconds=0.5               | 2 | run.timeout_seconds is 0.5; it is >= 1
--- numbers that do not go together
batch and microbatch    | train.global_batch_size=7             | 2 | train.global_batch_size is 7 and train.micro_batch_size * parallel.dp is 2 * 1 = 2; ... 6 or 8 works
a ramp that falls back  | train.batch_ramp=[[3,8],[2,16]]       | 2 | train.batch_ramp starts at steps [3, 2]; they ascend
query groups            | model.num_query_groups=3              | 2 | model.num_query_groups is 3 and model.num_attention_heads 4; groups divide heads: 2 works
heads that do not divide | parallel.tp=3                        | 2 | model.num_attention_heads is 4 and parallel.tp is 3; tp divides it: parallel.tp = 2 works
chunks of the sequence  | parallel.cp=3                         | 2 | data.seq_length is 32; it is a multiple of 2 * parallel.cp = 6: 30 or 36 works
no experts to split     | parallel.ep=2                         | 2 | parallel.ep is 2 and model.num_experts 0, so there are no experts to split; parallel.ep = 1 works, or model.num_experts = 2
experts that do not divide | parallel.ep=3 model.num_experts=4  | 2 | model.num_experts is 4 and parallel.ep is 3; ep divides it: parallel.ep = 2 works
layers lost             | parallel.layers_per_stage=[3]         | 2 | parallel.layers_per_stage sums to 3 and model.num_layers is 4; they are equal
stages of a V schedule  | parallel.schedule=zb_v                | 2 | parallel.stages_per_rank is 1 and parallel.schedule 'zb_v' puts 2 stages on a rank; parallel.stages_per_rank = 2 works
groups of a schedule    | parallel.pp=2 parallel.schedule=interleaved parallel.stages_per_rank=2 pipeline.group=1 | 2 | pipeline.group is 1 and parallel.pp 2; ... pipeline.group = 2 works, or 0 for the default
a schedule's microbatches | parallel.schedule=pipedream_2bw parallel.pp=4 train.global_batch_size=4 parallel.sharding=no_shard train.clip_grad=0 model.tie_embeddings=false | 2 | train.global_batch_size is 4, which is 2 microbatches, and parallel.schedule 'pipedream_2bw' on parallel.pp = 4 ranks takes 3 or more: train.global_batch_size = 6 works
weights of a schedule   | parallel.schedule=pipedream_2bw parallel.pp=4 | 2 | parallel.sharding is 'optim_grads_params' and parallel.schedule 'pipedream_2bw': its versions are of whole weights; parallel.sharding = 'no_shard' works
weights and datasets    | data.weights=[1]                      | 2 | data.weights has 1 entries and data.blend 2; give one each
no weight               | data.weights=[0,0]                    | 2 | data.weights is [0.0, 0.0]; at least one weight is > 0
one name twice          | data.blend=["wiki","./wiki"]          | 2 | data.blend: two datasets are called 'wiki'; tell them apart by data.names
a split of two          | data.split=90,20                      | 2 | data.split is '90,20'; it is three numbers >= 0, the first > 0, as 98,2,0
nothing to evaluate     | eval.every=1 data.split=100,0,0       | 2 | eval.every is 1 and data.split '100,0,0' leaves no validation data; name some in data.valid, or set eval.every = 0
memory of a planet      | model.ffn_hidden_size=10000000000000  | 1 | rank 0: memory ran out: ... bytes could not be allocated. The model has ... parameters. To need less, take more ranks, ...
--- data
no such data            | data.blend=["wiki","cod"]             | 1 | cod.idx: found No such file or directory, expected a file ... PREFIX.bin and PREFIX.idx are read
a pair cut short        | data.blend=["cut","code"]             | 1 | cut.bin: found ... bytes, expected ... bytes, as cut.idx says ... write the pair again
an index cut short      | data.blend=["short","code"]           | 1 | short.idx: found ... bytes, expected at least ... bytes ...: write the pair again
not an index            | data.blend=["other","code"]           | 1 | other.idx: found b'XMIDIDX\x00\x00', expected b'MMIDIDX\x00\x00' ... Write the pair again from its source
another tokenizer       | data.blend=["foreign","code"]         | 2 | data at foreign was made by tokenizer 'gpt2.json' (sha256 abababababab), but data.tokenizer is 'bytes' ...; all data of a run has one tokenizer
a torn PREFIX.json      | data.blend=["torn","code"]            | 2 | torn.json is not JSON (...); it names the tokenizer of the pair: prepare the data again
no such tokenizer       | data.tokenizer=none.json              | 2 | tokenizer 'none.json' cannot be read (No such file or directory); name 'bytes' or a tokenizer.json
a vocabulary of another   | model.vocab_size=100                | 2 | model.vocab_size is 100 and id 256 ends a document of this tokenizer; model.vocab_size is the tokenizer's, see what `sixfold prepare` printed
ids beyond the vocabulary | model.vocab_size=100 data.tokenizer= | 1 | code: document ..., token ... is id ...; model.vocab_size is 100, ids lie below it. Use the tokenizer that made the data
--- folders
run.dir is a file       | run.dir=torn.toml                     | 2 | run.dir is 'torn.toml' and torn.toml is a file; choose another run.dir, or move the file
run.dir below a file    | run.dir=torn.toml/run                 | 2 | run.dir is 'torn.toml/run' and ...torn.toml is a file; choose another run.dir, or move the file
a file of checkpoints   | run.dir=odd                           | 2 | run.dir is 'odd' and odd/checkpoints is a file; a run keeps a folder there
a folder of metrics     | run.dir=strange                       | 2 | run.dir is 'strange' and strange/metrics.jsonl is a folder; a run keeps a file there
may not be written      | run.dir=locked                        | 2 | run.dir is 'locked' and locked may not be written; choose another run.dir
cannot be made          | run.dir=/proc/none                    | 2 | run.dir is '/proc/none' and cannot be made (No such file or directory: /proc/none); choose another run.dir
another run is in it    | run.dir=busy                          | 2 | run.dir is 'busy' and another run is at work there (process 17 on node3); choose another run.dir, or end that run
a home folder           | run.dir=~/run                         | 2 | run.dir is '~/run'; ~ is not replaced here: write the folder's path out
a URL                   | run.dir=s3://bucket/run               | 2 | run.dir is 's3://bucket/run'; it is a folder of a mounted file system, not a URL: mount it
no start weights        | checkpoint.init_from=none             | 2 | none is neither a checkpoint nor a run folder with one: ...; name a folder that a run wrote
--- going on
nothing to go on from   | checkpoint.resume=must                | 2 | checkpoint.resume is "must" and run/checkpoints holds no whole checkpoint; "auto" starts anew
a run is there          | run.dir=done checkpoint.resume=never  | 2 | checkpoint.resume is "never" and done/checkpoints/step-00000001 is there; choose another run.dir
another seed            | run.dir=done train.seed=5             | 2 | a resumed run cannot change train.seed (was 1234, is 5); put back what was, or start a new run.dir ...
another model           | run.dir=done model.num_layers=5       | 2 | a resumed run cannot change model.num_layers (was 4, is 5); put back what was, or start a new run.dir ...
other data of that name | run.dir=done data.blend=["new/wiki","code"] | 1 | the saved state does not fit: datasets.0.tokens was ... and is ..., and the 8 positions already read depend on it; restore it, ...
ranks that do not fit   | run.dir=done --ranks 3                | 2 | train.global_batch_size is 8 and train.micro_batch_size * parallel.dp is 2 * 3 = 6; ... 6 or 12 works
only damaged checkpoints | run.dir=torn                         | 1 | torn/checkpoints holds no whole checkpoint; the newest is damaged: ...common.pt: ... Restore one, or move step-00000001 away to start anew
learning rate too large | run.dir=burst optimizer.lr=1e30       | 1 | step 2, rank 0: the loss is ... and the gradient norm nan. The first value that is not finite is the ... of layers.... The weights are those before the step. ... the data of this step, positions 8 to 15
--- launchers
too many ranks          | --ranks 3 parallel.pp=2               | 2 | parallel.pp * cp * tp = 2 * 1 * 1 = 2 does not divide the world of 3 ranks; a world of 2 or 4 works, or ...
WORLD_SIZE and degrees  | @WORLD_SIZE=3 {torchrun} parallel.pp=2 | 2 | parallel.pp * cp * tp = 2 * 1 * 1 = 2 does not divide the world of 3 ranks; a world of 2 or 4 works, or ...
a rank outside          | @WORLD_SIZE=3 {torchrun} RANK=5       | 2 | torchrun says that this is rank 5 of 3; ranks are 0 to 2
half a launcher         | @RANK=0 WORLD_SIZE=2                  | 2 | RANK is 0 and WORLD_SIZE 2, and MASTER_ADDR and MASTER_PORT are not set; start the ranks by torchrun or a PyTorchJob, ...
a port that is none     | @RANK=0 {pod} MASTER_PORT=abc         | 2 | MASTER_PORT is 'abc'; its launcher sets it to a whole number
a port in use           | @RANK=0 {pod} MASTER_PORT={port}      | 1 | rank 0 of 2 (pytorchjob, tcp://localhost:{port}): the port is in use on this machine; set MASTER_PORT to a free one on all ranks
nobody at the port      | @RANK=1 {pod} MASTER_PORT={free} run.timeout_seconds=1 | 1 | rank 1 of 2 (pytorchjob, tcp://localhost:{free}) did not meet the others within 1 s: nobody listens there (Connection refused). Are all 2 ranks started, and can they reach that address?
an unknown host         | @RANK=1 WORLD_SIZE=2 MASTER_ADDR=no-such.invalid MASTER_PORT=1 run.timeout_seconds=1 | 1 | rank 1 of 2 (...) did not meet the others within 1 s: the host name no-such.invalid is not known here (...). Are all ...
mpirun                  | @OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 | 2 | mpirun started 2 processes (OMPI_COMM_WORLD_SIZE); it tells them no place to meet: start the ranks by torchrun, srun or `sixfold train --ranks 2`
a torn node list        | @SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=gpu[3-1] | 2 | node list 'gpu[3-1]': '3-1' is no number or range; lists look like gpu[01-03,07]
restarts of torchrun    | @WORLD_SIZE=2 {torchrun} --max-restarts 1 | 2 | --max-restarts is 1 and torchrun started this rank; give the number to torchrun --max-restarts: ...
a node alone            | !train tiny.toml --keep-alive --node 0 | 2 | --node is given without --nodes; give both: all machines, and which one this is, from 0
nodes alone             | !train tiny.toml --keep-alive --nodes a:1,b:1 | 2 | --nodes is given without --node; give both: ...
nodes of no kept run    | !train tiny.toml --nodes a:1,b:1 --node 0 | 2 | --nodes is given without --keep-alive, which it is for; otherwise use torchrun or srun
a node too many         | !train tiny.toml --keep-alive --nodes a:1,b:1 --node 2 | 2 | --node is 2, and --nodes has 2; they are numbered from 0
ranks of three nodes    | !train tiny.toml --keep-alive --nodes a:1,b:1,c:1 --node 0 parallel.dp=4 | 2 | --nodes has 3 machines and the configuration 4 ranks, which do not divide; give --ranks, the number on each machine
another one's address   | !train tiny.toml --keep-alive --nodes 192.0.2.1:29400,b:1 --node 0 | 2 | node 0 of --nodes is 192.0.2.1:29400, which is no address of this machine; is --node right?
a node's port in use    | !train tiny.toml --keep-alive --nodes localhost:{port},b:1 --node 0 | 2 | node 0 of --nodes is localhost:{port}, which is in use on this machine; choose another port, or end what listens there
no GPU here             | run.device=cuda                       | 2 | run.device is "cuda" and torch sees no GPU here; use "cpu", or a torch built for this GPU
--- other verbs
no such run             | !sample none                          | 2 | none is neither a checkpoint nor a run folder with one: ...; name a folder that a run wrote
a negative temperature  | !sample done --temperature -1         | 2 | temperature is -1.0; it is >= 0, and 0 takes the likeliest token
no metrics              | !plot none                            | 2 | none holds no metrics.jsonl; name the run.dir of a run
another kind of picture | !plot done --out loss.gif             | 2 | --out is 'loss.gif'; a plot ends in .svg or .png
no text                 | !prepare none.txt --out new           | 2 | input none.txt is not a file; name text or jsonl files, or --cpython
a pair is there         | !prepare torn.toml --out wiki         | 2 | wiki.bin exists and prepare replaces nothing; choose another --out or remove the pair
a line without text     | !prepare torn.jsonl --out new         | 1 | torn.jsonl:2: no string at key 'text'
an extra is missing     | !plot done --out loss.svg             | 2 | a plot needs matplotlib: pip install 'sixfold-gpt[plot]'
an extra is missing     | data.tokenizer=torn.json              | 2 | tokenizer 'torn.json' needs the library tokenizers: pip install 'sixfold-gpt[tokenizers]'
"""


def entries():
    for line in TABLE.splitlines():
        if line and not line.startswith("---"):
            name, words, status, expected = (part.strip() for part in line.split("|", 3))
            yield pytest.param(words, int(status), expected, id=f"{name} ({words})")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, configurations and run folders, whole and broken, in one place."""
    root = tmp_path_factory.mktemp("mistakes")
    (root / "new").mkdir()
    for name, documents, seed in (("wiki", 120, 1), ("code", 80, 2), ("new/wiki", 120, 3)):
        write_pair(root / name, documents, seed)
    write_configurations(root)
    write_broken_data(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(train_verb, "start_ranks", as_one_rank)
        assert cli.main(["train", "tiny.toml", "run.dir=done", "train.steps=1"]) == 0
    write_run_folders(root)
    return root


def write_configurations(root):
    text = TINY.format(blend='"wiki", "code"', run="run")
    (root / "tiny.toml").write_text(text)
    (root / "no-lr.toml").write_text(text.replace("lr = 3e-3\n", ""))
    (root / "flat.toml").write_text("seq_length = 32\n" + text)
    (root / "torn.toml").write_text("a = = 3")
    (root / "torn.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')


def write_broken_data(root):
    data, index = ((root / f"wiki.{end}").read_bytes() for end in ("bin", "idx"))
    for name, one, other in (
        ("cut", data[:-10], index),
        ("short", data, index[:-40]),
        ("other", data, b"X" + index[1:]),
        ("foreign", data, index),
        ("torn", data, index),
    ):
        (root / f"{name}.bin").write_bytes(one)
        (root / f"{name}.idx").write_bytes(other)
    identity = {"name": "gpt2.json", "identity": {"class": "FileTokenizer", "sha256": "ab" * 32}}
    (root / "foreign.json").write_text(json.dumps(identity))
    (root / "torn.json").write_text("{")


def write_run_folders(root):
    for name in ("odd", "strange", "locked", "busy", "burst"):
        (root / name).mkdir()
    (root / "odd" / "checkpoints").write_text("")
    (root / "strange" / "metrics.jsonl").mkdir()
    (root / "busy" / "metrics.jsonl").write_text(
        '{"kind": "start", "ranks": [{"rank": 0, "pid": 17, "host": "node3"}]}\n'
    )
    shutil.copytree(root / "done", root / "torn")
    (root / "torn" / "checkpoints" / "step-00000001" / "common.pt").unlink()


def as_one_rank(target, ranks, args, **options):
    """In place of the ranks: one, in this process; its errors are raised as they are."""
    return target(*args)


@pytest.fixture
def here(folder, monkeypatch):
    """The folder as the working directory, a port in use, one that is free; a run at work; no extras, no launcher."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train_verb, "start_ranks", as_one_rank)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode))
    for name in ("matplotlib", "matplotlib.pyplot", "tokenizers"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_", "PET_", "SIXFOLD_"))]:
        monkeypatch.delenv(name)
    with socket.create_server(("localhost", 0)) as used, socket.socket() as bound, MetricsWriter("busy/metrics.jsonl"):
        bound.bind(("localhost", 0))  # and does not listen
        yield {"port": used.getsockname()[1], "free": bound.getsockname()[1], "torchrun": TORCHRUN, "pod": POD}


def command(words, monkeypatch):
    """The arguments of the command; variables before them are set."""
    if words.startswith("!"):
        return shlex.split(words[1:])
    left = words.removeprefix("@").split()
    while words.startswith("@") and left and re.match(r"[A-Z_]+=", left[0]):
        monkeypatch.setenv(*left.pop(0).split("=", 1))
    return ["train", "tiny.toml", *left]


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
@pytest.mark.parametrize(("words", "status", "expected"), list(entries()))
@pytest.mark.slow
def test_a_mistake_is_explained_in_one_line(here, monkeypatch, capfd, words, status, expected):
    for name, value in here.items():
        words, expected = words.replace(f"{{{name}}}", str(value)), expected.replace(f"{{{name}}}", str(value))
    found = cli.main(command(words, monkeypatch))
    captured = capfd.readouterr()
    told = [line for line in captured.err.splitlines() if line.startswith("sixfold")]
    assert (found, len(told), captured.err.splitlines()[-1:]) == (status, 1, told), captured.err
    assert "Traceback" not in captured.err
    pattern = ".*".join(re.escape(part.strip(" ")) for part in f"sixfold: {expected}".split("..."))
    assert re.fullmatch(pattern, told[0]), f"\n{told[0]}\n{expected}"


def test_the_table_has_forty_mistakes_and_no_line_twice():
    lines = [entry.values for entry in entries()]
    assert len(lines) >= 40 and len({words for words, _, _ in lines}) == len(lines)
