"""The CPU's own step program: compiled from Python by Numba, one native call per step.

Read in this order: `program` (a model's buffers), `team` (the threads), `phases` (how they share a
step), `forward` (the step itself), `attention`, `matmul`, `tiles` (the vector code). Numba is an
extra: nothing outside this folder imports it, and without it the engine runs on torch.
"""
