"""Models of Hugging Face, in and out, one tensor at a time.

    config.json, *.safetensors --> import_model (this file) --> run folder: config.toml, checkpoints/step-00000000
    run folder or checkpoint of any layout --> export_model (this file) --> config.json, *.safetensors

Importing maps the files and lets sixfold.dist_ckpt write what it finds there: values keep their dtype, and a run reads
its shards of them into float32, which is exact. Exporting reads a few rows at a time. Neither holds a model in memory.

[Note: vocabulary padding] Ours has rows of zeros up to a multiple of model.vocab_multiple; a published table has none.
They are a record of their own on the way in, and are left out on the way out.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import retention
from sixfold.dist_ckpt.hugging_face import model_files
from sixfold.gpt.checkpoints.trained_model import (
    IMPORTED,
    TABLES_OF_IDS,
    canonical_shapes,
    check_tensors,
    longest_row,
    saved_common,
    saved_config,
    saved_lora,
    saved_model,
    saved_tokenizer,
    weights_prefix,
)  # fmt: skip
from sixfold.gpt.checkpoints.training_state import ORIGIN, find
from sixfold.gpt.config.model_config import EXPERT_KEYS, IDLE_AT_DEFAULT
from sixfold.gpt.config.rules import refuse_path
from sixfold.gpt.config.table import keys_of
from sixfold.gpt.config.toml import write_tables
from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.data.tokenizer import FileTokenizer, Tokenizer, recorded_identity
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.files.atomic_folder import new_folder, refuse_taken
from sixfold.gpt.huggingface import config as hf_config
from sixfold.gpt.huggingface.adapters import Adapters
from sixfold.gpt.huggingface.safetensors_extra import safetensors_library
from sixfold.gpt.huggingface.tensor_names import Piece, hf_name, pieces
from sixfold.gpt.parallel.weight_sharding import is_expert

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
PART_BYTES = 64 * 2**20  # read and converted at a time when a model is exported
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What belongs to a tokenizer, and how to sample: carried along as they are.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
CARRIED = (*TOKENIZER_FILES, "generation_config.json")
_QWEN2 = "Qwen2Tokenizer"
MODEL_TYPE = "model_type"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


# ---- in


def import_model(hf_dir: str | Path, run_dir: str | Path) -> Path:
    """Write the model of a Hugging Face folder as a run folder: config.toml ([model]) and a checkpoint of step 0.

    The checkpoint has ``model.*`` alone, in the dtype of the files. ``load_model`` opens it; a run of any layout takes
    its weights by ``checkpoint.init_from``, or goes on from step 0 if it is its own ``run.dir``. Files of the tokenizer
    and generation_config.json are copied.

    Returns:
        The checkpoint's folder.
    Raises:
        ConfigError: what is none of ARCHITECTURES, or computes what they do not; tensors that are missing, unknown,
            mis-shaped or there twice; ``run_dir`` is not empty; the extra ``hf`` is not installed.
        CheckpointError: the checkpoint cannot be written.
    """
    refuse_path("HF_DIR", str(hf_dir))
    refuse_path("RUN_DIR", str(run_dir))
    library, source, target = safetensors_library(), Path(hf_dir), Path(run_dir)
    refuse_taken(target, "a run folder")
    raw = _read_json(source / "config.json")
    config = hf_config.read(raw)
    with ExitStack() as stack:
        found = _open_files(library, source, stack)
        kind = hf_config.kind_of(raw)
        tensors = _matched(source, config, found, kind.tensors)
        text = write_tables({"model": {key: getattr(config, key) for key in _written_keys(config)}})
        origin = {key: raw[key] for key in _TOKENS if raw.get(key) is not None}
        origin |= {"max_position_embeddings": hf_config.longest(raw), MODEL_TYPE: kind.model_type}
        common = {"step": 0, "samples": 0, "tokens": 0, "config": text, IMPORTED: origin, ORIGIN: origin}
        with new_folder(target, "a run folder") as draft:
            (draft / "config.toml").write_text(text, encoding="utf-8")
            _carry(source, draft)
            state = common | {
                f"model.{name}": _records(name, tensors[name], config, by_expert=is_expert(name)) for name in tensors
            }
            dist_ckpt.save(state, retention.step_path(draft / "checkpoints", 0), group=None)
    return retention.step_path(target / "checkpoints", 0)


def _written_keys(config: GPTConfig) -> list[str]:
    """Keys of [model] that an import decides: those that are not left at a default of no effect."""
    idle = () if config.num_experts else ("num_experts", *EXPERT_KEYS)
    kind = type(config)
    named = (key for key in keys_of(kind) if key not in idle)
    return [key for key in named if key not in IDLE_AT_DEFAULT or getattr(config, key) != getattr(kind, key)]


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of a file, not read yet."""

    file: Any
    name: str
    place: str
    shape: tuple[int, ...]
    dtype: str

    def tensor(self) -> torch.Tensor:
        """Its values, mapped."""
        tensor: torch.Tensor = self.file.get_tensor(self.name)
        return tensor


