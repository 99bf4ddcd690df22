"""Formats: bytes of frames, checksums, metadata and pickles, made and read. integrity.py alone opens files."""
