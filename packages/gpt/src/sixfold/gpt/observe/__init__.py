"""What a run writes and shows of itself: metrics.jsonl, plots, timelines, slow ranks, TensorBoard.

From outside: loss_plot, metrics, software_versions, straggler, tensorboard, timeline.
"""