def _records(
    name: str, found: Sequence[_Found], config: GPTConfig, *, by_expert: bool
) -> list[dist_ckpt.ShardedTensor]:
    """The whole tensor as rows of the padded one, and its padding; see [Note: vocabulary padding].

    Of experts each one's matrix is a record.
    """
    key, tensor = f"model.{name}", found[0].tensor()
    if by_expert:
        shape = (len(found), *tensor.shape)
        return [
            dist_ckpt.ShardedTensor(
                key,
                one.tensor()[None],
                tensor.dtype,
                (1, *tensor.shape),
                shape,
                (expert, *(0 for _ in tensor.shape)),
                None,
            )
            for expert, one in enumerate(found)
        ]
    rows = config.padded_vocab_size if name in TABLES_OF_IDS else len(tensor)
    parts, shape = [tensor], (rows, *tensor.shape[1:])
    if rows > len(tensor):
        parts.append(tensor.new_zeros(rows - len(tensor), *tensor.shape[1:]))
    at, records = 0, []
    for part in parts:
        offset = (at, *(0 for _ in shape[1:]))
        records.append(dist_ckpt.ShardedTensor(key, part, part.dtype, tuple(part.shape), shape, offset, None))
        at += len(part)
    return records


def _open_files(library: Any, source: Path, stack: ExitStack) -> dict[str, list[_Found]]:
    """Every tensor of the folder by name, wherever it lies: once, if all is well."""
    found: dict[str, list[_Found]] = {}
    problems: list[str] = []
    names, index = _files_of(source, problems)
    for file_name in names:
        try:
            opened = stack.enter_context(library.safe_open(str(source / file_name), framework="pt"))
        except FileNotFoundError:
            problems.append(f"{file_name} is not there")
            continue
        except Exception as error:  # the library's own class, and what the system says
            problems.append(f"{file_name} is not a whole safetensors file ({error})")
            continue
        for name in opened.keys():  # noqa: SIM118 - not a dict
            part = opened.get_slice(name)
            one = _Found(opened, name, file_name, tuple(part.get_shape()), part.get_dtype())
            found.setdefault(name, []).append(one)
    if not problems:
        for name, files in index.items():
            if not set(files) & {one.place for one in found.get(name, ())}:
                problems.append(f"{name} is not in {' or '.join(sorted(set(files)))}, where {INDEX} has it")
        problems += [
            f"{name} is in {found[name][0].place} and not in {INDEX}" for name in found if index and name not in index
        ]
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    return found


