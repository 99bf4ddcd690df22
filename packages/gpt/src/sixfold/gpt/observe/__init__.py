"""What a run writes and shows of itself: metrics.jsonl, digests, plots, timelines, slow ranks, curves elsewhere.

From outside: curves, digest_file, live_view, loss_plot, memory_snapshot, metrics, profiler, run_comparison, run_costs,
run_record, software_versions, straggler, tensor_digest, time_spent, timeline.
"""
