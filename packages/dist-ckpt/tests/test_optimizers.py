"""Optimizer state by the records of a tensor-parallel model: a real AdamW saved at one layout goes on at another."""

import copy

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory, ShardingError, optimizer
from sixfold.dist_ckpt.optimizers import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)

ROWS, COLUMNS = 8, 6


class TensorParallel(torch.nn.Module):
    """Rank ``rank`` of ``ranks``: a column of the first weight, a row of the second, a whole bias."""

    def __init__(self, whole, rank, ranks):
        super().__init__()
        self.up = torch.nn.Parameter(whole["up"].chunk(ranks, 0)[rank].clone())
        self.down = torch.nn.Parameter(whole["down"].chunk(ranks, 1)[rank].clone())
        self.bias = torch.nn.Parameter(whole["bias"].clone())
        self.rank, self.ranks = rank, ranks

    def sharded_state_dict(self):
        state = self.state_dict(keep_vars=True)
        at = self.rank, self.ranks
        return {
            "up": ShardedTensor.from_rank_offsets("up", state["up"], (0, *at)),
            "down": ShardedTensor.from_rank_offsets("down", state["down"], (1, *at)),
            "bias": ShardedTensorFactory("bias", state["bias"], self._halves, lambda d: torch.cat(d), self.rank),
        }

    @staticmethod
    def _halves(key, data, replica_id, flattened_range):
        half = data.numel() // 2
        return [
            ShardedTensor.from_rank_offsets(f"{key}.low", data[:half], replica_id=replica_id),
            ShardedTensor.from_rank_offsets(f"{key}.high", data[half:], replica_id=replica_id),
        ]


def whole_weights():
    generator = torch.Generator().manual_seed(3)
    return {
        "up": torch.randn(ROWS, COLUMNS, generator=generator),
        "down": torch.randn(COLUMNS, ROWS, generator=generator),
        "bias": torch.randn(COLUMNS, generator=generator),
    }


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return {key: torch.randn(t.shape, generator=generator) for key, t in whole_weights().items()}


def step_once(model, adam, step):
    grads = gradients(step)
    model.up.grad = grads["up"].chunk(model.ranks, 0)[model.rank].clone()
    model.down.grad = grads["down"].chunk(model.ranks, 1)[model.rank].clone()
    model.bias.grad = grads["bias"].clone()
    adam.step()


def job(ranks, steps):
    """All ranks of a job, stepped; every rank starts from the same whole weights."""
    models = [TensorParallel(whole_weights(), rank, ranks) for rank in range(ranks)]
    adams = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for step in range(steps):
        for model, adam in zip(models, adams, strict=True):
            step_once(model, adam, step)
    return models, adams


def sharded(model, adam):
    model_state = model.sharded_state_dict()
    optim_state = copy.deepcopy(adam.state_dict()) if not adam.state else adam.state_dict()
    steps = {number: state["step"] for number, state in optim_state["state"].items()}
    id_map = get_param_id_to_sharded_param_map(model_state, model.parameters())
    optim_state_to_sharding_state(optim_state, id_map, exclude_keys=("step",))
    return {"model": model_state, "optimizer": optim_state, "steps": steps}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_adamw_goes_on_bit_for_bit_at_another_tensor_parallel_size(tmp_path, before, after):
    dist_ckpt.save({f"rank{m.rank}": sharded(m, a) for m, a in zip(*job(before, 3), strict=True)}, tmp_path / "c")
    models, adams = job(after, 1)  # one step makes the state; its values are then loaded over
    common_of_first = dist_ckpt.load_common_state_dict(tmp_path / "c")["rank0"]
    for model, adam in zip(models, adams, strict=True):
        loaded = dist_ckpt.load(
            {"rank0": sharded(model, adam)}, tmp_path / "c", group=None, validate_access_integrity=False
        )["rank0"]
        model.load_state_dict(loaded["model"])
        for number, state in loaded["optimizer"]["state"].items():
            state["step"] = common_of_first["steps"][number].clone()
        adam.load_state_dict(loaded["optimizer"])
        assert loaded["optimizer"]["param_groups"][0]["params"] == [0, 1, 2]
        step_once(model, adam, 3)
    expected, _ = job(1, 4)
    assert torch.equal(torch.cat([m.up for m in models]), expected[0].up)
    assert torch.equal(torch.cat([m.down for m in models], 1), expected[0].down)
    assert all(torch.equal(m.bias, expected[0].bias) for m in models)


