"""Where gathered weights lie, and which stay within a byte budget."""
