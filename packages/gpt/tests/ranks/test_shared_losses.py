"""Cross entropy of a vocabulary on several ranks beside torch's of all of it; refusals, saved parts, deadlines."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model_helpers import small

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.gpt import GPTModel
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model import loss as loss_module
from sixfold.gpt.model.loss import LossTerms, token_losses
from sixfold.gpt.parallel import tensor_parallel
from sixfold.gpt.parallel.axes import Axes, Axis
from sixfold.gpt.parallel.tensor_parallel import gather_sequence, scatter_sequence

CASES = [(100, 2**18, torch.float32), (100, 500, torch.bfloat16), (60, 1, torch.float32)]
UPSTREAM = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))


def sample(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of 128 columns, labels, a mask; masked labels are no columns, padding is large."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(3, 7, 128, generator=generator) * 4).to(dtype)
    logits[..., vocab:] = 3e4
    labels, mask = torch.randint(0, vocab, (3, 7), generator=generator), torch.ones(3, 7)
    labels[1, 2], mask[1, 2] = -1, 0
    return logits, labels, mask


def in_parts(rank: int, ranks: int) -> list[Any]:
    found = []
    for vocab, chunk, dtype in CASES:
        loss_module._CHUNK_ELEMENTS["cpu"] = chunk
        logits, labels, mask = sample(vocab, dtype)
        mine = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
        losses = token_losses(mine, labels, mask, vocab, Axis(rank, ranks, dist.group.WORLD))
        untouched = torch.equal(mine, logits.chunk(ranks, -1)[rank])
        losses.backward(UPSTREAM)
        found.append((losses.detach(), mine.grad, untouched))
    return found


def test_losses_and_gradients_are_torchs_of_the_whole_vocabulary():
    ranks = run_ranks(in_parts, 2)
    for number, (vocab, _, dtype) in enumerate(CASES):
        logits, labels, mask = sample(vocab, dtype)
        whole = logits.requires_grad_()
        real = whole[..., :vocab].float().flatten(0, 1)
        expected = F.cross_entropy(real, labels.clamp(min=0).flatten(), reduction="none").view(3, 7) * mask
        (gradient,) = torch.autograd.grad(expected, whole, UPSTREAM)
        for found in ranks:
            torch.testing.assert_close(found[number][0], expected.detach(), rtol=1e-6, atol=1e-6)
            assert found[number][2], "logits are those that were given"
        together = torch.cat([found[number][1] for found in ranks], -1)
        assert together.dtype == dtype and not together[..., vocab:].any() and not together[1, 2].any()
        torch.testing.assert_close(together, gradient, rtol=1e-6, atol=1e-6)


TERMS = LossTerms(z_loss=1e-2, label_smoothing=0.1)


def in_parts_with_terms(rank: int, ranks: int) -> list[torch.Tensor]:
    found = []
    for vocab, chunk, dtype in CASES:
        loss_module._CHUNK_ELEMENTS["cpu"] = chunk
        logits, labels, mask = sample(vocab, dtype)
        mine = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
        token_losses(mine, labels, mask, vocab, Axis(rank, ranks, dist.group.WORLD), TERMS).backward(UPSTREAM)
        found.append(mine.grad)
    return found


def test_a_z_loss_and_label_smoothing_are_those_of_one_rank():
    ranks = run_ranks(in_parts_with_terms, 2)
    for number, (vocab, _, dtype) in enumerate(CASES):
        logits, labels, mask = sample(vocab, dtype)
        whole = logits.requires_grad_()
        token_losses(whole, labels, mask, vocab, terms=TERMS).backward(UPSTREAM)
        together = torch.cat([found[number] for found in ranks], -1)
        torch.testing.assert_close(together, whole.grad, rtol=1e-6, atol=1e-6)


def what_is_refused(rank: int, ranks: int) -> list[str]:
    axis = Axis(rank, ranks, dist.group.WORLD)
    found = []
    for fields in ({"num_query_groups": 1}, {"ffn_hidden_size": 49}, {"vocab_size": 5, "vocab_multiple": 5}):
        with pytest.raises(ConfigError) as error:
            GPTModel(small(**fields), axes=Axes(tp=axis))
        found.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        GPTModel(small(num_layers=1), axes=Axes(tp=axis))(torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(RuntimeError):  # as a token of no row and a label of no column are in one process
        GPTModel(small(num_layers=1), axes=Axes(tp=axis))(torch.full((1, 4), 128))
    with pytest.raises(RuntimeError):
        token_losses(torch.zeros(1, 1, 64), torch.full((1, 1), 100), None, 100, axis)
    return [*found, str(error.value)]


def test_sizes_that_ranks_cannot_share_tokens_of_no_row_and_labels_of_no_column_are_refused():
    for found in run_ranks(what_is_refused, 2):
        groups, ffn, vocabulary, row = found
        assert "model.num_query_groups is 1 and parallel.tp is 2; tp divides it" in groups
        assert "model.ffn_hidden_size is 49 and parallel.tp is 2; tp divides it" in ffn
        assert "model.padded_vocab_size is 5 and parallel.tp is 2; tp divides it" in vocabulary
        assert "rows have 5 tokens and parallel.tp is 2" in row and "parallel.sequence = false works" in row


SAVED = small(num_layers=1, qkv_bias=True, qk_norm=True, tie_embeddings=False)


def save(rank: int, ranks: int, folder: str) -> None:
    model = GPTModel(SAVED, axes=Axes(tp=Axis(rank, ranks, dist.group.WORLD)))
    dist_ckpt.save(model.sharded_state_dict(), folder, group=dist.group.WORLD)


def test_parts_start_and_are_saved_as_parts_of_the_whole_model(tmp_path: Path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    run_ranks(save, 2, str(folder))
    expected = {f"model.{name}": p.detach() for name, p in GPTModel(SAVED).named_parameters()}
    found = dist_ckpt.load_plain_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def waits_for_the_other(rank: int, ranks: int) -> list[tuple[str, float, str]]:
    """The other rank takes part in nothing: how long each wait of this one takes, and how it ends."""
    deadline = datetime.timedelta(seconds=0.4)
    groups = [dist.new_group(timeout=deadline) for _ in range(5)]
    x, found = torch.ones(1, 4, 8), []
    for name, group in zip(("gather", "scatter", "sum", "gather ahead", "losses"), groups, strict=True):
        if rank == 1:
            time.sleep(0.6)
            continue
        axis, begin, ended = Axis(rank, ranks, group), time.monotonic(), "done"
        try:
            if name == "losses":
                token_losses(torch.zeros(1, 4, 64), torch.zeros(1, 4, dtype=torch.int64), None, 100, axis)
            elif name == "gather ahead":
                tensor_parallel._start_gather(x, axis)[1].wait()
            else:
                {"gather": gather_sequence, "scatter": scatter_sequence, "sum": tensor_parallel._sum}[name](x, axis)
        except RuntimeError as error:
            ended = str(error)
        found.append((name, time.monotonic() - begin, ended))
    return found


def test_no_wait_for_another_rank_is_longer_than_its_groups_deadline():
    found = run_ranks(waits_for_the_other, 2)[0]
    assert len(found) == 5
    for name, seconds, ended in found:
        assert "Timed out" in ended and 0.3 < seconds < 10, (name, seconds, ended)
