"""Another decoder than GPTModel under the same loop: GPT-2's, with learned positions, LayerNorm, biases and GELU.

`train` asks `provider` for each stage that this rank holds, so the same call trains in one process, as a pipeline and
sharded, with checkpoints that every other layout resumes. What a decoder has to keep to:

- names by global layer numbers, so that a checkpoint of any layout fits any other;
- initial values by name and not by order, so that every layout starts alike (`initial_values`);
- the forward's arguments; the last stage gives losses of each token, 0 where `loss_mask` is.
"""

import tempfile
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from sixfold.gpt import TrainConfig, train
from sixfold.gpt.init import initial_values
from sixfold.gpt.prepare import prepare

VOCABULARY, LONGEST, WIDTH, HEADS = 257, 64, 64, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """One stage: some layers, the first with the embeddings, the last with the head."""

    fsdp_unit_modules = (Layer,)  # what is gathered and freed at a time

    def __init__(self, first: bool, last: bool, layers: range) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.positions = nn.Embedding(LONGEST, WIDTH) if first else None
        self.layers = nn.ModuleDict({str(i): Layer() for i in layers})
        self.norm = nn.LayerNorm(WIDTH) if last else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:  # LayerNorm's weights are 1 already
                parameter.data.copy_(initial_values(1234, name, parameter.shape, std=0.02))

    def forward(
        self, x: Tensor, *, labels: Tensor, loss_mask: Tensor, position_ids: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(position_ids)
        documents = (position_ids == 0).cumsum(1)
        allowed = (documents[:, :, None] == documents[:, None, :]).tril().unsqueeze(1)
        for layer in self.layers.values():
            x = layer(x, allowed)
        if self.norm is None or self.head is None:
            return x
        return cross_entropy(self.head(self.norm(x)).float().transpose(1, 2), labels, reduction="none") * loss_mask


def provider(pre_process: bool, post_process: bool, vp_stage: int, *, layers: range) -> nn.Module:
    """One stage of the model; ``layers`` are the global numbers that ``model.num_layers`` gives it."""
    return Decoder(pre_process, post_process, layers)


def main(folder: Path) -> None:
    (folder / "fox.jsonl").write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n' * 300)
    prepare([folder / "fox.jsonl"], folder / "fox")
    changes = [f'data.blend=["{folder}/fox"]', "data.weights=[]", "data.valid=[]", f'run.dir="{folder}/run"']
    smaller = ["model.num_layers=2", f"data.seq_length={LONGEST}", "train.steps=30", "eval.every=0", 'run.device="cpu"']
    config = TrainConfig.from_toml(Path(__file__).with_name("tiny.toml"), overrides=[*changes, *smaller])
    result = train(config, model_provider=provider)
    print(f"step {result.step}, loss {result.loss:.3f} nats per token")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
