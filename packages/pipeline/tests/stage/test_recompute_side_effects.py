"""A forward that RECOMPUTE runs again begins where it began, and counts once; what it cannot repeat is refused."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_helpers import square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, gpipe, one_f_one_b, passes, zb_h1

np = pytest.importorskip("numpy", reason="needs numpy, which users of torch mostly have")

M = 4


class Stateful(nn.Module):
    """A layer whose output depends on something besides its input, which its forward changes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=0.3)
        self.register_buffer("codes", torch.linspace(-1, 1, 4))
        self.other.register_buffer("codes", self.codes)
        self.plain = torch.zeros(4)
        self.calls, self.turn, self.memory = 0, 0, None
        self.seen: list[float] = []
        self.hidden, self.number = (torch.zeros(4), torch.ones(4)), np.int64(0)
        self.array, self.arrays = np.zeros(4, dtype=np.float32), [np.zeros(4, dtype=np.float32)]
        self.cache, self.window = {"h": torch.zeros(4), "n": 0}, deque([0.0, 1.0], maxlen=2)
        self.same_cache, self.kept = self.cache, SimpleNamespace(h=torch.zeros(4))
        self.torch = torch.Generator().manual_seed(3)
        self.draws = [{"first": (torch.Generator().manual_seed(3), np.random.default_rng(3))}]
        self.norms = [{"first": nn.BatchNorm1d(4, momentum=0.3)}, [self]]
        self.python, self.numpy, self.old = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        what = self.what.replace(" ", "_")
        change = what.removeprefix("now_and_then_")
        return hidden + (getattr(self, what)(hidden) if change == what else self.now_and_then(change, hidden))

    def counter(self, h: Tensor) -> Any:
        self.calls += 1
        return h * self.calls

    def list_that_grows(self, h: Tensor) -> Any:
        self.seen.append(1.0)
        return h * len(self.seen)

    def array_in_place(self, h: Tensor) -> Any:
        self.array += 1
        return h * torch.from_numpy(self.array.copy())

    def array_of_a_list(self, h: Tensor) -> Any:
        self.arrays[0][1] += 1
        return h * torch.from_numpy(self.arrays[0].copy())

    def batch_norm(self, h: Tensor) -> Any:
        return self.norm(h)

    def codebook(self, h: Tensor) -> Any:
        made = h * self.codes.clone()
        with torch.no_grad():
            self.codes.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return made

    def replaced_buffer(self, h: Tensor) -> Any:
        made = h * self.codes
        self.codes = self.codes * 0.9 + 0.1 * h.detach().mean(0)
        return made

    def buffer_of_two_modules(self, h: Tensor) -> Any:
        with torch.no_grad():
            self.codes.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.other(h * self.other.codes.clone()).tanh()

    def plain_tensor(self, h: Tensor) -> Any:
        self.plain.mul_(0.5).add_(h.detach().mean(0))
        return h * self.plain.clone()

    def state_over_microbatches(self, h: Tensor) -> Any:
        before, self.memory = self.memory, h.detach()
        return h if before is None else h * before

    def tuple_of_states(self, h: Tensor) -> Any:
        self.hidden = self.hidden[1], h.detach().mean(0)
        return h * self.hidden[0]

    def number_of_numpys(self, h: Tensor) -> Any:
        self.number = self.number + 1
        return h * float(self.number)

    def value_in_a_dict(self, h: Tensor) -> Any:
        before, self.cache["h"] = self.cache["h"], h.detach().mean(0)
        return h * before

    def tensor_of_a_dict_in_place(self, h: Tensor) -> Any:
        self.cache["h"].mul_(0.5).add_(h.detach().mean(0))
        return h * self.cache["h"].clone()

    def dict_of_two_names(self, h: Tensor) -> Any:
        self.cache["n"] += 1
        return h * self.same_cache["n"]

    def window_that_rolls(self, h: Tensor) -> Any:
        self.window.append(self.window[-1] * 0.5 + 1.0)
        return h * self.window[0]

    def state_of_an_object(self, h: Tensor) -> Any:
        before, self.kept.h = self.kept.h, h.detach().mean(0)
        return h * before

    def attribute_that_a_forward_makes(self, h: Tensor) -> Any:
        before = getattr(self, "made", None)
        self.made = h.detach()
        return h if before is None else h * before

    def own_torch_generator(self, h: Tensor) -> Any:
        return h * torch.rand(4, generator=self.torch)

    def own_python_generator(self, h: Tensor) -> Any:
        return self.other(h) if self.python.random() < 0.5 else h

    def own_numpy_generator(self, h: Tensor) -> Any:
        return self.other(h) if self.numpy.random() < 0.5 else h

    def old_numpy_generator(self, h: Tensor) -> Any:
        return self.other(h) if self.old.random() < 0.5 else h

    def layer_drop(self, h: Tensor) -> Any:
        return self.other(h) if random.random() < 0.5 else h

    def numpys_random_numbers(self, h: Tensor) -> Any:
        return self.other(h) if np.random.random() < 0.5 else h

    def dropout(self, h: Tensor) -> Any:
        return nn.functional.dropout(h, 0.5)

    def generators_of_a_list(self, h: Tensor) -> Any:
        torchs, numpys = self.draws[0]["first"]
        return h.tanh() * torch.rand(4, generator=torchs).tanh() * numpys.random()

    def batch_norm_of_a_list(self, h: Tensor) -> Any:
        return self.norms[0]["first"](h).tanh()

    def buffer_that_a_forward_registers(self, h: Tensor) -> Any:
        if hasattr(self, "steps"):
            self.steps.add_(1)
        else:
            self.register_buffer("steps", torch.ones(()))
        return (h * self.steps.clone()).tanh()

    def mode_that_a_forward_switches(self, h: Tensor) -> Any:
        self.other.train(not self.other.training)
        return (h * (2.0 if self.other.training else 1.0)).tanh()

    def now_and_then(self, change: str, h: Tensor) -> Any:
        """Every third call changes what the others leave alone: the first of a step does not show it."""
        self.turn += 1
        return getattr(self, change)(h) if self.turn % 3 == 0 else h

    def state(self) -> list[Any]:
        numbers = [self.calls, len(self.seen), *self.norm.state_dict().values(), self.codes, self.plain, self.memory]
        numbers += [*self.hidden, float(self.number), *self.cache.values(), *self.window, self.kept.h]
        numbers += [*self.array.tolist(), *self.arrays[0].tolist()]
        numbers += [*self.norms[0]["first"].state_dict().values(), getattr(self, "steps", 0), self.other.training]
        torchs, numpys = self.draws[0]["first"]
        numbers += [torch.rand(3, generator=torchs), numpys.random()]
        draws = [torch.rand(3, generator=self.torch), self.python.random(), self.numpy.random(), self.old.random()]
        return [*numbers, *draws, random.random(), float(np.random.random())]


