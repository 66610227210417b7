"""Pure functions on tensors, a folder an operation."""
