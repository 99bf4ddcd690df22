"""megatron-core's own modules with this package in the place of its ``dist_checkpointing``: its model and optimizer."""

import subprocess
import sys

import pytest

pytest.importorskip("megatron.core.dist_checkpointing", reason="its modules are the callers")

# In a process of its own: whose modules were imported before would keep the peer's.
SCRIPT = """
import importlib, importlib.abc, importlib.util, pathlib, sys, warnings
warnings.simplefilter("ignore")
PEER = "megatron.core.dist_checkpointing"

class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        ours = name == PEER or name.startswith(PEER + ".")
        return importlib.util.spec_from_loader(name, self) if ours else None
    def create_module(self, spec):
        return importlib.import_module(spec.name.replace(PEER, "sixfold.dist_ckpt"))
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Instead())
import torch
real = torch.tensor
torch.tensor = lambda *a, **k: real(*a, **({**k, "device": "cpu"} if k.get("device") == "cuda" else k))
torch.cuda.current_device = lambda: torch.device("cpu")
import megatron.core
root = pathlib.Path(megatron.core.__path__[0])
asked = 0
for path in sorted(root.rglob("*.py")):
    if "dist_checkpointing" in path.parts or "dist_checkpointing" not in path.read_text():
        continue
    asked += 1
    try:
        importlib.import_module(".".join(("megatron", "core", *path.relative_to(root).with_suffix("").parts)))
    except ModuleNotFoundError as error:  # of an optional library
        assert "dist_ckpt" not in str(error), error
assert asked > 20, asked
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer import TransformerConfig
assert dist_checkpointing.__name__ == "sixfold.dist_ckpt"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, gated_linear_unit=True
)
model = GPTModel(config, get_gpt_layer_local_spec(), 64, 32)
groups = dict(wd_mult=1.0, lr_mult=1.0, is_expert_parallel=False, is_decoupled_lr=False, default_config=True)
adam = torch.optim.Adam([{"params": list(model.parameters()), "min_lr": 0.0, "max_lr": 1e-3, **groups}])
for parameter in model.parameters():
    parameter.main_grad = parameter.grad = torch.randn_like(parameter)
adam.step()
optimizer = FP32Optimizer(adam, OptimizerConfig(optimizer="adam", lr=1e-3), lambda *_: None)

def described(is_loading):
    of_model = model.sharded_state_dict(prefix="model.")
    return {"m": of_model, "o": optimizer.sharded_state_dict(of_model, is_loading=is_loading)}

def held():
    moments = [adam.state[p][name] for p in model.parameters() for name in sorted(adam.state[p])]
    return [*(p.detach() for p in model.parameters()), *moments]

dist_checkpointing.save(described(False), sys.argv[1])
before = [value.clone() for value in held()]
for value in held():
    value.zero_()
found = dist_checkpointing.load(described(True), sys.argv[1])
optimizer.load_state_dict(found["o"])
# Steps are one number for all parameters there: saved as such, and given back to each.
assert len(before) > 60 and all(map(torch.equal, before, held()))
print("restored", len(before))
"""


@pytest.mark.slow
def test_the_peers_model_and_optimizer_save_and_load_through_this_package(tmp_path):
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "c")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("restored")
