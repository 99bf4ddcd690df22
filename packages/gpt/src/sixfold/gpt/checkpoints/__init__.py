"""The training state to a checkpoint and back, the trained model out of one, and where a run starts from.

From outside: starting_point, trained_model, training_state.
"""