WHAT = [
    "counter",
    "list that grows",
    "batch norm",
    "codebook",
    "replaced buffer",
    "buffer of two modules",
    "plain tensor",
    "state over microbatches",
    "tuple of states",
    "number of numpys",
    "array in place",
    "array of a list",
    "value in a dict",
    "tensor of a dict in place",
    "dict of two names",
    "window that rolls",
    "state of an object",
    "attribute that a forward makes",
    "own torch generator",
    "own python generator",
    "own numpy generator",
    "old numpy generator",
    "generators of a list",
    "batch norm of a list",
    "buffer that a forward registers",
    "mode that a forward switches",
    "layer drop",
    "numpys random numbers",
    "dropout",
    "now and then counter",
    "now and then array in place",
    "now and then list that grows",
    "now and then batch norm",
    "now and then codebook",
    "now and then replaced buffer",
    "now and then plain tensor",
    "now and then value in a dict",
    "now and then attribute that a forward makes",
    "now and then own torch generator",
    "now and then buffer that a forward registers",
    "now and then mode that a forward switches",
    "now and then layer drop",
    "now and then numpys random numbers",
]
CASES = [*((what, gpipe(1, M)) for what in WHAT), ("batch norm", zb_h1(1, M)), ("layer drop", zb_h1(1, M))]


