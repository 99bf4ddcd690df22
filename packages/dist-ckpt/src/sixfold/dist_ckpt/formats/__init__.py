"""Formats: bytes of frames, checksums, metadata and pickles, made and read. integrity.py alone opens files.

From outside: compact_manifest, dcp_pickle, frame, integrity, metadata, safetensors, unpickle, weights_only,
zarr_codecs, zstd.
"""
