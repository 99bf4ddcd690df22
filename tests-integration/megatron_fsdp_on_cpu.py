"""Run a program that uses megatron-fsdp where no CUDA device is: python megatron_fsdp_on_cpu.py PROGRAM

What it asks of CUDA are stand-ins that do nothing, the same as in packages/fsdp's comparisons.
"""

import runpy
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "packages/fsdp/tests"))
from fsdp_peers_helpers import cuda_stand_ins, import_megatron_fsdp

if __name__ == "__main__":
    cuda_stand_ins()
    with mock.patch.object(dist, "get_backend", return_value="gloo"):
        import_megatron_fsdp()
    runpy.run_path(sys.argv[1], run_name="__main__")
