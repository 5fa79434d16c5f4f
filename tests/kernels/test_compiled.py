"""The kernels as machine code for devices that are not there: what they take, what they specialise.

By default those that a decode step launches in each layer, for one device. Set
`NANOVLLM_TEST_ALL_TARGETS=1` for all kernels, head sizes, types and devices (some minutes).
"""

import itertools
import os
import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed", exc_type=ImportError)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from nanovllm.kernels.report import TARGETS, report_lines  # noqa: E402
from nanovllm.kernels.triton import KERNELS, decode, prefill, rope_store  # noqa: E402
from nanovllm.kernels.triton.aot import compile_for, resources  # noqa: E402
from nanovllm.kernels.triton.launch import Launch  # noqa: E402
from nanovllm.kernels.triton.shapes import SHAPES, Shape, step_launches  # noqa: E402
from tests.kernels.faults import with_fault  # noqa: E402

ALL = bool(os.environ.get("NANOVLLM_TEST_ALL_TARGETS"))
KIB = 1024
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
all_targets = pytest.mark.skipif(not ALL, reason="set NANOVLLM_TEST_ALL_TARGETS=1 to run it")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Compile afresh, and leave nothing behind."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def launches_of(shape, **kwargs):
    return {launch.kernel.name: launch for launch in step_launches(shape, **kwargs)}


def problems(launch, target, stack_bytes=0):
    taken = resources(compile_for(launch, target))
    fits = taken.shared_bytes <= SHARED_BYTES[target] and taken.stack_bytes <= stack_bytes
    return [] if fits else [f"{launch.kernel.name} on sm_{target}: {taken}"]


BY_HEAD_SIZE = ("_qkv_rope_store", "_paged_decode", "_join_splits", "_paged_prefill")
HOT = ("_rms_norm", "_row_linear", "_few_linear", *BY_HEAD_SIZE)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_hot_kernels_spill_nothing_and_fit(shape):
    launches = launches_of(shape, num_splits=[8])

    assert not [problem for name in HOT for problem in problems(launches[name], 90)]


@all_targets
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_all_kernels_spill_nothing_and_fit_everywhere(shape, target):
    for max_seqlen_q in (1, 512):
        for launch in step_launches(shape, max_seqlen_q=max_seqlen_q):
            assert problems(launch, target) == []


@all_targets
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_all_head_sizes_and_types_fit_everywhere(head_dim, dtype, target):
    shape = Shape("any", 8, 2, head_dim, 1024, 3072, 50_000, qk_norm=True)
    launches = launches_of(shape, num_splits=[64], dtype=dtype)
    for name in BY_HEAD_SIZE:
        # Two registers: decodes of 80 and 96 channels spill them on sm_120.
        assert problems(launches[name], target, stack_bytes=8) == []


def test_a_kernel_that_spills_is_seen():
    launch = launches_of(SHAPES[1])["_paged_decode"]
    starved = Launch(launch.kernel, launch.grid, {**launch.arguments, "maxnreg": 40})

    assert problems(starved, 90)


def test_the_report_has_a_line_for_every_kernel():
    lines = list(itertools.islice(report_lines([90]), 4))

    assert [line.split()[1] for line in lines[1:]] == ["_rms_norm", "_rms_norm", "_qkv_rope_store"]
    assert re.search(r"sm_90 +\d+ +0 B +\d+ B$", lines[1])


# Pitfall 21: page arithmetic in int32.


def narrow_uses(launch):
    """Uses of block ids and slots, which are int32 in memory, before they are made int64."""
    text = compile_for(launch, 90).asm["ttir"]
    # A block id is loaded from tables and a slot from the mapping; both are called so there.
    loads = re.findall(r"(%(?:block|slot)\w*) = tt\.load .*i32", text)
    assert loads
    uses = [
        line
        for name in loads
        for line in re.findall(rf"^.*= .*{name}\b.*$", text, re.M)
        if not re.match(rf"\s*{name} = ", line)
    ]
    assert uses
    return [line for line in uses if "arith.extsi" not in line]


@pytest.mark.parametrize("name", ["_paged_decode", "_paged_prefill", "_qkv_rope_store"])
def test_page_arithmetic_is_in_int64(name):
    assert narrow_uses(launches_of(SHAPES[0], num_splits=[8])[name]) == []


@pytest.mark.parametrize("module", [decode, prefill], ids=["decode", "prefill"])
def test_page_arithmetic_in_int32_is_seen(module, tmp_path):
    fault = "mask=is_context, other=0).to(tl.int64)", "mask=is_context, other=0)"
    faulty = with_fault(module, tmp_path, fault)
    name = {decode: "PAGED_DECODE", prefill: "PAGED_PREFILL"}[module]
    sound = launches_of(SHAPES[0], num_splits=[8])[getattr(module, name).name]

    assert narrow_uses(Launch(getattr(faulty, name), sound.grid, sound.arguments))


# Pitfall 15: variants that are compiled when a captured step meets a new size.


# What is a view of a packed vector in a captured step, and begins anywhere in it.
VIEWS = ("positions", "slot_mapping", "block_tables", "context_lens", "cu_seqlens_q")
VIEWS += ("temperature", "min_p", "uniform", "source", "token", "num_rows", "offset")


def variant(launch):
    """What Triton tells variants of a kernel apart by, without compiling one."""
    function = launch.kernel.function
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    _, specialization, options = bind(**launch.kernel.options(launch.arguments, 90))
    return f"{specialization} {options}"


def variants(name, kernel=None):
    """All that buckets of up to 16 rows and of more need; in between, a vocabulary is cut anew."""
    found = []
    for sizes in ([1, 2, 3, 8, 15, 16], [17, 32, 33, 256]):
        found.append(set())
        for num_rows, max_blocks, shift in itertools.product(sizes, (1, 7, 64), (0, 1)):
            given = launches_of(SHAPES[0], num_rows=num_rows, max_blocks=max_blocks, num_splits=[4])
            launch = given[name]
            arguments = dict(launch.arguments)
            is_result = {"positions"} if name == "_decode_inputs" else set()
            for view in (arguments.keys() & VIEWS) - is_result:
                whole = arguments[view].new_empty(arguments[view].numel() + 1)
                arguments[view] = whole[shift:][: len(whole) - 1].view(arguments[view].shape)
            found[-1].add(variant(Launch(kernel or launch.kernel, launch.grid, arguments)))
    return found


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_buckets_share_their_variants(kernel):
    assert [len(found) for found in variants(kernel.name)] == [1, 1]


FAULTS = {
    decode: ("_paged_decode", '["block_tables", "context_lens", "table_stride"]'),
    rope_store: ("_qkv_rope_store", '["positions", "slot_mapping"]'),
}


@pytest.mark.parametrize("module", FAULTS, ids=["decode", "rope_store"])
def test_variants_by_what_differs_between_buckets_are_seen(module, tmp_path):
    name, spared = FAULTS[module]
    faulty = with_fault(module, tmp_path, (f"do_not_specialize={spared}", "do_not_specialize=[]"))

    assert all(len(found) > 1 for found in variants(name, getattr(faulty, name[1:].upper())))


def test_nothing_is_tuned_at_run_time():
    """A tuner would launch, and synchronise, inside a capture."""
    assert {type(kernel.function) for kernel in KERNELS} == {triton.JITFunction}


def test_all_kernels_of_a_step_are_listed():
    launched = {launch.kernel for launch in step_launches(SHAPES[0])}

    assert set(KERNELS) == launched
