"""Initial weights as a function of seed, name and index.

    seed, canonical name --> Philox key --> initial_values (this file) --> fill_elements --> rank_model.py: shards
                                                                                         `-> initializer: whole modules

No layout enters: a stage, a shard or a row is drawn without the rest. torchtitan needs a checkpoint for the same,
because one generator walked in module order gives each layout other weights.

[Note: blocks] Element i of a tensor belongs to block i // BLOCK. A block is always computed whole, by the same vector
operations on arrays of the same length, and then sliced. The last bits of a vectorised cosine may depend on how many
elements follow. Equal on machines of one kind; between kinds the libraries' log and cosine may differ.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.parallel.weight_sharding import UNCUT, WHOLE, Cut, Cuts, runs, whole_shape

BLOCK = 16384  # elements drawn together; Philox gives 4 words per count, so a block is BLOCK / 4 counts
_BLOCKS_OF_ONE_THREAD = 16  # fewer are drawn sooner than threads are started


def initial_values(
    seed: int, name: str, shape: Sequence[int], std: float, start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """Normal values of elements ``[start, stop)`` of the flattened tensor ``name``.

    Args:
        seed: train.seed.
        name: canonical name, as ``layers.3.attention.q.weight``.
        shape: of the whole tensor.
        std: standard deviation; the mean is 0.
        start, stop: elements wanted; ``stop=None`` is the end.
    Returns:
        float32, of ``shape`` when the whole tensor is wanted, else 1-D of ``stop - start`` elements.

    Philox4x64-10 keyed by the first 16 bytes of sha256("seed:name"), little endian; a block of 2n elements takes 2n
    words, n radii from the first half and n angles from the second: ``u = (word >> 11) / 2**53``,
    ``r = sqrt(-2 ln(1 - u))``, elements ``r cos(2 pi v)`` then ``r sin(2 pi v)``, in float64, rounded once.
    Cost: about 25 ns per element, in as many threads as torch has. Source: Salmon et al. 2011; Box and Muller 1958.
    """
    size = math.prod(shape)
    stop = size if stop is None else stop
    assert 0 <= start <= stop <= size, f"{name}: elements [{start}, {stop}) of {size}"
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    values = np.empty(stop - start, dtype=np.float32)

    def draw(block: int) -> None:
        first = block * BLOCK
        low, high = max(start, first), min(stop, first + BLOCK)
        values[low - start : high - start] = (_normal_block(key, block) * std)[low - first : high - first]

    blocks, threads = range(start // BLOCK, -(-stop // BLOCK)), torch.get_num_threads()
    if threads == 1 or len(blocks) < _BLOCKS_OF_ONE_THREAD:
        for block in blocks:
            draw(block)
    else:  # numpy lets other threads run meanwhile
        with ThreadPoolExecutor(threads) as pool:
            deque(pool.map(draw, blocks), 0)
    tensor = torch.from_numpy(values)
    return tensor.view(*shape) if stop - start == size else tensor


def initializer(config: GPTConfig, seed: int, cuts: Cuts = WHOLE) -> Callable[[str, nn.Module], None]:
    """A function that fills a whole module's own parameters by their canonical names.

    Returns:
        ``fill(name, module)``: ``name`` is the module's canonical path, as ``layers.3.attention.q``; its parameters
        are materialised, of any dtype and device. It is what ``FullyShardedDataParallel(init_fn=...)`` takes.

    Normal of ``init_std``; ``attention.out`` and ``ffn.down`` of init_std / sqrt(2 * num_layers);
    norms 1 (those that add 1 to their weight 0), biases 0, rows of vocabulary padding 0. Of an adapter, A is normal of
    1 / sqrt(3 * inputs) and B is 0.
    """

    def fill(name: str, module: nn.Module) -> None:
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}" if name else leaf
            fill_elements(config, seed, full, parameter.shape, 0, parameter.detach().view(-1), cuts.of(full))

    return fill


def fill_elements(
    config: GPTConfig, seed: int, name: str, shape: Sequence[int], start: int, out: torch.Tensor, cut: Cut = UNCUT
) -> None:
    """Fill ``out`` with elements ``[start, start + len(out))`` of the flattened parameter ``name``.

    Args:
        name: canonical name, as ``layers.3.attention.q.weight``.
        shape: of the whole parameter, or of the part of it that lies here.
        out: 1-D, of any dtype and device; filled in place.
        cut: which part of the canonical parameter that is.
    No elements but those wanted are drawn, and where rows are cut those between them.
    """
    if name.endswith((".bias", ".lora_b")):
        out.zero_()
    elif len(shape) < 2:
        out.fill_(0.0 if config.zero_centered_norm else 1.0)
    else:
        _draw(config, seed, name, shape, start, out, cut)


def _draw(
    config: GPTConfig, seed: int, name: str, shape: Sequence[int], start: int, out: torch.Tensor, cut: Cut
) -> None:
    module = name.rpartition(".")[0]
    whole, std = whole_shape(cut, shape), _std(config, module)
    if name.endswith(".lora_a"):
        std = 1 / math.sqrt(3 * whole[1])  # the variance of peft's uniform values
    # Rows of padding are 0 and are not drawn.
    real = config.vocab_size * whole[1] if module in ("embedding", "head") else math.prod(whole)
    window = range(0)  # of the canonical elements that were drawn last: short runs share one
    drawn = torch.empty(0)
    for at, first, length in runs(cut, shape, start, start + out.numel()):
        part = out[at - start : at - start + length]
        end = min(max(real, first), first + length)
        if end > max(window.stop, first):
            window = range(first, min(max(end, (first // BLOCK + 1) * BLOCK), real) if cut else end)
            drawn = initial_values(seed, name, whole, std, window.start, window.stop).view(-1)
        if end > first:
            part[: end - first].copy_(drawn[first - window.start : end - window.start])
        part[end - first :].zero_()


def _std(config: GPTConfig, module_name: str) -> float:
    """Residual projections are damped, so that the sum over layers keeps its variance (GPT-2)."""
    damped = module_name.endswith(("attention.out", "ffn.down", "experts.down", "shared.down"))
    return config.init_std / math.sqrt(2 * config.num_layers) if damped else config.init_std


def _normal_block(key: int, block: int) -> npt.NDArray[np.float64]:
    """(BLOCK,) standard normals; see [Note: blocks]."""
    words = np.random.Philox(key=key, counter=block * (BLOCK // 4)).random_raw(BLOCK)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    half = BLOCK // 2
    radius = np.sqrt(-2.0 * np.log1p(-uniform[:half]))
    angle = (2.0 * math.pi) * uniform[half:]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