def trained(what: str, step: Any, steps: int = 3) -> tuple[list[Any], list[Any]]:
    """Gradients behind some steps, and the state that is left."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    module = Stateful(what)
    run = step(module)
    for _ in range(steps):
        x = torch.randn(4 * M, 4, generator=torch.Generator().manual_seed(5))
        run(x, x * 2)
    return [p.grad for p in module.parameters()], module.state()


def pipelined(program: Any, *, checkpoint: bool = False) -> Any:
    return lambda module: PipelineRunner(program, [Stage(module, 0, checkpoint=checkpoint)], None, square_loss).step


@pytest.mark.parametrize(("what", "program"), CASES)
@pytest.mark.slow
def test_recompute_gives_the_gradients_and_the_state_of_one_forward(what, program):
    theirs = trained(what, pipelined(program))
    ours = trained(what, pipelined(passes.recompute(program)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("what", "program"), CASES)
@pytest.mark.slow
def test_a_checkpointed_stage_gives_the_gradients_and_the_state_of_one_forward(what, program):
    theirs = trained(what, pipelined(program))
    ours = trained(what, pipelined(program, checkpoint=True))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


LATER = ["codebook", "replaced buffer", "list that grows", "counter", "layer drop"]


@pytest.mark.parametrize("what", LATER)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["recompute", "checkpoint"])
def test_forwards_in_flight_begin_again_with_what_a_later_one_changed_first(what, checkpoint):
    class Behind(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            changed = getattr(self, what.replace(" ", "_"))(x) if self.turn % 3 == 1 else 0.0
            self.turn += 1
            return (self.layer(x) * self.codes.clone() + self.calls + len(self.seen) + changed).tanh()

    found = []
    for again in (False, True):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        modules = [Behind(what), Behind(what)]
        program = passes.recompute(one_f_one_b(2, M)) if again and not checkpoint else one_f_one_b(2, M)
        stages = [Stage(module, at, checkpoint=again and checkpoint) for at, module in enumerate(modules)]
        runner = PipelineRunner(program, stages, None, square_loss)
        for _ in range(2):
            runner.step(torch.randn(4 * M, 4), torch.randn(4 * M, 4))
        found.append([([p.grad for p in module.parameters()], module.state()) for module in modules])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("what", ["batch norm", "layer drop", "state over microbatches"])
def test_so_does_one_that_recompute_runs_again_too(what):
    theirs = trained(what, pipelined(gpipe(1, M)))
    ours = trained(what, pipelined(passes.recompute(gpipe(1, M)), checkpoint=True))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


HIDDEN = {"counts": 0}


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        HIDDEN["counts"] += 1
        return self.layer(x) * HIDDEN["counts"]


def edits_its_target(output: Tensor, target: Tensor) -> Tensor:
    target.mul_(0.5)
    return square_loss(output, target)


@pytest.mark.parametrize(
    ("module", "loss", "what"),
    [(Hides, square_loss, "output"), (lambda: nn.Linear(4, 4), edits_its_target, "loss")],
    ids=["global state", "target"],
)
def test_what_a_forward_cannot_repeat_is_refused_and_runs_without_recompute(module, loss, what):
    torch.manual_seed(0)
    x = torch.randn(4 * M, 4)
    runner = PipelineRunner(passes.recompute(gpipe(1, M)), [Stage(module(), 0)], None, loss)
    with pytest.raises(ScheduleError, match=f"RECOMPUTE of stage 0 made another {what} than its forward"):
        runner.step(x, x * 2)
    PipelineRunner(gpipe(1, M), [Stage(module(), 0)], None, loss).step(x, x * 2)


def test_a_checkpoint_that_does_not_repeat_its_forward_is_refused():
    module, x = Hides(), torch.randn(4 * M, 4)
    runner = PipelineRunner(gpipe(1, M), [Stage(module, 0, checkpoint=True)], None, square_loss)
    with pytest.raises(ScheduleError, match="the checkpoint of stage 0 made another output than its forward: "):
        runner.step(x, x * 2)


@pytest.mark.parametrize("changes", range(M))
def test_a_global_that_one_later_microbatch_moves_is_found_within_as_many_steps_as_microbatches(changes):
    """Of a checkpoint one more microbatch is compared in each step, the next one in the next step."""
    state = {"on": False, "calls": 0}

    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            out = self.layer(x)
            if state["on"] and int(x[0, 0]) == changes:  # a global of this microbatch alone
                state["calls"] += 1
                return out * state["calls"]
            return out

    x = torch.randn(4 * M, 4)
    x[:, 0] = torch.arange(M).repeat_interleave(4)
    runner = PipelineRunner(gpipe(1, M), [Stage(Moves(), 0, checkpoint=True)], None, square_loss)
    runner.step(x, x * 2)
    state["on"] = True
    with pytest.raises(ScheduleError, match="the checkpoint of stage 0 made another output than its forward"):
        for _ in range(M):
            runner.step(x, x * 2)


class Teacher(nn.Module):
    """MoCo's: a frozen copy follows the trained layer in each forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        old, new = self.teacher.weight, self.student.weight.detach()
        with torch.no_grad():
            if self.way == "no_grad":
                old.lerp_(new, 0.1)
            elif self.way == "data":
                old.data.lerp_(new, 0.1)
            elif self.way == "other memory":
                old.data = torch.lerp(old.data, new, 0.1)
            elif self.way == "other parameter":
                self.teacher.weight = nn.Parameter(torch.lerp(old.data, new, 0.1), requires_grad=False)
        if self.way == "not read":
            old.data.lerp_(new, 0.1)
            return self.student(x)
        return self.student(x) + self.teacher(x)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["recompute", "checkpoint"])
