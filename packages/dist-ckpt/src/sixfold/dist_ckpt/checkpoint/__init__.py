"""An existing checkpoint, opened: found, its small files read, nothing in them believed; its large ones mapped.

From outside: opening, safetensors_folder, zarr_folder.
"""
