"""What is sent between ranks, on which communicator and which stream.

From outside: comm, communicators, default_group, gradient_sums, host_messages, own_meshes, streams.
"""
