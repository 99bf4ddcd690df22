"""Plans: schedules found by search under measured costs, layers cut into stages, PipeDream-2BW's width and depth.

From outside: partition, replan, search, two_bw.
"""
