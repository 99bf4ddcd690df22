"""Import and export beside transformers' from_pretrained and save_pretrained: seconds, and memory of a process.

    python packages/gpt/benchmarks/compare_hf.py [--layers 8] [--hidden 2048] [--rounds 3] [--dir FOLDER]

Each case is a process of its own: an import of a random bf16 Llama, an export of it, and transformers reading the same
folder and writing it again. Memory is the most that was resident and no mapped file (sampled every 2 ms) beyond what
the process had after the same work on a tiny model, with all libraries loaded. Rounds are interleaved; the page cache
is warm after the first, which is not counted. transformers maps the files as well, and it neither hashes what it writes
nor waits until it is on disk; import and export do.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MIB = 2**20
CASES = (("import", "hf", "run"), ("export", "run", "again"), ("transformers", "hf", "theirs"))


def resident() -> int:
    """Bytes of anonymous memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """A Llama of random bf16 weights in shards of about 500 MB; its bytes."""
    import torch
    from safetensors.torch import save_file

    from sixfold.gpt import GPTConfig
    from sixfold.gpt.huggingface import config as hf_config
    from sixfold.gpt.huggingface import convert as hf

    config = GPTConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 64, ffn_hidden_size=hidden * 4,
        vocab_size=32000, tie_embeddings=False,
    )  # fmt: skip
    raw = hf_config.write(config, max_positions=2048, dtype="bfloat16", tokens={})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    index, part, size, total = {}, {}, 0, 0

    def flush() -> None:
        save_file(part, folder / f"part-{total}.safetensors", metadata={"format": "pt"})
        index.update(dict.fromkeys(part, f"part-{total}.safetensors"))

    for name, shape in hf.canonical_shapes(config).items():
        theirs = hf.hf_name(name, {})  # as Llama has it
        part[theirs] = (torch.rand(shape) * 0.02).bfloat16()
        nbytes = part[theirs].nbytes
        size, total = size + nbytes, total + nbytes
        if size > 500 * 10**6:
            flush()
            part, size = {}, 0
    if part:
        flush()
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total


def measure(case: str, source: Path, target: Path) -> dict[str, float]:
    """Do one case in this process."""
    if case == "transformers":
        import torch
        from transformers import AutoModelForCausalLM
    else:
        from sixfold.gpt.huggingface import convert as hf

    def work(source: Path, target: Path) -> None:
        if case == "transformers":
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
        elif case == "import":
            hf.import_model(source, target)
        else:
            hf.export_model(source, target)

    with tempfile.TemporaryDirectory() as tiny:
        write_model(Path(tiny, "hf"), 1, 64)
        if case == "export":
            hf.import_model(Path(tiny, "hf"), Path(tiny, "run"))
        work(Path(tiny, "run" if case == "export" else "hf"), Path(tiny, "out"))
    start, most, over = resident(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], resident() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    work(source, target)
    seconds = time.perf_counter() - begin
    over.set()
    thread.join()
    return {"seconds": seconds, "mib": most[0] / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case, source, target = options.case
        print(json.dumps(measure(case, Path(source), Path(target))))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        root = Path(place)
        total = write_model(root / "hf", options.layers, options.hidden)
        found: dict[str, list[dict[str, float]]] = {"import": [], "export": [], "transformers": []}
        for number in range(options.rounds + 1):
            for case, source, target in CASES:
                words = [sys.executable, __file__, "--case", case, str(root / source), str(root / target)]
                said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
                if number:
                    found[case].append(json.loads(said.splitlines()[-1]))
            for made in ("run", "again", "theirs"):
                shutil.rmtree(root / made)
        print(f"{total / MIB:.0f} MiB of bf16")
        for case, rounds in found.items():
            best, most = min(one["seconds"] for one in rounds), max(one["mib"] for one in rounds)
            print(f"{case:13} {best:7.2f} s {total / MIB / best:7.0f} MiB/s, {most:7.0f} MiB held")


if __name__ == "__main__":
    main()
