"""Every operation in plain torch: what the kernels must compute, and what runs on a CPU.

No host synchronisation and no shape that depends on values, so that a recorded step may hold them.
"""
