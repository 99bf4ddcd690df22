"""What a configuration takes, without a machine: memory, traffic, bubble and time of a step. Integers: no torch.

From outside: failure_report, goodput, layout, published_runs, report.
"""
