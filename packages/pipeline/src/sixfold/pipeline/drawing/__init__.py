"""Pictures of programs and timelines: text, SVG, PNG, and traces for Perfetto.

From outside: draw, trace.
"""
