"""Where each tensor lies in a flat buffer: the public names of buffers/layout.py."""

from sixfold.fsdp.buffers.layout import Layout, Slice, TensorSpec, plan_layout

__all__ = ["Layout", "Slice", "TensorSpec", "plan_layout"]
