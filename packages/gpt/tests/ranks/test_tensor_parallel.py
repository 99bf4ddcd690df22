"""Layers over two tensor-parallel ranks: the whole model's losses, logits and gradients; what backward keeps."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_helpers import boundaries, small
from torch.distributed.device_mesh import init_device_mesh

from ranktest import run_ranks
from sixfold import pipeline
from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.engine.activation_offload import HostActivations, hooks_of
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.parallel import tensor_parallel
from sixfold.gpt.parallel.axes import Axes, Axis
from sixfold.gpt.parallel.weight_sharding import summed_over_tp
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

TOKENS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(48).view(2, 24) % 7 != 0).float()
PACKED = boundaries(2, 24, [5, 30])
# Vocabulary of 100 on 128 rows: the second rank has padding; of 60: nothing but padding.
MODELS = {
    "tied, grouped queries": small(num_layers=2),
    "untied, biases, q and k norms": small(num_layers=2, tie_embeddings=False, qkv_bias=True, qk_norm=True),
    "untied, the last rank has padding only": small(num_layers=1, tie_embeddings=False, vocab_size=60),
}


def axes(rank: int, ranks: int, sequence: bool, *, overlap: bool = False) -> Axes:
    return Axes(tp=Axis(rank, ranks, dist.group.WORLD), sequence=sequence, overlap=overlap)


def trained(model: GPTModel, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    vocab = model.config.vocab_size
    losses = model(TOKENS % vocab, labels=LABELS % vocab, loss_mask=MASK, **inputs)
    losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters()}


def all_models(rank: int, ranks: int) -> dict[tuple[str, bool], Any]:
    found = {}
    for sequence in (True, False):
        for name, config in MODELS.items():
            if sequence:
                model = GPTModel(config, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
            else:
                model = GPTModel(config, axes=axes(rank, ranks, sequence))
            with torch.no_grad():
                logits = model(TOKENS % config.vocab_size, cu_seqlens=PACKED)
            found[name, sequence] = (*trained(model, cu_seqlens=PACKED), logits, model.cuts)
    return found


@pytest.fixture(scope="module")
def of_two() -> list[dict[tuple[str, bool], Any]]:
    return run_ranks(all_models, 2)


def whole_gradient(parts: list[Any], name: str, sequence: bool) -> torch.Tensor:
    """The canonical gradient of ``name`` of the ranks' parts."""
    gradients = [part[1][name] for part in parts]
    cut = parts[0][3].of(name)
    if cut:
        return torch.cat(gradients, next(iter(cut)))
    if summed_over_tp(name, sequence=sequence):
        return sum(gradients[1:], gradients[0])
    assert all(torch.equal(one, gradients[0]) for one in gradients)
    return gradients[0]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow
