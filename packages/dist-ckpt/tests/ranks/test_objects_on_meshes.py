"""``{"model": model, "optimizer": optimizer}`` of all optimizers, between HSDP, FSDP2 with TP, DDP and one process."""

import pytest
import torch
from saved_forms_helpers import wrong
from usual_ways_helpers import LAYOUTS, OPTIMIZERS, Net, full

from ranktest import run_ranks
from sixfold import dist_ckpt

#: torch refuses their arithmetic on DTensors of two axes; a test says so
NOT_ON_MESHES = {"Adafactor", "LBFGS", "Rprop"}
MESHES = {"hsdp", "fsdp2 and tp"}
MOVES = [
    ("hsdp", 4, "fsdp2 and tp", 4),
    ("fsdp2 and tp", 4, "hsdp", 4),
    ("fsdp2 and tp", 2, "hsdp", 1),
    ("hsdp", 2, "fsdp2 and tp", 4),
    ("fsdp2 and tp", 4, "plain", 1),
    ("plain", 1, "fsdp2 and tp", 2),
    ("hsdp", 4, "ddp", 2),
    ("ddp", 2, "hsdp", 4),
    ("ddp", 4, "plain", 1),
    ("plain", 1, "ddp", 2),
]


def made(name, layout, ranks, seed):
    torch.manual_seed(seed)
    net = Net()
    model = LAYOUTS[layout](net, ranks)
    parameters = [parameter for parameter in net.parameters() if parameter.ndim == 2 or name != "Muon"]
    return model, getattr(torch.optim, name)(parameters, lr=1e-2, **OPTIMIZERS[name])


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def whole(model, optimizer):
    """Weights, buffers and all state of the optimizer by the names of the model, and its groups."""
    net = getattr(model, "module", model)
    found = {"model": {name: full(value) for name, value in net.state_dict().items()}, "state": {}}
    for name, parameter in net.named_parameters():
        state = optimizer.state.get(parameter, {})
        found["state"][name] = {part: listed(value) for part, value in state.items()}
    found["groups"] = [{key: v for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
    return found


def listed(value):
    return [full(one) for one in value] if isinstance(value, list) else full(value)


def names_of(*layouts):
    return [name for name in OPTIMIZERS if not (MESHES & {*layouts} and name in NOT_ON_MESHES)]


def saves(rank, ranks, layout, names, folder):
    found = {}
    for name in names:
        model, optimizer = made(name, layout, ranks, 0)
        train(model, optimizer, range(3))
        dist_ckpt.save({"model": model, "optimizer": optimizer}, folder / name)
        found[name] = whole(model, optimizer)
        train(model, optimizer, range(3, 5))
        found[name]["then"] = whole(model, optimizer)["model"]
    if rank == 0:
        torch.save(found, folder / "expected.pt")


def loads(rank, ranks, layout, names, folder):
    """Names of what is not as it was saved; a new optimizer and one that has state already.

    Steps after it are close: matrix products of other shapes round otherwise, those of Muon in bfloat16.
    """
    told, expected = {}, torch.load(folder / "expected.pt", weights_only=False)
    for name in names:
        then = expected[name].pop("then")
        for steps in (0, 1):
            model, optimizer = made(name, layout, ranks, 1)
            train(model, optimizer, range(steps))
            dist_ckpt.load({"model": model, "optimizer": optimizer}, folder / name)
            paths = wrong(whole(model, optimizer), expected[name])
            train(model, optimizer, range(3, 5))
            found = whole(model, optimizer)["model"]
            close = {"rtol": 1e-2, "atol": 1e-3} if name == "Muon" else {"rtol": 1e-4, "atol": 1e-5}
            paths += [f"then {key}" for key in then if not torch.allclose(found[key], then[key], **close)]
            told |= {f"{name} after {steps}": paths} if paths else {}
    return told


@pytest.mark.parametrize(("before", "ranks", "after", "others"), MOVES)
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_all_optimizers_of_torch_go_on_in_another_layout(tmp_path, before, ranks, after, others):
    names = names_of(before, after)
    run_ranks(saves, ranks, before, names, tmp_path)
    assert run_ranks(loads, others, after, names, tmp_path) == [{}] * others


def refused_by_torch(rank, ranks, layout):
    texts = {}
    for name in sorted(NOT_ON_MESHES):
        with pytest.raises(RuntimeError) as told:
            train(*made(name, layout, ranks, 0), range(3))
        texts[name] = str(told.value)
    return texts


@pytest.mark.parametrize("layout", sorted(MESHES))
@pytest.mark.slow
def test_torch_itself_steps_those_that_are_left_out_on_no_mesh(layout):
    texts = run_ranks(refused_by_torch, 4, layout)[0]
    assert all("unevenly sharded" in text or "in-place operations" in text for text in texts.values()), texts
