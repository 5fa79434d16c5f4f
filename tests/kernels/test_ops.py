import inspect
import subprocess
import sys

import pytest
import torch

from nanovllm.kernels import ops
from tests.kernels.paged_case import paged_case


def arguments_of(name):
    """One valid call of an operator."""
    case = paged_case([5, 20], [2, 7])
    rows, weight, numbers = torch.randn(3, 16), torch.randn(16), torch.rand(3)
    int32 = torch.tensor([0, 3, -1], dtype=torch.int32)
    cache = torch.randn(2, 4, 2, 16)
    logits, ids = torch.randn(3, 50), torch.tensor([1, 2, 3])
    return {
        "rms_norm": (rows, weight, 1e-5),
        "add_rms_norm": (rows, rows.clone(), weight, 1e-5),
        "silu_mul": (rows,),
        "norm_linear": (rows, weight, 1e-5, torch.randn(24, 16), torch.randn(24)),
        "norm_gate_up": (rows, weight, 1e-5, torch.randn(24, 16), None),
        "linear_add": (torch.randn(3, 24), torch.randn(16, 24), None, rows.clone()),
        "qkv_rope_store": (
            torch.randn(3, 8 * 16),
            ids,
            int32,
            torch.randn(9, 16),
            weight,
            weight.clone(),
            1e-5,
            cache[0].clone(),
            cache[1].clone(),
        ),
        "paged_decode": (case.query[:2], *case.cache[1:], 16, 0.25, 2),
        "paged_prefill": (*case.cache, case.cu_seqlens_q, 7, 16, 0.25),
        "decode_inputs": (
            torch.arange(8, dtype=torch.int32),
            int32,
            int32.clone(),
            torch.tensor([1, 5, 8], dtype=torch.int32),
            torch.ones(3, 2, dtype=torch.int32),
            torch.tensor(2, dtype=torch.int32),
            4,
        ),
        "keep_tokens": (ids, numbers, torch.tensor(1, dtype=torch.int32), torch.zeros(5).int()),
        "uniform": (int32, int32.clone(), int32.clone()),
        "greedy": (logits,),
        "sample_any": (logits, numbers + 9, numbers, numbers, numbers.double(), ids),
    }[name]


@pytest.mark.parametrize("name", ops.__all__)
def test_an_operator_keeps_what_its_schema_promises(name):
    """It changes what it names and nothing else, and predicts the shapes of its results."""
    torch.library.opcheck(getattr(ops, name).torch_operator, arguments_of(name))


@pytest.mark.parametrize("name", ops.__all__)
def test_shapes_are_known_without_memory(name):
    arguments = arguments_of(name)
    real = getattr(ops, name)(*arguments)
    shadow = getattr(ops, name)(
        *(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments)
    )
    for expected, actual in zip(tensors(real), tensors(shadow), strict=True):
        assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
        assert expected.stride() == actual.stride()


def tensors(result):
    return result if isinstance(result, tuple) else () if result is None else (result,)


@pytest.mark.parametrize("name", ops.__all__)
def test_a_kernel_is_called_as_its_operator_is(name):
    """Same names in the same order, so that the CUDA implementation may pass them on."""
    pytest.importorskip("triton", reason="Triton is not installed", exc_type=ImportError)
    from nanovllm.kernels.triton import (
        activation,
        decode,
        greedy,
        linear,
        norm,
        philox,
        prefill,
        rope_store,
        sample,
        steps,
    )

    modules = (activation, decode, greedy, linear, norm, prefill, rope_store, sample, steps, philox)
    (kernel,) = (getattr(module, name) for module in modules if hasattr(module, name))
    schema = getattr(torch.ops.nanovllm, name).default._schema

    assert [argument.name for argument in schema.arguments] == list(
        inspect.signature(kernel).parameters
    )


def test_operators_work_where_triton_can_not_be_imported():
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['triton'] = None\n"
            "import torch\n"
            "from nanovllm.kernels import ops\n"
            "print(ops.greedy(torch.tensor([[1.0, 3.0, 3.0]]))[0].item())",
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.stdout == "1\n", run.stderr
