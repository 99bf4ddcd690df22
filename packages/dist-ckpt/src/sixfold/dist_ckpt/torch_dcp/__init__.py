"""torch DCP's StorageWriter and StorageReader over this package, for ``torch.distributed.checkpoint``.

From outside: duplicate_names, reader, writer.
"""