def test_losses_logits_and_every_gradient_are_the_whole_models(of_two, kind, sequence):
    model = GPTModel(MODELS[kind])
    losses, gradients = trained(model, cu_seqlens=PACKED)
    logits = model(TOKENS % model.config.vocab_size, cu_seqlens=PACKED).detach()
    parts = [rank[kind, sequence] for rank in of_two]
    for part in parts:
        torch.testing.assert_close(part[0], losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(part[2], logits, rtol=1e-6, atol=1e-6 * float(logits.abs().max()))
        assert (part[0] == 0).equal(MASK == 0)
    assert set(parts[0][1]) == set(gradients)
    for name, gradient in gradients.items():
        found = whole_gradient(parts, name, sequence)
        assert (found - gradient).norm() <= 1e-6 * gradient.norm(), name


class Watched:
    """Gathers of the sequence: how many there were, and how many of what they gave is alive."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._plain = tensor_parallel.gather_sequence

    def __enter__(self) -> Watched:
        def gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
            whole = self._plain(x, axis)
            self.seen.append(weakref.ref(whole.untyped_storage()))
            return whole

        tensor_parallel.gather_sequence = gather
        return self

    def __exit__(self, *error: object) -> None:
        tensor_parallel.gather_sequence = self._plain

    @property
    def alive(self) -> int:
        return sum(one() is not None for one in self.seen)


def saved_bytes(model: GPTModel) -> tuple[torch.Tensor, int]:
    """Losses, and what autograd keeps for their backward but weights and what the loss keeps of logits."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if saved.is_floating_point() and saved.untyped_storage().data_ptr() not in weights:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        losses = model(TOKENS, labels=LABELS)
    return losses, sum(kept.values())


def what_is_kept(rank: int, ranks: int, recompute: str) -> dict[str, Any]:
    model = GPTModel(MODELS["untied, biases, q and k norms"], axes=axes(rank, ranks, True))
    model.recompute = recompute
    with Watched() as watched:
        losses, kept = saved_bytes(model)
        found = {"bytes": kept, "forward": len(watched.seen), "alive": watched.alive}
        losses.sum().backward()
        return {**found, "backward": len(watched.seen) - found["forward"], "left": watched.alive}


LAYERS = 2
GATHERS = 2 * LAYERS + 1  # before q, k and v; before gate and up; before the head


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.slow
def test_nothing_gathered_is_kept_for_backward_and_linears_share_what_is_gathered_again(recompute):
    for found in run_ranks(what_is_kept, 2, recompute):
        assert (found["alive"], found["left"]) == (0, 0)
        assert found["forward"] == GATHERS
        # Each once more, be it that its part is recomputed; and the gradients of two sums of a layer and the embedding.
        assert found["backward"] == GATHERS + 2 * LAYERS + 1
        if recompute == "none":
            assert found["bytes"] == expected_bytes(MODELS["untied, biases, q and k norms"], tp=2)


def expected_bytes(config: GPTConfig, tp: int) -> int:
    """By hand: (b, s) = (2, 24) float32 numbers of a token, and attention's probabilities."""
    h, ffn, d = config.hidden_size, config.ffn_hidden_size // tp, config.head_dim
    heads, groups = config.num_attention_heads // tp, config.num_query_groups // tp
    norm = (h + 1 + h) / tp  # normalised, its scale, and what is gathered of it, on this rank's part of the sequence
    # q and k norms: normalised, and scale; q, k and v behind rope; probabilities; what `out` reads.
    attention = (heads + groups) * (d + 1) + (heads + 2 * groups) * d + heads * 24 + heads * d
    feed = 4 * ffn  # gate, silu of it, up, their product
    head = config.padded_vocab_size / tp + 1  # logits and the normaliser
    rope = 2 * d * 24  # shared by rows
    return int(4 * (48 * (config.num_layers * (2 * norm + attention + feed) + norm + head) + rope))


def split_and_whole(rank: int, ranks: int, recompute: str) -> tuple[bool, list[int]]:
    """Gradients of a program of I and W beside those of B; gathered tensors alive where a W begins."""
    gradients, alive = [], []
    for program in (pipeline.one_f_one_b(1, 2), pipeline.zb_h1(1, 2)):
        model = GPTModel(MODELS["untied, biases, q and k norms"], axes=axes(rank, ranks, True))
        model.recompute = recompute
        runner = pipeline.PipelineRunner(
            program, [pipeline.Stage(model, 0)], None, lambda losses, rows: losses.sum(), scale="sum"
        )
        weigh = WeightGradientStore.backward_weight
        with Watched() as watched:

            def counted(store: WeightGradientStore, k: int) -> None:
                alive.append(watched.alive)
                weigh(store, k)  # noqa: B023

            WeightGradientStore.backward_weight = counted
            try:
                kwargs = [{"labels": LABELS, "cu_seqlens": PACKED}, {"labels": TOKENS}]
                runner.step([TOKENS, LABELS], None, kwargs=kwargs)
            finally:
                WeightGradientStore.backward_weight = weigh
        gradients.append([p.grad for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), alive


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.slow
def test_split_backwards_have_the_bits_of_whole_ones_and_hold_nothing_gathered_until_w(recompute):
    for same, alive in run_ranks(split_and_whole, 2, recompute):
        assert same
        # What W has: the gradients of what `out` and `down` gave, and of no linear what it read.
        assert alive == [2 * LAYERS, 2 * LAYERS]


def compiled_and_plain(rank: int, ranks: int) -> list[float]:
    """Losses and gradients of compiled layers against the plain ones', relative; all in the first rank's order."""
    found = []
    for recompute in ("none", "full"):
        results = []
        for compiled in (False, True):
            model = GPTModel(MODELS["tied, grouped queries"], axes=axes(rank, ranks, True))
            model.recompute = recompute
            for layer in model.layers.values() if compiled else ():
                layer.compile_layer("aot_eager")
            losses, gradients = trained(model)
            results.append([losses, *gradients.values()])
        found += [float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True)]
    return found


def test_compiled_layers_give_what_plain_ones_give(request):
    if not request.config.getoption("--compiled-ranks"):
        pytest.skip("torch's compiler takes seconds to load in every rank; --compiled-ranks runs it")
    for found in run_ranks(compiled_and_plain, 2):
        assert max(found) <= 1e-6


def still_there(storages: list[weakref.ref[Any]]) -> list[bool]:
    """Which of them stay: the back end's thread lets go of what it moved a moment after the wait for it."""
    deadline = time.monotonic() + 10
    while any(one() is not None for one in storages) and time.monotonic() < deadline:
        time.sleep(0.001)
    return [one() is not None for one in storages]


def overlapped_and_not(rank: int, ranks: int, recompute: str) -> tuple[float, list[str], list[bool]]:
    """Losses and gradients of chunks against the whole's, relative; what the first layer does; what forward leaves."""
    results, events, gathered = [], [], []
    gather = tensor_parallel._gather

    def watched(parts: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        events.append("gather")
        gathered.append(weakref.ref(parts.untyped_storage()))
        return gather(parts, *arguments, **options)

    for overlap in (False, True):
        model = GPTModel(MODELS["untied, biases, q and k norms"], axes=axes(rank, ranks, True, overlap=overlap))
        model.recompute = recompute
        model.layers["0"].attention.q.register_forward_hook(lambda *_: events.append("q"))
        tensor_parallel._gather = watched
        del events[:], gathered[:]
        losses = model(TOKENS, labels=LABELS, cu_seqlens=PACKED)
        first, left = events[:9], still_there(gathered)
        losses.sum().backward()
        tensor_parallel._gather = gather
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True)), first, left


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.slow
def test_gathers_in_chunks_are_on_their_way_before_products_and_give_what_the_whole_gives(recompute):
    for difference, first, left in run_ranks(overlapped_and_not, 2, recompute):
        assert difference <= 1e-6
        assert first == ["gather"] * 4 + ["q"] * 4 + ["gather"], "four chunks of 12 tokens; then those of the ffn"
        assert not any(left), "nothing gathered is kept for backward"


