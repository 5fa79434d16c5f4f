"""The operations of a step that are worth a kernel of their own: tensors in, tensors out.

`ops` defines them as torch custom operators: plain torch on a CPU (`reference`, which is also what
the tests hold the kernels to), Triton on CUDA (`triton`, imported at the first call). They know
nothing of sequences, blocks or schedules: tables, lengths and slots are tensors.
"""
