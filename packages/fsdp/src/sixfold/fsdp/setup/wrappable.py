"""What can be wrapped: the module, its units and its meshes looked at before anything is made.

    module, options.py --> look_at (this file) --> build.py, which raises on all ranks what one finds wrong

Reads the module; sends nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, ValuesView

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sixfold.fsdp.collectives.own_meshes import Meshes, own_meshes
from sixfold.fsdp.config import MERGE_BYTES
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.fp8.scaled_matmul import Fp8Matmul, fault_of
from sixfold.fsdp.parameter_access.guard import guard_of
from sixfold.fsdp.setup.options import Options
from sixfold.fsdp.setup.unit_selection import UnitSpec, find_units, merge_neighbours, single_layers


def look_at(
    module: nn.Module, options: Options, device: torch.device
) -> tuple[FsdpError | None, list[UnitSpec], Meshes]:
    """The units and the meshes of parameters, or what is wrong with the module."""
    try:
        for name, part in module.named_modules():
            if hasattr(part, "main_parameters"):
                raise FsdpError(f"{name or 'the module'} is a {type(part).__name__} already; wrap a model once")
            if isinstance(part, torch.jit.ScriptModule):
                raise FsdpError(
                    f"{name or 'the module'} is a module of torch.jit, which takes no hooks; wrap the module that it "
                    "was made of, and speed it up by torch.compile"
                )
        for name, parameter in module.named_parameters():
            fault = _fault_of(parameter, options.mixed_precision.main_dtype)
            if fault is not None:
                raise FsdpError(f"{name} {fault}")
        _refuse_shared_memory(module)
        unfit = _fp8_fault(module, options, device)
        if unfit is not None:
            raise FsdpError(unfit)
        specs = find_units(module, options.fsdp_unit_modules, root_units=options.root_units)
        specs = _merged(module, specs, options)
        return None, specs, own_meshes(module, options.mesh, options.group, options.mesh_for)
    except FsdpError as error:
        return error, [], Meshes()


def _merged(module: nn.Module, specs: list[UnitSpec], options: Options) -> list[UnitSpec]:
    """Small units together, as asked; unasked where no number of bytes for gathered weights was given."""
    given, itemsize = options.buffers.merge_bytes, options.mixed_precision.main_dtype.itemsize
    if isinstance(given, int):
        return merge_neighbours(specs, given, itemsize)
    if given is None or options.mesh_for is not None or isinstance(options.buffers.gathered_bytes, int):
        return specs
    layers = single_layers(module, options.fsdp_unit_modules, specs)
    return merge_neighbours(specs, MERGE_BYTES, itemsize, layers=layers)


def _refuse_shared_memory(module: nn.Module) -> None:
    """Two Parameter objects over one memory would part: each gets a place of its own. So would a module buffer and one.

    And a view in an attribute, which would keep start values.
    """
    ranges = []
    named_tensors = (
        ("", module.named_parameters()),
        ("module buffer ", module.named_buffers()),
        ("attribute ", _named_attributes(module)),
    )
    for kind, named in named_tensors:
        for name, tensor in named:
            if not tensor.is_meta and tensor.layout is torch.strided and tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                start = tensor.data_ptr()
                ranges.append((start, start + (last + 1) * tensor.dtype.itemsize, kind, name))
    end, before, before_kind = 0, "", ""
    for start, stop, kind, name in sorted(ranges):
        if start < end and not (kind and before_kind):
            raise FsdpError(
                f"{kind}{name} lies in the memory of {before_kind}{before} and is another object; after wrapping, each "
                "would have its own values. Use one Parameter (head.weight = embedding.weight), or clone() one"
            )
        if stop > end:
            end, before, before_kind = stop, name, kind


def _named_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in plain attributes and in lists and dicts there.

    Left out are those of modules with hooks before their forward, which may set them anew (``spectral_norm`` does).
    """
    for path, part in module.named_modules():
        for name, value in [] if part._forward_pre_hooks else vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                items = value.values() if isinstance(value, dict) else value
                for one in items if isinstance(items, (list, tuple, ValuesView)) else [value]:
                    if type(one) is Tensor:
                        yield f"{path}.{name}".removeprefix("."), one


def fp8_names_of(module: nn.Module, options: Options) -> list[str]:
    """Parameters that are to be fp8."""
    chosen = options.mixed_precision.fp8
    return [] if chosen is None else [name for name, _ in module.named_parameters() if chosen(name)]


def _fp8_fault(module: nn.Module, options: Options, device: torch.device) -> str | None:
    matmul = Fp8Matmul(options.mixed_precision.fp8_matmul)
    names = fp8_names_of(module, options) if matmul.on_bytes else []
    for name in names:
        fault = fault_of(module.get_parameter(name), device, matmul)
        if fault is not None:
            return (
                f"{name} {fault}: fp8_matmul={matmul.value!r} cannot multiply it; leave it out of MixedPrecision.fp8, "
                "or use fp8_matmul='emulate'"
            )
    return None


def _fault_of(parameter: nn.Parameter, main_dtype: torch.dtype) -> str | None:
    """What is wrong with a parameter, and what to do."""
    if guard_of(parameter) is not None:
        return (
            "was wrapped before, and its weights lie in that wrapper's flat buffers; wrap the whole model once and "
            "name its units in fsdp_unit_modules"
        )
    if is_lazy(parameter):
        return "has no shape yet (a lazy module); run one forward before wrapping"
    if is_traceable_wrapper_subclass(parameter):
        return (
            f"is a {type(parameter).__name__}; parameters are plain tensors. Give the local tensors of tensor-parallel "
            "weights, and keep other axes outside the mesh given here"
        )
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}; parameters are floating, others are module buffers"
    if parameter.dtype.itemsize > main_dtype.itemsize:
        return (
            f"is {parameter.dtype} and main weights would be {main_dtype}, which rounds it; use "
            f"MixedPrecision(main_dtype={parameter.dtype}) or convert the module before wrapping"
        )
    return None
