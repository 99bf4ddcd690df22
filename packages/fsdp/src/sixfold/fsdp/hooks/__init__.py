"""Where torch calls us: hooks on modules, on gradients and on the process.

From outside: forward_backward, state_dict_hooks.
"""
