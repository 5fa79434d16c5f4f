"""Benchmarks: what every speed claim rests on. Each file says how to run it."""
