"""What a ``torch.utils.data.DataLoader`` is given, by the path that pages name (this file): a dataset, a sampler."""

from sixfold.blending.dataset.position_sampler import LoaderDataset, PositionSampler, Steps

__all__ = ["LoaderDataset", "PositionSampler", "Steps"]
