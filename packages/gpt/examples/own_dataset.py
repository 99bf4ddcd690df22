"""Data of one's own under the same loop: any map-style torch Dataset, here sums that are made up by number.

The run reads the datasets by the names in `data.blend` and `data.valid`, mixes them by `data.weights`, and keeps one
number, how many samples it has read: the order is computed, each epoch another permutation, the same at every layout
and after a restart. An item is a pure function of its number: `seq_length + 1` ids, or a dict as here.
"""

import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset

from sixfold.gpt import TrainConfig, load_model, train
from sixfold.gpt.tokenizer import ByteTokenizer

WIDTH = 16


class Sums(Dataset[dict[str, torch.Tensor]]):
    """ "7+12=19": every pair of numbers below `limit`, with loss on the answer alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __len__(self) -> int:
        return self.limit**2

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        a, b = divmod(number, self.limit)
        question, answer = f"{a}+{b}=".encode(), f"{a + b}".encode()
        ids = torch.full((WIDTH + 1,), ByteTokenizer.eod)
        ids[: len(question + answer)] = torch.tensor(list(question + answer))
        mask = torch.zeros(WIDTH)
        mask[len(question) - 1 : len(question + answer)] = 1  # the answer and its end
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}


def main(folder: Path) -> None:
    config = TrainConfig.from_text(
        f"""
        model = {{num_layers = 2, hidden_size = 64, num_attention_heads = 4, ffn_hidden_size = 176, vocab_size = 257}}
        data = {{blend = ["small", "large"], weights = [4, 1], valid = ["valid"], seq_length = {WIDTH}, max_epochs = 0}}
        train = {{steps = 60, global_batch_size = 32, micro_batch_size = 16, precision = "fp32"}}
        optimizer = {{lr = 5e-3}}
        eval = {{every = 60, batches = 2}}
        run = {{dir = "{folder}", device = "cpu"}}
        """
    )
    result = train(config, datasets={"small": Sums(5), "large": Sums(100), "valid": Sums(5)})
    print(f"step {result.step}, loss {result.loss:.3f} nats per token of an answer")
    ids = list(b"2+2=")
    ids.append(int(load_model(folder)(torch.tensor([ids]))[0, -1].argmax()))
    print(ByteTokenizer().decode(ids))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
