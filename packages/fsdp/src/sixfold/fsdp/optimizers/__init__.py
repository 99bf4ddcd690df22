"""Steps over main parameters: torch's optimizers, Muon, state in host memory, norms."""
