"""The operations as Triton kernels. Imported late as a whole: nothing else imports Triton.

Each file holds one idea: its kernels, a function with the operator's name and arguments that
allocates the result and launches them, and a `plan_...` with the launches as values. Page
arithmetic is in int64 throughout: a cache may hold more than 2**31 values. Nothing is tuned at run
time: sizes come from `geometry`. What differs between the buckets of a captured step (rows, table
widths, where an index vector begins) is never specialised on, so that a step that was warmed up
compiles nothing more.
"""

from nanovllm.kernels.triton.activation import SILU_MUL
from nanovllm.kernels.triton.decode import JOIN_SPLITS, PAGED_DECODE
from nanovllm.kernels.triton.few_linear import FEW_LINEAR
from nanovllm.kernels.triton.greedy import LARGEST_OF_PIECES, LARGEST_OF_ROWS
from nanovllm.kernels.triton.norm import RMS_NORM
from nanovllm.kernels.triton.philox import UNIFORM
from nanovllm.kernels.triton.prefill import PAGED_PREFILL
from nanovllm.kernels.triton.rope_store import QKV_ROPE_STORE
from nanovllm.kernels.triton.row_linear import ROW_LINEAR
from nanovllm.kernels.triton.sample import PICK_TOKEN, SUM_PIECES
from nanovllm.kernels.triton.steps import DECODE_INPUTS, KEEP_TOKENS

KERNELS = (
    RMS_NORM,
    SILU_MUL,
    ROW_LINEAR,
    FEW_LINEAR,
    QKV_ROPE_STORE,
    PAGED_DECODE,
    JOIN_SPLITS,
    PAGED_PREFILL,
    LARGEST_OF_PIECES,
    LARGEST_OF_ROWS,
    SUM_PIECES,
    PICK_TOKEN,
    DECODE_INPUTS,
    KEEP_TOKENS,
    UNIFORM,
)
"""All of them. Their `num_variants` must not rise while a step is captured."""
