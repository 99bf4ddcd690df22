"""What code outside a unit's call may read and write of parameters."""
