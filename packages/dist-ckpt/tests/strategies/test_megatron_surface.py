"""megatron-core 0.16.1's public functions and classes, each here under its name or absent for a reason."""

import ast
import importlib
from pathlib import Path

import pytest

peer = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core lists the names")
ROOT = Path(peer.__file__).parent

ENGINE = "a step of save or load, which the engine takes by itself"
TORCH = "how the peer drives torch's planner; this package has its own engine"
FORK = "how the peer starts its writers; one worker process is kept here, see AsyncSaver"
LOCAL = "local checkpoints of nvidia-resiliency-ext, which this package does not serve"
REGISTERED = "built-in strategies are registered when the package is imported"
ABSENT = {
    "core": {"save_config": "metadata.json commits a checkpoint; save writes it, last"},
    "exchange_utils": {
        "is_float8tensor": "utils.force_all_tensors_to_non_fp8 knows TransformerEngine's tensors",
        "determine_main_replica_uniform_distribution": "cached_distribution of the wrappers shows theirs",
        "exchange_by_distribution": ENGINE,
        "exchange_loaded_objects_gather_object": ENGINE,
        "exchange_loaded_tensors_broadcast": ENGINE,
        "exchange_loaded_tensors_gather_object": ENGINE,
        "exchange_loaded_tensors_gather_rounds": ENGINE,
    },
    "serialization": {"remove_sharded_tensors": "it stands at the top level alone: dist_ckpt.remove_sharded_tensors"},
    "state_dict_utils": {
        "save_preprocess": ENGINE,
        "load_preprocess": ENGINE,
        "filter_out_empty_flatten_tensor": "empty ranges are legal here",
    },
    "strategies": {"register_default_common_strategies": REGISTERED},
    "strategies.async_utils": dict.fromkeys(["AsyncCaller", "TemporalAsyncCaller", "PersistentAsyncCaller"], FORK),
    "strategies.cached_metadata_filesystem_reader": {"CachedMetadataFileSystemReader": TORCH},
    "strategies.common": {"register_default_common_strategies": REGISTERED},
    "strategies.filesystem_async": {"FileSystemWriterAsync": FORK},
    "strategies.fully_parallel": {"distribute_main_replicas_with_precomputed_distribution": ENGINE},
    "strategies.state_dict_saver": dict.fromkeys(
        ["save_state_dict_async_plan", "verify_global_md_reuse", "save_state_dict_async_finalize"], TORCH
    ),
    "strategies.torch": dict.fromkeys(
        [
            "MCoreLoadPlanner",
            "MCoreMetadata",
            "MCoreSavePlan",
            "MCoreSavePlanner",
            "flatten_state_dict",
            "mcore_to_pyt_state_dict",
            "sharded_tensor_to_torch_sharded_tensor",
        ],
        TORCH,
    )
    | {"register_default_torch_strategies": REGISTERED},
    "tensor_aware_state_dict": {"MCoreTensorAwareStateDict": LOCAL},
    "validation": {
        "adjust_non_strict_load": ENGINE,
        "determine_global_metadata": ENGINE,
        "maybe_report_missing_and_unexpected_keys": ENGINE,
        "validate_integrity_and_strict_load": ENGINE,
        "validate_sharded_objects_handling": ENGINE,
        "validate_sharding_integrity": ENGINE,
        "verify_checkpoint_and_load_strategy": ENGINE,
    },
}


def public_names():
    """Module below the package and name of each public function and class, and of aliases of types in mapping.py."""
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.Assign) and module == "mapping":
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from ((module, name) for name in names if not name.startswith("_") and name != "logger")


NAMES = sorted(set(public_names()))


def test_the_peers_pages_are_found():
    assert len(NAMES) > 100
    assert {("", "save"), ("mapping", "ShardedStateDict"), ("strategies.base", "AsyncSaveShardedStrategy")} <= {*NAMES}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(filter(None, pair)) for pair in NAMES])
def test_a_name_is_here_or_absent_for_a_reason(module, name):
    ours = ".".join(filter(None, ("sixfold.dist_ckpt", module)))
    reason = ABSENT.get(module, {}).get(name)
    if reason is not None:
        assert len(reason) > 20
        try:
            found = importlib.import_module(ours)
        except ModuleNotFoundError:
            return
        assert not hasattr(found, name), f"{ours}.{name} is here; take it from the list of what is absent"
        return
    assert hasattr(importlib.import_module(ours), name), f"{ours}.{name}"


def test_no_reason_is_given_for_a_name_that_the_peer_has_not():
    listed = {(module, name) for module, names in ABSENT.items() for name in names}
    assert listed <= {*NAMES}, listed - {*NAMES}
