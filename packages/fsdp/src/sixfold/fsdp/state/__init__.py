"""State out and in: live records, full tensors."""
