"""A pickle reader that runs nothing: every global of the closed list becomes inert.

    .metadata bytes --> unpickle.py (this file) --> inert nodes --> metadata.py --> Manifest

``pickle.load`` calls whatever a file names (pytorch#189308). Here a name on the list below becomes a stand-in that
only remembers its state. Any other name is an UnsafeError. No module is imported for a file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import reprlib
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, UnsafeError

_CHECKPOINT = "torch.distributed.checkpoint"

_NAMES = {
    f"{_CHECKPOINT}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties "
    "ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    f"{_CHECKPOINT}.filesystem": "_StorageInfo",
    f"{_CHECKPOINT}.planner": "SavePlan WriteItem WriteItemType TensorWriteData",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
}
#: All globals that files of torch 2.13 and of megatron-core 0.12 and 0.16 name, dtypes and torch.Size apart: the module
#: of each name.
MODULES = [(module, name) for module, names in _NAMES.items() for name in names.split()]
KNOWN_GLOBALS = frozenset(f"{module}.{name}" for module, name in MODULES)


_MOST_PARTS = 1 << 12  # of a tuple, those of its tuples included; real ones have as many as a tensor has axes
_PUTS = frozenset(["PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"])
_GETS = frozenset(["GET", "BINGET", "LONG_BINGET"])
_KEEP_PARTS = frozenset(["TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE"])  # torch.Size(tuple) is that tuple


class Node:
    """An object of the pickle: the name of its class, and its state as attributes, which ``get`` reads.

    It has no ``__setstate__``: then the C unpickler writes a state straight into ``__dict__``, in a fifth of
    the time, and refuses one that is no dict.
    """

    kind = ""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing that is read needs the arguments."""

    def __setitem__(self, name: Any, value: Any) -> None:
        """Items of an OrderedDict; nothing that is read needs them."""

    def get(self, name: str) -> Any:
        """Attribute ``name`` of the pickled object, or None."""
        return self.__dict__.get(name)


class _Properties(Node):
    """TensorProperties: its state is a tuple, in old files a dict."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Path(Node):
    """A path, as torch stores the checkpoint_id of a save: its state is its parts."""

    def __init__(self, *parts: Any) -> None:
        self.__dict__["parts"] = parts


def kind_of(value: Any) -> str:
    """Name of the class that a pickle gave an object; of a plain value, its type."""
    return type(value).kind if isinstance(value, Node) else type(value).__name__


def shown(value: Any) -> str:
    """A decoded value for an error, cut short: a tuple of tuples that share their parts has a text without end."""
    return reprlib.repr(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, type[Node]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "torch.Size":
            return tuple
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if full not in KNOWN_GLOBALS:
            raise UnsafeError(f"the pickle names the global {full}, which no checkpoint needs; nothing was run")
        if full not in self._kinds:
            base = {"TensorProperties": _Properties, "PosixPath": _Path}.get(name, Node)
            self._kinds[full] = type(name, (base,), {"kind": name})
        return self._kinds[full]

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeError(f"the pickle holds the persistent id {shown(pid)}, which no checkpoint needs")


def loads(data: bytes, *, trusted_bytes: bool) -> Any:
    """Decode a pickle into plain values and ``Node`` objects.

    Args:
        data: the pickle.
        trusted_bytes: a digest has shown that these are the bytes that were written. Otherwise the
            opcodes are walked first, because a mangled ``LONG_BINPUT`` makes the C unpickler
            allocate tens of gigabytes.
    Raises:
        UnsafeError: a global outside the list.
        CorruptError: not a pickle.
    """
    try:
        if not trusted_bytes:
            _walk(data)
        return _Unpickler(data).load()
    except CheckpointError:
        raise
    except Exception as error:  # a mangled pickle raises whatever it likes
        raise CorruptError(f"not a readable pickle: {type(error).__name__}: {error}") from error


def _walk(data: bytes) -> None:
    """Follow the opcodes without doing what they say; ``stack`` and ``memo`` hold the parts of each value.

    Parts count for tuples alone: the hash of one is that of all its parts, so that sixty tuples, each of the one
    before twice, make a dict key whose hash takes for ever.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, position in pickletools.genops(data):
        name = opcode.name
        if name in ("LONG_BINPUT", "PUT", "FRAME") and int(argument or 0) > len(data):
            raise CorruptError(f"opcode {name} at byte {position} asks for {argument} of {len(data)} bytes")
        if name in _PUTS:
            memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = stack[-1]
        elif name in _GETS:
            stack.append(memo[int(argument or 0)])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            marks.append(len(stack))
        elif name != "POP" or not marks or marks[-1] < len(stack):
            parts = _pop(opcode.stack_before, stack, marks)
            size = 1 + parts if name in _KEEP_PARTS else 1
            if size > _MOST_PARTS:
                raise CorruptError(f"opcode {name} at byte {position} makes a tuple of more than {_MOST_PARTS} parts")
            stack.extend([size] * len(opcode.stack_after))
        else:
            marks.pop()  # POP may also take a mark


def _pop(before: list[pickletools.StackObject], stack: list[int], marks: list[int]) -> int:
    """Take what an opcode takes; the sum of its parts."""
    at = marks.pop() - before.index(pickletools.markobject) if pickletools.markobject in before else -1
    at = at if at >= 0 else len(stack) - len(before)
    parts = sum(stack[at:])
    del stack[at:]
    return parts
