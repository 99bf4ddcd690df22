"""Formats: bytes of frames, checksums, metadata and pickles, made and read. No path is opened."""
