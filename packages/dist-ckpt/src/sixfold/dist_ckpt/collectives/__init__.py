"""What ranks tell and send each other, each wait with a deadline; and whether they hold the same.

From outside: consistency, exchange, mesh_slices, relay.
"""
