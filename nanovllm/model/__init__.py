"""The decoder family: layers, attention backends and weight loading. Knows tensors only."""