def _files_of(source: Path, problems: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The files to read, and what the index says of each tensor."""
    if (source / INDEX).exists():
        pairs: list[tuple[str, Any]] = []

        def keep(items: list[tuple[str, Any]]) -> dict[str, Any]:
            pairs.extend((key, value) for key, value in items if isinstance(value, str))
            return dict(items)

        table = _read_json(source / INDEX, keep).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise ConfigError(f"{source / INDEX} has no weight_map of names to files")
        index: dict[str, list[str]] = {}
        for name, file in pairs:
            if name in table:
                index.setdefault(name, []).append(file)
        files = sorted({file for places in index.values() for file in places})
        problems += [f"{INDEX} names {file!r}, which is no file of the folder" for file in files if "/" in file]
        twice = [name for name, places in index.items() if len(set(places)) > 1]
        problems += [f"{name} is twice in {INDEX} ({' and '.join(index[name])})" for name in twice]
        return [file for file in files if "/" not in file], index
    if (source / "model.safetensors").exists():
        return ["model.safetensors"], {}
    other = sorted(path.name for path in source.glob("*.bin")) if source.is_dir() else []
    remedy = f"; {other[0]} is pickled: save the model with safe_serialization=True" if other else ""
    raise ConfigError(f"{source} holds neither model.safetensors nor {INDEX}{remedy}")


def _matched(
    source: Path, config: GPTConfig, found: dict[str, list[_Found]], tensors: Mapping[str, str]
) -> dict[str, list[_Found]]:
    """Canonical name -> its pieces, for each tensor that the model has.

    Raises:
        ConfigError: one that lists all that is missing, unknown, there twice, of another shape or no float.
    """
    ours = {name: pieces(name, shape, tensors) for name, shape in canonical_shapes(config).items()}
    wanted = {piece.name: piece for some in ours.values() for piece in some}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    for name, places in found.items():
        one = places[0]
        if len(places) > 1:
            problems.append(f"{name} is in {' and in '.join(place.place for place in places)}")
        if name not in wanted:
            if not _is_surplus(name, one, config, found):
                problems.append(f"{name} is no tensor of the model")
            continue
        shape = wanted[name].shape
        if one.shape != shape:
            problems.append(f"{name} is of shape {list(one.shape)} and config.json says {list(shape)}")
        if one.dtype not in ("F32", "BF16", "F16"):
            problems.append(f"{name} is of dtype {one.dtype}; it is F32, BF16 or F16")
    for name, some in ours.items():
        dtypes = sorted({found[piece.name][0].dtype for piece in some if piece.name in found})
        if len(dtypes) > 1:
            problems.append(f"{hf_name(name, tensors)} is of dtypes {' and '.join(dtypes)}; all experts' are one")
    if problems:
        raise ConfigError(f"{source}: {'; '.join(problems)}")
    return {name: [found[piece.name][0] for piece in some] for name, some in ours.items()}


def _is_surplus(name: str, one: _Found, config: GPTConfig, found: Mapping[str, list[_Found]]) -> bool:
    """Tensors that transformers makes itself: RoPE's frequencies in files of old, and a head that is the embedding."""
    if name.startswith("model.") and name.endswith("rotary_emb.inv_freq"):
        return True
    table = found.get("model.embed_tokens.weight")
    if name != "lm_head.weight" or not config.tie_embeddings or not table or table[0].shape != one.shape:
        return False
    if torch.equal(one.tensor(), table[0].tensor()):
        return True
    raise ConfigError("lm_head.weight is not model.embed_tokens.weight, and config.json says that they are tied")


# ---- out


def export_model(
    path: str | Path,
    out_dir: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    ema: bool = False,
) -> Path:
    """Write a run's model as a Hugging Face folder: config.json and model.safetensors, or shards with an index.

    Adapters ([lora]) are added to the weights.

    Args:
        path: run folder or checkpoint folder, of any layout.
        step: the checkpoint of that step; None takes the newest whole one.
        dtype: "fp32", "bf16" or "fp16"; None keeps the dtype of the checkpoint (a run has fp32).
        max_shard_bytes: most bytes of values in a file. A larger model is split into several files with an index.
        ema: the average of its weights (``optimizer.ema_decay``) in their place.
    Returns:
        ``out_dir``. A tokenizer.json and generation_config.json lie in it if the run has them.
    Raises:
        ConfigError: no checkpoint there, tensors that are not those of its [model], a model that no architecture
            computes, values that ``dtype`` cannot hold, ``out_dir`` is not empty, or the extra ``hf`` is not installed.
        CheckpointError: it is damaged.
    """
    refuse_path("OUT_DIR", str(out_dir))
    safetensors_library()  # refused before anything is read
    target = Path(out_dir)
    refuse_taken(target, "a Hugging Face folder")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; it is >= 1")
    folder = find(path, step)
    config = saved_model(folder)
    kind = hf_config.architecture_of(config, _model_type(folder))
    prefix = weights_prefix(folder, ema=ema)
    lora = saved_lora(folder)
    check_tensors(folder, config, prefix, lora)
    names, metadata = canonical_shapes(config), dist_ckpt.load_tensors_metadata(folder)
    stored = {name: metadata[f"{prefix}{name}"] for name in names}
    ours = {piece.name: (name, piece) for name, shape in names.items() for piece in pieces(name, shape, kind.tensors)}
    records = {
        key: _record(key, piece.shape, DTYPES[dtype] if dtype else stored[name].dtype)
        for key, (name, piece) in ours.items()
    }
    files = model_files.plan_files(records, max_shard_bytes)
    order = [key for file in files for key in file.keys]
    with new_folder(target, "a Hugging Face folder") as draft:
        wanted = [(*ours[key], records[key].dtype) for key in order]
        model_files.write_files(draft, files, _values(folder, stored, wanted, Adapters(folder, lora, prefix)))
        if len(files) > 1:
            (draft / INDEX).write_bytes(model_files.index_of(files))
        dtypes = Counter({str(r.dtype).removeprefix("torch."): 0 for r in records.values()})
        for r in records.values():
            dtypes[str(r.dtype).removeprefix("torch.")] += prod(r.global_shape)
        _write_beside(draft, folder, config, dtypes.most_common(1)[0][0])
    return target


def _record(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> dist_ckpt.ShardedTensor:
    return dist_ckpt.ShardedTensor(key, None, dtype, shape, shape, (0,) * len(shape), None)


def _values(
    folder: Path,
    stored: Mapping[str, dist_ckpt.ShardedTensor],
    wanted: Sequence[tuple[str, Piece, torch.dtype]],
    adapters: Adapters,
) -> Iterator[torch.Tensor]:
    """The rows of each piece in the dtype wanted, ``PART_BYTES`` read at a time; padding is left out."""
    batch: dict[int, dist_ckpt.ShardedTensor] = {}
    dtypes: list[torch.dtype] = []
    filled = 0
    for name, piece, dtype in wanted:
        for part in _row_parts(stored[name], piece):
            if filled and filled + _nbytes(part) > PART_BYTES:
                yield from _converted(folder, batch, dtypes, adapters)
                batch, dtypes, filled = {}, [], 0
            batch[len(batch)] = part
            dtypes.append(dtype)
            filled += _nbytes(part)
    yield from _converted(folder, batch, dtypes, adapters)


def _row_parts(whole: dist_ckpt.ShardedTensor, piece: Piece) -> Iterator[dist_ckpt.ShardedTensor]:
    rows, *rest = piece.shape
    expert = () if piece.expert is None else (piece.expert,)
    step = max(1, PART_BYTES // max(1, prod(rest) * whole.dtype.itemsize))
    for low in range(0, rows, step):
        offset = (*expert, low, *(0 for _ in rest))
        local = (*(1 for _ in expert), min(step, rows - low), *rest)
        yield dist_ckpt.ShardedTensor(whole.key, None, whole.dtype, local, whole.global_shape, offset, None)


def _nbytes(part: dist_ckpt.ShardedTensor) -> int:
    return prod(part.local_shape) * part.dtype.itemsize


def _converted(
    folder: Path, batch: dict[int, dist_ckpt.ShardedTensor], dtypes: list[torch.dtype], adapters: Adapters
) -> Iterator[torch.Tensor]:
    """Read a batch of rows; each is let go of when the next is asked for."""
    loaded = dist_ckpt.load(dict(batch), folder, group=None, validate_access_integrity=False)
    for number, dtype in enumerate(dtypes):
        part = batch[number]
        name = part.key.rpartition("model.")[2]  # behind the prefix of weights or of their average
        values = adapters.add(name, part.global_offset[0], loaded.pop(number))
        converted = values.to(dtype)
        if converted.dtype != values.dtype and bool((converted.isinf() & ~values.isinf()).any()):
            largest, key = float(values.abs().max()), part.key
            raise ConfigError(f"{key} has values up to {largest:g}, which {dtype} does not hold: use bf16 or fp32")
        yield converted


def _write_beside(draft: Path, folder: Path, config: GPTConfig, dtype: str) -> None:
    """config.json, and what the run knows of its tokenizer: files of an import, else the tokenizer.json it names."""
    common, model_type = saved_common(folder), _model_type(folder)
    tokens = {key: value for key, value in common.get(ORIGIN, {}).items() if key in _TOKENS}
    tokenizer = None if IMPORTED in common else _own_tokenizer(folder)
    ends = tokens.get("eos_token_id", [])
    if tokenizer is None or tokenizer.eod in (ends if isinstance(ends, list) else [ends]):
        if ORIGIN in common:
            _carry(folder.parent.parent, draft)
    else:  # trained on other ids than the import's
        tokens = {"eos_token_id": tokenizer.eod} if tokenizer.eod < config.vocab_size else {}
    if isinstance(tokenizer, FileTokenizer):
        _copy_tokenizer(tokenizer, draft)
        if hf_config.architecture_of(config, model_type).model_type == "qwen2":
            _tell_of_qwen2(draft)
    written = hf_config.write(
        config, max_positions=longest_row(folder), dtype=dtype, tokens=tokens, model_type=model_type
    )
    _write_json(draft / "config.json", written)
    if tokens and not (draft / "generation_config.json").exists():
        _write_json(draft / "generation_config.json", tokens)


def _model_type(folder: Path) -> str:
    """Of the architecture that an import was written as; "" of another run, and of old imports."""
    return str(saved_common(folder).get(ORIGIN, {}).get(MODEL_TYPE, ""))


def _copy_tokenizer(tokenizer: FileTokenizer, draft: Path) -> None:
    """A run's own tokenizer.json, with the files beside it or a tokenizer_config.json that says to take it as it is.

    Without one transformers 5 makes the tokenizer of the architecture, which does not know the run's eos_token.
    """
    shutil.copyfile(tokenizer.path, draft / "tokenizer.json")
    target, beside = draft / "tokenizer_config.json", tokenizer.path.with_name("tokenizer_config.json")
    if target.exists():  # of the import whose tokenizer it is
        return
    if tokenizer.path.name == "tokenizer.json" and beside.is_file():
        for name in TOKENIZER_FILES:  # the chat template lies beside too
            if (beside_it := tokenizer.path.with_name(name)).is_file():
                shutil.copyfile(beside_it, draft / name)
    else:
        _write_json(target, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eod_token})


def _tell_of_qwen2(draft: Path) -> None:
    """transformers 5 makes Qwen2's own tokenizer for model_type qwen2, whatever the files say."""
    if str(_read_json(draft / "tokenizer_config.json").get("tokenizer_class", "")).removesuffix("Fast") != _QWEN2:
        print(
            "sixfold: AutoTokenizer of transformers 5 takes every tokenizer of a Qwen2 model for Qwen2's, and gives "
            "other ids; open this one by transformers.PreTrainedTokenizerFast.from_pretrained(OUT_DIR)",
            file=sys.stderr,
            flush=True,
        )


def _own_tokenizer(folder: Path) -> Tokenizer | None:
    """Of the run that wrote a checkpoint; None where neither the run nor its data names one."""
    data = saved_config(folder).data
    with suppress(ConfigError):  # moved away, or its library is not installed
        if data.tokenizer or any(recorded_identity(prefix) for prefix in data.blend):
            return saved_tokenizer(folder)
    return None


# ---- files


def _carry(source: Path, draft: Path) -> None:
    for name in CARRIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path, pairs_hook: Any = None) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=pairs_hook)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); name a folder that transformers wrote") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; it is a JSON object")
    return value
