"""Steps over main parameters: torch's optimizers, Muon, state in host memory, norms.

From outside: gradient_norms, initial_state, sharded_optimizer.
"""
