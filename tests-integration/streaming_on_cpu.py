"""Run a program that uses mosaicml-streaming beside a CPU build of torch: python streaming_on_cpu.py PROGRAM

Streaming imports torchvision, and torchvision's wheel has operators compiled against CUDA: beside a CPU build of torch
they do not load, and its import ends where it gives two of them, which Streaming never calls, a shape. These are
declared here, without a body; all else is torchvision's and Streaming's own.
"""

import runpy
import sys

import torch

OPERATORS = ("nms", "qnms")


def import_torchvision() -> torch.library.Library | None:
    """torchvision as it is, or with its operators declared; what is returned is to be kept."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    else:
        return None
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


if __name__ == "__main__":
    kept = import_torchvision()
    runpy.run_path(sys.argv[1], run_name="__main__")
