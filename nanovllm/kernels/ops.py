"""The operators: `torch.ops.nanovllm.*`, each with a CPU, a CUDA and a shape-only implementation.

A step that is made of them can be recorded, captured or audited: every operator returns fresh
tensors or updates the arguments that its schema names, never synchronises and never looks at a
value on the host. On CUDA the tensors' device must be the current one.

K/V caches are those of one layer, `[num_slots, K, D]` with the last dimension contiguous; a slot is
`block_id * block_size + offset`. They may be views of a larger cache. `H` is a multiple of `K`. `D`
is a multiple of 16 up to 256. Every float tensor of a call has one dtype, bfloat16, float16 or
float32, unless another is named.
"""

from nanovllm.kernels.attention_ops import paged_decode, paged_prefill
from nanovllm.kernels.layer_ops import add_rms_norm, qkv_rope_store, rms_norm, silu_mul
from nanovllm.kernels.linear_ops import linear_add, norm_gate_up, norm_linear
from nanovllm.kernels.random_ops import uniform
from nanovllm.kernels.sampling_ops import greedy, sample_any
from nanovllm.kernels.step_ops import decode_inputs, keep_tokens

__all__ = [
    "add_rms_norm",
    "decode_inputs",
    "greedy",
    "keep_tokens",
    "linear_add",
    "norm_gate_up",
    "norm_linear",
    "paged_decode",
    "paged_prefill",
    "qkv_rope_store",
    "rms_norm",
    "sample_any",
    "silu_mul",
    "uniform",
]
