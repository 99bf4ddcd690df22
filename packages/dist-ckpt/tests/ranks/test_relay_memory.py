"""What a relay holds besides the tensors is bounded, on ranks that want nothing too; values cross in small pieces."""

import ctypes
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import kib_of_status

from ranktest import run_ranks
from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.collectives import relay
from sixfold.dist_ckpt.collectives.exchange import Exchange

MIB = 1 << 20
COUNT, TENSOR_MIB, HELD_MIB = 3, 16, 2
NOISE_MIB = 1  # of gloo


WAYS = {
    "point to point": lambda transfer: False,
    "broadcasts": lambda transfer: True,
    "both": lambda transfer: transfer.number % 2 == 0,  # as of a state on CPU and accelerator
}


def relayed(tensors, rank, way):
    """Fill this rank's tensors through a relay: each reader writes tensor i full of i + 1, the last one first."""
    records = [ShardedTensor.from_rank_offsets(f"t{i}", t, replica_id=rank) for i, t in tensors.items()]
    found = relay.Relay(lambda: (records, {}), Exchange("world", 10.0), None, by_broadcast=WAYS[way])
    with found.running():
        for index, record in reversed(list(enumerate(found.mine))):
            record.data.fill_(float(record.key[1:]) + 1)
            found.on_complete(index)


def grown_mib(rank, ranks, strided, way):
    """MiB by which this rank's memory grows at most while others' tensors pass; rank 1 wants none."""
    torch.set_num_threads(1)
    relay._PIECE_BYTES, relay._SLOTS = MIB // 2, HELD_MIB * 2
    shape = (TENSOR_MIB * 256, 1024)
    make = (lambda: torch.zeros(shape[::-1]).t()) if strided else (lambda: torch.zeros(shape))
    relayed({0: torch.zeros(9)}, rank, way)  # the group's connections and threads
    mine = {} if rank == 1 else {i: make() for i in range(COUNT)}
    for tensor in mine.values():
        tensor.fill_(-1)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = kib_of_status("VmRSS")
    relayed(mine, rank, way)
    grown = (kib_of_status("VmHWM") - before) / 1024
    assert all(bool((tensor == i + 1).all()) for i, tensor in mine.items())
    return grown


@pytest.mark.parametrize(
    ("strided", "way", "lanes"), [(False, "broadcasts", 1), (True, "broadcasts", 1), (True, "point to point", 2)]
)
@pytest.mark.slow
def test_a_relay_holds_a_few_pieces_besides_the_tensors(strided, way, lanes):
    """Without a bound a rank holds 48 MiB: what it does not want, or copies of its strided tensors."""
    grown = run_ranks(grown_mib, 3, strided, way)
    assert max(grown) <= lanes * HELD_MIB + NOISE_MIB < COUNT * TENSOR_MIB / 4, grown


def in_small_pieces(rank, ranks, way):
    """Tensors of several kinds and strides, wanted by some ranks, in pieces of 40 bytes; there is room for three."""
    relay._PIECE_BYTES, relay._SLOTS = 40, 3
    whole = torch.arange(1, 7 * 5 * 4 + 1).view(7, 5, 4)
    kinds = {
        "plain": lambda t: t.double(),
        "transposed": lambda t: t.float().permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "columns": lambda t: torch.cat([t, t], 2).short()[..., :4],
        "scalars": lambda t: t[3, 2, 1].float(),
        "conjugated": lambda t: torch.complex(t.float(), -t.float()).conj(),
        "negated": lambda t: torch.complex(t.float(), t.float()).conj().imag,
    }
    wants = {0: tuple(kinds), 1: ("plain", "columns"), 2: tuple(reversed(kinds)), 3: ()}[rank]
    tensors = {kind: kinds[kind](whole.clone()) for kind in wants}
    expected = {kind: tensor.clone().resolve_conj().resolve_neg() for kind, tensor in tensors.items()}
    records = [ShardedTensor.from_rank_offsets(kind, tensors[kind], replica_id=rank) for kind in wants]
    for kind in wants:
        tensors[kind].zero_()
    found = relay.Relay(lambda: (records, {}), Exchange("world", 10.0), None, by_broadcast=WAYS[way])
    with found.running():
        for index, record in enumerate(found.mine):
            record.data.copy_(expected[record.key])
            if index % 2:
                found.on_complete(index)
    return [kind for kind in wants if not torch.equal(tensors[kind].resolve_conj().resolve_neg(), expected[kind])]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_values_of_any_stride_cross_in_pieces(way):
    assert run_ranks(in_small_pieces, 4, way) == [[]] * 4
