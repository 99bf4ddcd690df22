"""What is held and what was moved, as values and as pictures.

From outside: memory_timeline, model_report.
"""
