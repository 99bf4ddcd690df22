"""CPU time of one update beside a plain torch loop, in turns: what else the machine does hits both alike.

    python packages/gpt/benchmarks/update_in_turns.py [rounds] [fp32]     a minute at 30 rounds, on a quiet machine

One process, one thread, the shapes of bench_model.py: bfloat16 compute (fp32 where a CPU has no instructions for it),
fp32 main weights, clipping, fused AdamW. Both train the same number of tokens of the same model. A ratio above 1 is
tokens per CPU second over the plain loop's.
"""

import statistics
import sys
import time

import torch
from bench_model import SEQ, SHAPES, plain_update, sixfold_update

WHO = ("plain loop", "sixfold no_shard", "sixfold default", "sixfold zero3")
GATHERS = "fsdp.gathered_bytes=double"  # as on several ranks


def main(rounds: int, precision: str) -> None:
    torch.set_num_threads(1)
    of_precision = f"train.precision={precision}"
    for shape, (config, b) in SHAPES.items():
        tokens = torch.randint(0, config.vocab_size, (b, SEQ), generator=torch.Generator().manual_seed(0))
        updates = {
            WHO[0]: plain_update(config, tokens, precision),
            WHO[1]: sixfold_update(config, b, "no_shard", tokens, of_precision),
            WHO[2]: sixfold_update(config, b, "optim_grads_params", tokens, of_precision),
            WHO[3]: sixfold_update(config, b, "optim_grads_params", tokens, of_precision, GATHERS),
        }
        for update in updates.values():  # what is made once; zero-3 records its order in the first
            update()
            update()
        seconds: dict[str, list[float]] = {who: [] for who in WHO}
        for _ in range(rounds):
            for who, update in updates.items():
                begin = time.process_time()
                update()
                seconds[who].append(time.process_time() - begin)
        for who, taken in seconds.items():
            turns = [plain / own for plain, own in zip(seconds[WHO[0]], taken, strict=True)]
            best = min(seconds[WHO[0]]) / min(taken)
            print(
                f"{shape:22} {who:17} {b * SEQ / min(taken):7.0f} tokens per CPU second at best; over the plain loop "
                f"{best:.3f} at best, {statistics.median(turns):.3f} in the median of turns"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30, "fp32" if "fp32" in sys.argv[2:] else "bf16")
