"""Where torch calls us: hooks on modules, on gradients and on the process.

From outside: forward_backward, global_hooks, state_dict_hooks.
"""
