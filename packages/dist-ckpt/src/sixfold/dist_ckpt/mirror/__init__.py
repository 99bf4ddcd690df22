"""The mirror of a store: a local folder that the ranks of a host share while they load."""
