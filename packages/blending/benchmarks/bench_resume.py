"""What a resume costs: position 1e9 of a dataset of 5e9 documents, and the first batch deep in an epoch.

    python packages/blending/benchmarks/bench_resume.py                     # files with holes: 60 GB that take none
    python packages/blending/benchmarks/bench_resume.py --shuffle           # sums of an epoch, 1e6 to 1e8 documents
    python packages/blending/benchmarks/bench_resume.py --batch 100000000   # the first batch at the middle of an epoch

Each part runs in a process of its own: wall and CPU seconds, the peak of its memory beyond imports. "cold": the page
cache of the files is dropped before (posix_fadvise), which holes make cheaper than a disk does; --folder says where.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SEQUENCE_LENGTH, DOCUMENT_BYTES = 4096, 1000  # 500 tokens of uint16


def write_pair(prefix: str, documents: int, *, filled: bool) -> None:
    """An .idx of equal documents: all of it, or only its ends and holes between; and a .bin of one hole."""
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        lengths, pointers = file.tell(), file.tell() + 4 * documents
        file.truncate(pointers + 8 * documents + 8 * (documents + 1))
        spans = [(0, documents)] if filled else [(0, 1024), (documents - 1024, documents)]
        for begin, end in spans:
            for at in range(begin, end, 2**22):
                number = np.arange(at, min(at + 2**22, end), dtype=np.int64)
                file.seek(lengths + 4 * at)
                file.write(np.full(number.size, DOCUMENT_BYTES // 2, dtype=np.int32).tobytes())
                file.seek(pointers + 8 * at)
                file.write((number * DOCUMENT_BYTES).tobytes())
        file.seek(pointers + 8 * documents + 8 * documents)
        file.write(struct.pack("<q", documents))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(documents * DOCUMENT_BYTES)


def drop(prefix: str) -> None:
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def peak_MiB() -> float:
    """The most memory that this process has held."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024


def measured(prefix: str, documents: int, position: int, shuffle: str, batch: bool) -> dict[str, float]:
    """One process: open, state, load, and the first batch if it is asked for."""
    from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig

    before, wall, cpu = peak_MiB(), time.perf_counter(), time.process_time()
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQUENCE_LENGTH, blend=([prefix], [1]), split="1", document_shuffle=shuffle,
        max_epochs=None,
    )  # fmt: skip
    train = BlendedMegatronDatasetBuilder(GPTDataset, [position + 1, 0, 0], lambda: True, config).build()[0]
    train.load_state_dict(train.state_dict(position))
    opened = time.perf_counter() - wall
    if batch:
        train.get_batch(range(position, position + 4))
    return {
        "open_and_load_s": opened,
        "all_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "more_MiB": peak_MiB() - before,
    }


def in_a_process(*arguments: object) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(arguments)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def tell(what: str, found: dict[str, float]) -> None:
    print(f"{what}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)


def sums() -> None:
    from sixfold.blending.documents.part import Part
    from sixfold.blending.samples.document_shuffle import GloballyShuffledLine

    class Held:
        dtype = np.dtype(np.uint16)

    for documents in (10**6, 10**7, 10**8):
        held = Held()
        held.sequence_lengths = np.random.default_rng(0).integers(1, 1000, documents, dtype=np.int32)
        held.sequence_pointers = (np.cumsum(held.sequence_lengths, dtype=np.int64) - held.sequence_lengths) * 2
        line = GloballyShuffledLine(Part(held, range(documents)), 1, "a", "train")
        begin = time.process_time()
        line._epoch(0, tokens=1)
        first, begin = time.process_time() - begin, time.process_time()
        before, block = line._epoch(0, slots=line.blocks)
        whole = time.process_time() - begin
        print(
            f"{documents} documents: first place {first * 1e3:.2f} ms, whole epoch {whole:.3f} s CPU "
            f"({whole / documents * 1e9:.1f} ns each), {(before.nbytes + block.nbytes) / 1e6:.1f} MB kept",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=5_000_000_000)
    parser.add_argument("--position", type=int, default=1_000_000_000)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--batch", type=int, metavar="DOCUMENTS")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(*json.loads(options.child))))
        return
    if options.shuffle:
        sums()
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prefix = str(Path(folder) / "data")
        documents = options.batch or options.documents
        write_pair(prefix, documents, filled=options.batch is not None)
        position = documents * DOCUMENT_BYTES // 2 // SEQUENCE_LENGTH // 2 if options.batch else options.position
        for shuffle in ("block", "global") if options.batch else ("block",):
            for state in ("cold", "warm"):
                if state == "cold":
                    drop(prefix)
                found = in_a_process(prefix, documents, position, shuffle, options.batch is not None)
                tell(f"{documents} documents, position {position}, {shuffle}, {state}", found)


if __name__ == "__main__":
    main()