def test_stored_keys_name_state_and_parameter(tmp_path):
    models, adams = job(1, 1)
    dist_ckpt.save(sharded(models[0], adams[0]), tmp_path / "c")
    keys = sorted(key for key in dist_ckpt.load_tensors_metadata(tmp_path / "c") if key.startswith("optimizer"))
    assert keys == sorted(
        f"optimizer.state.{state}.{key}"
        for state in ("exp_avg", "exp_avg_sq")
        for key in ("bias.high", "bias.low", "down", "up")
    )


def test_the_zero_dimensional_step_is_refused_by_name_unless_excluded():
    models, adams = job(1, 1)
    id_map = get_param_id_to_sharded_param_map(models[0].sharded_state_dict(), models[0].parameters())
    state = adams[0].state_dict()
    with pytest.raises(ShardingError, match=r"optimizer\.state\.step\.up: the state has shape \(\), .* 'step'"):
        optim_state_to_sharding_state(state, id_map)
    assert not isinstance(state["param_groups"][0]["params"], LocalNonpersistentObject)


def test_a_map_without_parameters_warns_of_keep_vars():
    models, _ = job(1, 0)
    state = {"up": ShardedTensor.from_rank_offsets("up", models[0].state_dict()["up"])}
    with pytest.warns(UserWarning, match="keep_vars=True"):
        assert get_param_id_to_sharded_param_map(state, models[0].parameters()) == {}


def test_state_of_a_parameter_without_a_record_is_refused():
    models, adams = job(1, 1)
    model_state = models[0].sharded_state_dict()
    del model_state["down"]
    id_map = get_param_id_to_sharded_param_map(model_state, models[0].parameters())
    with pytest.raises(ShardingError, match="parameter 1 of the optimizer has no record"):
        optim_state_to_sharding_state(adams[0].state_dict(), id_map, ("step",))


def test_state_may_have_another_dtype_and_a_flattened_parameter():
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 4), flattened_range=slice(1, 4))
    made = make_sharded_optimizer_tensor(flat, torch.ones(3, dtype=torch.float64), "optimizer.state.m")
    assert (made.key, made.dtype, made.flattened_range) == ("optimizer.state.m.w", torch.float64, slice(1, 4))


def test_megatrons_module_name_holds_the_same_functions():
    assert optimizer.optim_state_to_sharding_state is optim_state_to_sharding_state


def test_counters_none_and_nested_state_belong_to_their_parameter_at_any_layout(tmp_path):
    def described(ranks, fill):
        parts = []
        for model in job(ranks, 0)[0]:
            state = {
                number: {
                    "count": 7 if fill else 0,
                    "last": None if fill else 1,
                    "inner": {"buffers": [p.detach() * 2 if fill else torch.zeros_like(p)], "kind": "nag" * fill},
                }
                for number, p in enumerate(model.parameters())
            }
            optim_state = {"state": state, "param_groups": [{"lr": 0.1, "betas": None, "params": [0, 1, 2]}]}
            model_state = model.sharded_state_dict()
            id_map = get_param_id_to_sharded_param_map(model_state, model.parameters())
            optim_state_to_sharding_state(optim_state, id_map)
            parts.append(optim_state)
        return {"ranks": parts}

    dist_ckpt.save(described(2, True), tmp_path / "c")
    loaded = dist_ckpt.load(described(4, False), tmp_path / "c")["ranks"]
    whole = whole_weights()
    for rank, part in enumerate(loaded):
        for states in part["state"].values():
            assert (states["count"], states["last"], states["inner"]["kind"]) == (7, None, "nag")
        assert torch.equal(part["state"][0]["inner"]["buffers"][0], 2 * whole["up"].chunk(4, 0)[rank])
        assert torch.equal(part["state"][2]["inner"]["buffers"][0], 2 * whole["bias"])
