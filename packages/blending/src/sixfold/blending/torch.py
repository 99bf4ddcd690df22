"""Public path of what a ``torch.utils.data.DataLoader`` needs: a dataset and a sampler (this file)."""

from sixfold.blending.dataset.position_sampler import LoaderDataset, PositionSampler, Steps

__all__ = ["LoaderDataset", "PositionSampler", "Steps"]
