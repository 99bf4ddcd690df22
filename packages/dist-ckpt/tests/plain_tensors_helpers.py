"""State dicts of plain tensors for tests, and torch's own reading of what was saved of them.

    state dict --> dist_ckpt.save --> by_torch, tensor_entries (this file): torch's reader --> assert_same, alike

Names are those of torch's ``flatten_state_dict``.
"""

import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_load
from dist_ckpt_helpers import one
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sixfold import dist_ckpt


def tensor_entries(folder):
    """What torch's reader finds in the index, by name."""
    found = torch_dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def by_torch(folder):
    """All tensors of a folder, read by torch's own load under their names."""
    flat = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensor_entries(folder).items()
    }
    return dcp_load(flat, torch_dcp.FileSystemReader(folder), no_dist=True)


def flat_tensors(state):
    """Tensors of a state dict under the names that torch gives them."""
    return {name: value for name, value in flatten_state_dict(state)[0].items() if isinstance(value, torch.Tensor)}


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)


def assert_same(found, expected):
    """Tensors by name: dtype, shape, every bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(found[name]), bits(value)), name


def blank_like(state):
    """The same structure with zeros for tensors and None for the rest."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state.detach())
    if isinstance(state, dict):
        return {key: blank_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank_like(value) for value in state]
    return None


def error_of(action):
    """The text of the package's error, or nothing."""
    try:
        action()
    except dist_ckpt.CheckpointError as error:
        return str(error)
    return ""


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def all_dtypes():
    """Random bits in each dtype, so NaN with payloads are among them; large ones and small ones."""
    made = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 256, (dtype.itemsize * 3000,), dtype=torch.uint8)
        name = str(dtype).removeprefix("torch.")
        made[name] = (raw > 127) if dtype == torch.bool else raw.view(dtype)
        made[f"{name} small"] = made[name][:6].clone().view(2, 3)
    return made


def odd_tensors():
    base = torch.arange(60_000.0)
    shared = nn.Parameter(torch.randn(150, 150))
    pairs = torch.randn(20_000, dtype=torch.complex64)
    return {
        "0-dim": torch.tensor(2.5),
        "0-dim integer": torch.tensor(2**40 + 1),
        "empty": torch.empty(0),
        "empty with a shape": torch.empty(3, 0, 2, dtype=torch.int32),
        "turned": base.view(200, 300).t(),
        "every second": base[::2],
        "channels last": torch.randn(2, 64, 16, 16).to(memory_format=torch.channels_last),
        "conjugate": pairs.conj(),
        "negative": pairs.conj().imag,
        "real part": pairs.real,
        "expanded": torch.randn(100, 1).expand(100, 300),
        "expanded scalar": torch.tensor(7.0).expand(5),
        "wants a gradient": torch.randn(20_000, requires_grad=True),
        "parameter": shared,
        "the same parameter": shared,
        "view a": base[:30_000],
        "view b": base[10_000:50_000],
        "of a graph": shared * 2,
        "unaligned": torch.zeros(4 * 20_001 + 1, dtype=torch.uint8)[1:].random_(),
    }


def alike(found, expected):
    """The same containers, keys in the same order, and equal values."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return (
            type(found) is type(expected)
            and list(found) == list(expected)
            and getattr(found, "default_factory", None) == getattr(expected, "default_factory", None)
            and all(alike(found[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return type(found) is list and len(found) == len(expected) and all(map(alike, found, expected))
    return type(found) is type(expected) and found == expected


def trained(seed, steps, width=80):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def full_state():
    model, optimizer = trained(0, 2, 500)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "shard": one("s", torch.arange(4.0)),
        "list": [torch.arange(3), {"x": torch.randn(20_000)}, torch.empty(0, 3)],
        "step": 3,
    }
