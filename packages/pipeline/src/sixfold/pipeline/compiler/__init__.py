"""From a program to the calls of this process: stages joined to each other, to edges and to the loss, per rank's list.

From outside: compile, cuda_graphs, compile_endless, token_scaling, wiring.
"""
