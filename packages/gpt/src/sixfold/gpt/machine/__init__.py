"""What devices can do, by a table or as `sixfold doctor` measures, and whether a machine is fit to train.

From outside: devices, doctor, local_checks.
"""
