"""What the server of ranks runs with ``--fill-recycled``: memory that is given back is filled in each rank."""

from sixfold.dist_ckpt.reused_memory import CHECK

CHECK.fills = True
