"""Pairs on S3, by moto's server: slow, failing, and equal to local ones."""

from pathlib import Path

import numpy as np
import pytest

from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder, RemoteOptions, StoreError


@pytest.fixture(scope="module")
def server():
    for name in ("moto", "flask", "flask_cors", "s3fs"):
        pytest.importorskip(name, reason=f"the S3 server of these tests needs {name}")
    from s3_server import started

    with started() as running:
        yield running


@pytest.mark.slow
def test_a_pair_on_s3_is_read_through_failing_requests_as_the_local_one(server, tmp_path):
    import s3fs
    from s3_server import Fault

    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "wiki.bin", np.uint16) as builder:
        for _ in range(60):
            builder.add_document(rng.integers(0, 60_000, rng.integers(1, 400)))
    local, bucket = IndexedDataset(tmp_path / "wiki"), server.bucket()
    store = s3fs.S3FileSystem(**server.storage_options())
    for end in (".bin", ".idx"):
        store.pipe(f"{bucket}/wiki{end}", Path(f"{tmp_path}/wiki{end}").read_bytes())
    options = RemoteOptions(storage_options=server.storage_options(), check_s=1e-9)
    remote = IndexedDataset(f"s3://{bucket}/wiki", remote=options)
    server.set(latency_ms=50, faults=[Fault(what="error", kind="range", chance=0.05)])
    remote.prefetch(local.sequence_pointers // 2, local.sequence_lengths)
    for number in range(len(local)):
        assert np.array_equal(remote[number], local[number])
    server.set()
    assert remote.mask is None
    assert IndexedDataset.exists(f"file://{tmp_path}/wiki")
    again = IndexedDataset(f"s3://{bucket}/wiki", remote=options)
    store.pipe(f"{bucket}/wiki.bin", bytes(local.tokens.nbytes))  # of the same size, and another tag
    with pytest.raises(StoreError, match="the object was replaced"):
        again[3]
