"""A tiny training run in this process: prepare text, train, load the checkpoint, let it write."""

import tempfile
from pathlib import Path

from sixfold.gpt import TrainConfig, load_model, train
from sixfold.gpt.prepare import prepare
from sixfold.gpt.sample import sample
from sixfold.gpt.tokenizer import ByteTokenizer

with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "fox.jsonl")
    text.write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n' * 300)
    data = prepare([text], Path(folder, "fox"))
    changes = [f'data.blend=["{data.prefix}"]', "data.weights=[]", "data.valid=[]", f'run.dir="{folder}/run"']
    smaller = ["model.num_layers=2", "data.seq_length=64", "train.steps=30", "eval.every=0", 'run.device="cpu"']
    config = TrainConfig.from_toml(Path(__file__).with_name("tiny.toml"), overrides=[*changes, *smaller])
    result = train(config)
    print(f"{config.model.num_parameters:,} parameters, step {result.step}, loss {result.loss:.3f} nats per token")
    print("the quick" + sample(load_model(result.run_dir), ByteTokenizer(), "the quick", tokens=40))