def overlapped_split(rank: int, ranks: int) -> bool:
    """Gradients of a program of I and W have the bits of those of B, chunk by chunk; one row in a microbatch."""
    gradients = []
    for program in (pipeline.one_f_one_b(1, 2), pipeline.zb_h1(1, 2)):
        model = GPTModel(MODELS["tied, grouped queries"], axes=axes(rank, ranks, True, overlap=True))
        stages = [pipeline.Stage(model, 0)]
        runner = pipeline.PipelineRunner(program, stages, None, lambda losses, rows: losses.sum(), scale="sum")
        runner.step([TOKENS[:1], TOKENS[1:]], None, kwargs=[{"labels": LABELS[:1]}, {"labels": LABELS[1:]}])
        gradients.append([p.grad for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
def test_chunks_in_split_backwards_have_the_bits_of_whole_ones():
    assert all(run_ranks(overlapped_split, 2))


def through_logits_and_host_memory(rank: int, ranks: int) -> tuple[bool, dict[str, torch.Tensor], int]:
    """Activations in host memory change no bit; gradients of the logits' squares; bytes that were sent away."""
    results, host = [], HostActivations(torch.device("cpu"), least_bytes=1)
    for hooks in (hooks_of(None), hooks_of(host)):
        model = GPTModel(MODELS["untied, biases, q and k norms"], axes=axes(rank, ranks, True))
        with hooks:
            model(TOKENS).square().sum().backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    same = all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    return same, results[0], host.away_bytes


@pytest.mark.slow
def test_gradients_go_through_whole_logits_and_activations_through_host_memory():
    config = MODELS["untied, biases, q and k norms"]
    model = GPTModel(config)
    model(TOKENS).square().sum().backward()
    (same, gradients, away), (_, others, _) = run_ranks(through_logits_and_host_memory, 2)
    assert same and away > 0
    whole = model.head.weight.grad
    found = torch.cat([gradients["head.weight"], others["head.weight"]])
    assert (found - whole).norm() <= 1e-6 * whole.norm()
    whole = model.layers["0"].ffn_norm.weight.grad
    found = gradients["layers.0.ffn_norm.weight"] + others["layers.0.ffn_norm.weight"]
    assert (found - whole).norm() <= 1e-6 * whole.norm()
