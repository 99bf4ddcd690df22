"""What a device can do: a table of those that the field trains on, and machines that ``sixfold doctor`` measured.

    name, or doctor's file --> Device (this file) --> stage_times.py, plan.py

Numbers only: no torch, and no device is asked, but the names of the CPU's instructions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError

# The reference slides' own figures: 600 TFLOP/s achieved on an H100 in matrix products, 85 % of a node's links.
MATMUL_EFFICIENCY = 600 / 989.4
LINK_EFFICIENCY = 0.85
# An A100 comes nearer to its peak: whole steps reach a hardware utilisation of 76.8 % in llm-foundry's table of
# published runs (13B, 4096), so products are at least as fast. See published_runs.py for the source.
MATMUL_EFFICIENCY_A100 = 0.768


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device and what connects it to others. Rates are per second and of one direction.

    Attributes:
        kind: "cpu" or "cuda": which attention runs.
        peak_flops: dense bf16, as the maker says; what MFU is a part of. None: no MFU is told.
        flops, flops_fp32: achieved in matrix products. None: no time is told.
        memory_bytes: what a process can have of it. None: everything fits.
        memory_bytes_per_s: of its memory, for the optimizer's step and operators without products.
        near_bytes_per_s: into a device from the others of its node.
        node_bytes_per_s: of all links of a node together.
        latency_s: of a collective or a message, whatever its size.
        measured: the rates were measured by `sixfold doctor`.
    """

    name: str
    kind: str
    per_node: int
    peak_flops: float | None
    flops: float | None
    flops_fp32: float | None
    memory_bytes: int | None
    memory_bytes_per_s: float
    near_bytes_per_s: float
    node_bytes_per_s: float
    latency_s: float
    measured: bool = False

    @property
    def far_bytes_per_s(self) -> float:
        """A device's share of its node's links."""
        return self.node_bytes_per_s / self.per_node

    def flops_of(self, precision: str) -> float | None:
        """Achieved in ``train.precision``."""
        return self.flops_fp32 if precision == "fp32" else self.flops


def _gpu(
    name: str,
    *,
    bf16: float,
    fp32: float,
    mebibytes: int,
    memory_tb_per_s: float,
    nvlink_gb: float,
    gbit: float,
    efficiency: float = MATMUL_EFFICIENCY,
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        per_node=8,
        peak_flops=bf16 * 1e12,
        flops=bf16 * 1e12 * efficiency,
        flops_fp32=fp32 * 1e12 * efficiency,
        memory_bytes=mebibytes * 2**20,
        memory_bytes_per_s=memory_tb_per_s * 1e12 * LINK_EFFICIENCY,
        near_bytes_per_s=nvlink_gb / 2 * 1e9 * LINK_EFFICIENCY,
        node_bytes_per_s=8 * gbit / 8 * 1e9 * LINK_EFFICIENCY,
        latency_s=20e-6,
    )


# Peak dense bf16 and fp32 (not TF32) TFLOP/s, memory and its rate, NVLink of both directions: NVIDIA's data sheets
# "A100 Tensor Core GPU" (SXM, 80 GB), "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU" (SXM) and "DGX B200" (an
# eighth of the system). Memory in MiB is what the driver shows of it. Links: eight a node, of 200 Gbit/s in a DGX A100
# and of 400 in DGX H100, H200 and B200, as their data sheets say.
_TABLE = (
    _gpu(
        "a100",
        bf16=312,
        fp32=19.5,
        mebibytes=81_920,
        memory_tb_per_s=2.039,
        nvlink_gb=600,
        gbit=200,
        efficiency=MATMUL_EFFICIENCY_A100,
    ),
    _gpu("h100", bf16=989.4, fp32=66.9, mebibytes=81_559, memory_tb_per_s=3.35, nvlink_gb=900, gbit=400),
    _gpu("h200", bf16=989.4, fp32=66.9, mebibytes=143_771, memory_tb_per_s=4.8, nvlink_gb=900, gbit=400),
    _gpu("b200", bf16=2250, fp32=75, mebibytes=183_359, memory_tb_per_s=8.0, nvlink_gb=1800, gbit=400),
    Device(
        name="cpu",
        kind="cpu",
        per_node=1 << 30,
        peak_flops=None,
        flops=None,
        flops_fp32=None,
        memory_bytes=None,
        memory_bytes_per_s=10e9,
        near_bytes_per_s=1e9,
        node_bytes_per_s=1e9,
        latency_s=100e-6,
    ),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}


# As Linux names them, on x86 and on ARM.
_BFLOAT16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions for bfloat16. Without them a product takes some 40 times as long as in fp32.

    False where Linux does not say.
    """
    try:
        return not _BFLOAT16_INSTRUCTIONS.isdisjoint(cpuinfo.read_text().split())
    except OSError:
        return False


def peak_flops_of(model: str) -> float | None:
    """Dense bf16 peak of a GPU by torch's name for it, as ``NVIDIA H100 80GB HBM3``; None: not in the table.

    The table has the SXM cards. A PCIe or NVL card of the same name has fewer units or clocks, and is in no table here.
    """
    words = model.upper().replace("-", " ").split()
    if {"PCIE", "NVL"} & set(words):
        return None
    return next((device.peak_flops for device in _TABLE if device.name.upper() in words), None)


def device_named(name: str) -> Device:
    """An entry of the table.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in DEVICES:
        raise ConfigError(f"there is no device {name!r} in the table; it has {', '.join(DEVICES)}")
    return DEVICES[name]


def device_of_machine(path: str | Path) -> Device:
    """What ``sixfold doctor`` wrote of a machine: its entry of the table with the rates that were measured there.

    Raises:
        ConfigError: no file of doctor's.
    """
    try:
        found: Any = json.loads(Path(path).read_text())["machine"]
        device = device_named(found["device"])
        numbers = {
            key: float(found[key])
            for key in (
                "flops",
                "flops_fp32",
                "memory_bytes_per_s",
                "near_bytes_per_s",
                "node_bytes_per_s",
                "latency_s",
            )
            if found.get(key) is not None
        }
        sizes = {key: int(found[key]) for key in ("memory_bytes", "per_node") if found.get(key) is not None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no file that `sixfold doctor` wrote ({type(error).__name__}: {error}); run it on the "
            "machine that is planned for"
        ) from error
    bad = [key for key, value in (numbers | sizes).items() if not (math.isfinite(value) and value > 0)]
    if bad:
        raise ConfigError(f"{path}: {bad[0]} is not a number > 0; run `sixfold doctor` again")
    return replace(device, name=f"{device.name} ({path})", measured=True, **numbers, **sizes)  # type: ignore[arg-type]
