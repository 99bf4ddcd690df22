"""What code outside a unit's call may read and write of parameters.

From outside: guard, main_parameters, saved_weights, uncompiled.
"""
