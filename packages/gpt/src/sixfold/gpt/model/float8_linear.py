"""Products of the layers' linears in float8, by torchao: an extra, and a GPU whose units multiply float8 numbers.

    GPTModel, train.float8_products --> use_float8 (this file) --> the same modules, linears of torchao among them

torchao scales each operand of a product by its largest magnitude at that moment. Inputs and weights become
float8_e4m3fn, gradients float8_e5m2; all three products of a linear are so made. Parameters stay the same objects under
the same names, so that fsdp, optimizers and checkpoints have no part in it. Heads, routers and experts are left alone.
"""

import torch
from torch import nn

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import Block
from sixfold.gpt.model.moe import MixtureOfExperts

MULTIPLE = 16  # of both sides of a matrix, for torch._scaled_mm
CAPABILITY = (8, 9)  # Ada, Hopper and later


def check_float8(device: torch.device) -> None:
    """What float8 products need.

    Raises:
        ConfigError: the device does not multiply float8 numbers, or torchao cannot be imported.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"
        raise ConfigError(
            f"train.float8_products is true and this device is {name}, which does not multiply float8 numbers: that "
            f"takes compute capability {CAPABILITY[0]}.{CAPABILITY[1]}; train.float8_products = false works"
        )
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"train.float8_products is true and torchao cannot be imported ({error}): pip install "
            f"'sixfold-gpt[float8]', or train.float8_products = false"
        ) from error


def use_float8(model: nn.Module, *, emulate: bool = False) -> None:
    """Have the linears of ``model``'s layers multiply in float8, in place.

    Args:
        emulate: torchao rounds as it would and multiplies what the float8 numbers stand for; on any device.
    Raises:
        ConfigError: a side of a matrix of this rank is no multiple of 16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for block in model.modules():
        if not isinstance(block, Block):
            continue
        for part in (block.attention, block.ffn):
            if isinstance(part, MixtureOfExperts):
                continue
            for name, linear in part.named_children():
                if isinstance(linear, nn.Linear) and any(size % MULTIPLE for size in linear.weight.shape):
                    raise ConfigError(
                        f"train.float8_products is true and {name} of layer {block.number} has the shape "
                        f"{tuple(linear.weight.shape)} on this rank; float8 products take multiples of {MULTIPLE}: "
                        f"train.float8_products = false works"
                    )
            convert_to_float8_training(part, config=Float8LinearConfig(emulate=emulate))
