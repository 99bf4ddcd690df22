"""Where torch calls us: hooks on modules, on gradients and on the process."""
