"""Blend two datasets 70 to 30, look at where a sample comes from, and change the weights during the run."""

from sixfold.blending import BlendChange, BlendedDataset, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.source import ListSource


def main() -> None:
    texts = {"prose": ["It was a bright cold day. "] * 40, "code": ["for i in range(10): print(i)\n"] * 25}
    changes = [BlendChange(at=500, blend=(["prose", "code"], [0.2, 0.8]))]
    config = GPTDatasetConfig(random_seed=1, sequence_length=16, changes=changes)
    parts = [
        GPTDataset(ListSource([list(text.encode()) for text in held]), name, range(len(held)), 0, Split.train, config)
        for name, held in texts.items()
    ]
    blend = BlendedDataset(parts, weights=[0.7, 0.3], size=1000, config=config)
    print(
        "prose and code among the first 500 and the next 500:",
        blend.counts(500),
        blend.counts(1000) - blend.counts(500),
    )
    print(blend.why(7))
    print(bytes(blend[7]["tokens"].astype("uint8")))


if __name__ == "__main__":
    main()