@pytest.mark.parametrize("way", ["no_grad", "data", "other memory", "other parameter", "not read"])
def test_a_parameter_that_a_forward_changes_is_refused_by_name_when_it_would_change_twice(way, checkpoint):
    program = gpipe(1, M) if checkpoint else passes.recompute(gpipe(1, M))
    torch.manual_seed(0)
    x, module = torch.randn(4 * M, 4), Teacher(way)
    runner = PipelineRunner(program, [Stage(module, 0, checkpoint=checkpoint)], None, square_loss)
    runner.step(x, x * 2)  # the teacher is the student
    with torch.no_grad():
        module.student.weight.add_(1.0)
    with pytest.raises(
        ScheduleError, match=r"forward of stage 0 changes parameter teacher\.weight, .*make it a buffer"
    ):
        runner.step(x, x * 2)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["recompute", "checkpoint"])
def test_a_parameter_that_a_second_run_leaves_alone_is_none_of_them(checkpoint):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(16, 4, max_norm=0.5)  # torch cuts long rows in the forward
            self.after = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.words(x).tanh())

    found = []
    for again in (False, True):
        program = passes.recompute(one_f_one_b(1, M)) if again and not checkpoint else one_f_one_b(1, M)
        torch.manual_seed(0)
        module = Words()
        runner = PipelineRunner(program, [Stage(module, 0, checkpoint=again and checkpoint)], None, square_loss)
        for _ in range(2):
            runner.step(torch.arange(16).repeat(2), torch.ones(32, 4))
        found.append([module.words.weight.detach(), *(p.grad for p in module.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_module_that_goes_from_eval_to_training_is_looked_at_again():
    def trains_later(program: Any) -> Any:
        def make(module: nn.Module) -> Any:
            run, modes = pipelined(program)(module), iter([False, False, True])

            def step(*given: Tensor) -> None:
                module.norm.train(next(modes))
                run(*given)

            return step

        return make

    theirs, ours = (trained("batch norm", trains_later(p)) for p in (gpipe(1, M), passes.recompute(gpipe(1, M))))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_model_of_hugging_face_with_layer_drop_takes_the_same_layers_twice():
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    config = transformers.WhisperConfig(
        vocab_size=32, num_mel_bins=4, encoder_layers=3, encoder_attention_heads=2, decoder_layers=1, d_model=8,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_layerdrop=0.5, max_source_positions=8,
    )  # fmt: skip

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x).last_hidden_state

    found = []
    for program in (gpipe(1, M), passes.recompute(gpipe(1, M))):
        torch.manual_seed(1)
        module = Encoder().train()
        x = torch.randn(2 * M, 4, 16)
        torch.manual_seed(2)
        loss = lambda output, _: output.square().mean()  # noqa: E731
        PipelineRunner(program, [Stage(module, 0)], None, loss).step(x)
        found.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Criterion(nn.Module):
    """A loss with a running mean, by which it is divided, and a list of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.seen: list[float] = []
        self.hidden, self.number = (torch.zeros(4), torch.ones(4)), np.int64(0)
        self.array, self.arrays = np.zeros(4, dtype=np.float32), [np.zeros(4, dtype=np.float32)]
        self.cache, self.window = {"h": torch.zeros(4), "n": 0}, deque([0.0, 1.0], maxlen=2)
        self.same_cache, self.kept = self.cache, SimpleNamespace(h=torch.zeros(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = square_loss(output, target)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(loss, alpha=0.5)
        self.seen.append(loss.item())
        return loss / self.mean.clone()


@pytest.mark.parametrize("program", [gpipe(1, M), one_f_one_b(2, M), zb_h1(2, M)], ids=lambda program: program.name)
def test_a_loss_that_is_a_module_counts_a_microbatch_once(program):
    found = []
    for run in (program, passes.recompute(program)):
        torch.manual_seed(0)
        modules, loss = [nn.Linear(4, 4) for _ in range(program.stages)], Criterion()
        runner = PipelineRunner(run, [Stage(module, at) for at, module in enumerate(modules)], None, loss)
        losses = [runner.step(torch.randn(4 * M, 4), torch.randn(4 * M, 4)).losses for _ in range(2)]
        found.append((losses, loss.mean, loss.seen, [p.grad for module in modules for p in module.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Shifted(nn.Module):
    """Positions have an offset, as those of OPT."""

    def __init__(self, copy: bool) -> None:
        super().__init__()
        self.words, self.copy = nn.Embedding(16, 4), copy

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> Tensor:
        positions = more["positions"].clone() if self.copy else more["positions"]
        return x + self.words(positions.add_(2).clone())


@pytest.mark.parametrize("way", ["checkpoint", "RECOMPUTE"])
def test_a_keyword_tensor_that_a_second_run_would_find_changed_is_refused_by_name(way):
    program = one_f_one_b(1, M) if way == "checkpoint" else passes.recompute(one_f_one_b(1, M), microbatches=M)

    def run(copy: bool) -> Tensor:
        module = Shifted(copy)
        runner = PipelineRunner(program, Stage(module, 0, checkpoint=way == "checkpoint"), None, square_loss)
        x = torch.ones(8, 4)
        runner.step(x, x, kwargs={"more": {"positions": torch.arange(8)}})
        return module.words.weight.grad

    again = "RECOMPUTE" if way == "RECOMPUTE" else "the second run of its checkpoint"
    with pytest.raises(ScheduleError, match=rf"stage 0 changes kwargs\['more'\]\['positions'\] in place, and {again}"):
        run(copy=False)
    assert run(copy=True).abs().sum(1).nonzero().flatten().tolist() == list(range(2, 10))


def test_targets_that_a_loss_changes_in_place_are_named_among_the_causes():
    program = passes.recompute(one_f_one_b(1, M), microbatches=M)
    runner = PipelineRunner(program, Stage(nn.Linear(4, 4), 0), None, lambda o, t: square_loss(o, t.sub_(1).clone()))
    with pytest.raises(ScheduleError, match=r"made another loss than its forward.*or changes its targets in place"):
        runner.step(torch.ones(8, 4), torch.ones(8, 4))
