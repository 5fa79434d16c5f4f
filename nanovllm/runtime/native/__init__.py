"""The CPU's own step program: compiled from Python by Numba, one native call per step.

Read in this order: `program` (a batch in, logits out), `team` (the threads), `phases` (how they
share a step), `forward` (the step itself), `panels` (how weights lie in memory), `matmul`,
`attention`, `tiles` (the vector code), `kinds` (its instructions). Numba is an extra: nothing
outside this folder imports it, and without it the engine runs on torch.
"""
