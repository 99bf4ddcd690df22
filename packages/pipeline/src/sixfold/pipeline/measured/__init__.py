"""What a step took: begin and end of each action, all ranks' on one clock.

From outside: action_times, one_clock.
"""
