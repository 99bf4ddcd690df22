"""What a run writes and shows of itself: metrics.jsonl, plots, timelines, slow ranks, TensorBoard.

From outside: loss_plot, metrics, profiler, software_versions, straggler, tensorboard, timeline.
"""
