"""What a decode step asks of a device, counted on made-up ones: budgets that it must keep.

A layer is four matrix products and six kernels of ours; of few rows, where the products are ours
too, seven kernels. Beside the layers stand the embedding, one norm, the output projection, the
choice of a token, and the small operations that turn the packed inputs into tokens, positions and
slots. Their number is held too: at one row, a kernel more costs
as much as reading a megabyte of weights.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from bench.gpu_world import QWEN3_0_6B
from graphs import EagerBackend, plan_buckets
from graphs.audit import audit, has_fake_accelerator
from graphs.backend import ignore_event
from nanovllm import SamplingParams
from nanovllm.core import Batch
from nanovllm.doctor import SMOLLM2_SHAPE
from nanovllm.model.config import read_model_config
from nanovllm.runtime.captured_steps import VARIANTS, CapturedSteps
from nanovllm.runtime.decode_program import DecodeStatics, decode_layout, decode_program
from nanovllm.runtime.device_queue import ImmediateQueue
from nanovllm.runtime.fused_decoder import FusedDecoder
from nanovllm.runtime.graph_executor import GraphExecutor
from nanovllm.runtime.kv_cache import allocate_kv_cache
from nanovllm.runtime.paged_attention import AttentionShape, TritonAttention
from nanovllm.runtime.sampler import SamplingRow
from nanovllm.runtime.step_inputs import max_mixed_words
from nanovllm.runtime.verify_graphs import attention_for
from nanovllm.runtime.verify_model import random_decoder
from nanovllm.runtime.verify_worlds import CapturedWorld, Geometry
from tests.runtime.decoders import plain_decoder
from tests.runtime.sampling_rows import leave_the_cores_to_others

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)

ROOT = Path(__file__).parents[2]

MODELS = {"qwen3-0.6b": QWEN3_0_6B, "smollm2-135m": SMOLLM2_SHAPE}

NUM_KERNELS = {"paged_decode": 2}
"""Kernels that one of our operators launches, where it is not one: splits, then their sum."""

MAX_KERNELS_PER_LAYER = 6
MATRIX_PRODUCTS_PER_LAYER = 4

MAX_SMALL_OPS = {"greedy": 2, "sample": 2}  # the embedding, and the logits into their buffer
"""Of torch's own operations in a step, those that are no matrix product."""

OWN_OPS_OUTSIDE_LAYERS = {
    "greedy": {"decode_inputs": 1, "rms_norm": 1, "greedy": 1, "keep_tokens": 1},
    "sample": {
        "decode_inputs": 1,
        "rms_norm": 1,
        "greedy": 1,
        "uniform": 1,
        "sample_any": 1,
        "keep_tokens": 1,
    },
}


FEW, MANY = 8, 16
"""Rows whose products go through kernels of ours, and through a library's."""


def program_maker(model, variant="greedy", bucket=MANY, **changes):
    """From a device to the decode step of this model: no more K/V than one block, so that bytes
    are those of weights."""
    config = read_model_config({**model, **changes}, source="test")

    def make(device):
        decoder = random_decoder(config, device=device, dtype=torch.bfloat16)
        kv_cache = allocate_kv_cache(
            config, num_blocks=1, block_size=16, dtype=torch.bfloat16, device=device
        )
        fused = FusedDecoder.create(decoder, kv_cache, max_model_len=64)
        statics = DecodeStatics.create(fused, decode_layout(MANY, 4, pad_block=0))
        shape = AttentionShape(
            config.num_kv_heads, config.head_dim, block_size=16, max_model_len=64, num_sms=132
        )
        return decode_program(bucket, variant, statics, TritonAttention(shape))

    return make


def per_layer(model, **options):
    """Operations of one layer: what a model of one layer more has more."""
    shallow, deep = (
        Counter(audit(program_maker(model, num_hidden_layers=count, **options)).ops)
        for count in (1, 2)
    )
    return deep - shallow


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_layer_is_four_matrix_products_and_six_kernels(model):
    layer = per_layer(model)

    own = {name.removeprefix("nanovllm::"): n for name, n in layer.items() if "nanovllm" in name}
    num_kernels = sum(NUM_KERNELS.get(name, 1) * count for name, count in own.items())
    num_products = layer["aten::mm"] + layer["aten::addmm"]
    assert num_kernels <= MAX_KERNELS_PER_LAYER, own
    assert num_products == MATRIX_PRODUCTS_PER_LAYER
    assert layer.total() == sum(own.values()) + num_products, f"others: {layer}"


@pytest.mark.parametrize("bucket", [1, FEW])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_layer_of_few_rows_is_seven_kernels(model, bucket):
    layer = per_layer(model, bucket=bucket)

    assert layer == {
        "nanovllm::norm_linear": 1,
        "nanovllm::qkv_rope_store": 1,
        "nanovllm::paged_decode": 1,  # two kernels
        "nanovllm::linear_add": 2,
        "nanovllm::norm_gate_up": 1,
    }


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MistralForCausalLM"])
def test_so_it_is_in_families_with_biases_and_without(architecture):
    model = {**SMOLLM2_SHAPE, "architectures": [architecture]}
    layer = per_layer(model)

    assert layer["aten::mm"] + layer["aten::addmm"] == MATRIX_PRODUCTS_PER_LAYER
    assert layer.total() == MATRIX_PRODUCTS_PER_LAYER + 5, f"others: {layer}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_step_waits_for_nothing_and_copies_nothing(model, variant):
    step = audit(program_maker(model, variant))

    assert (step.num_syncs, step.copies, step.findings) == (0, (), ())
    assert step.is_complete


@pytest.mark.parametrize("variant", VARIANTS)
def test_around_the_layers_there_is_little(variant):
    outside = Counter(audit(program_maker(QWEN3_0_6B, variant, num_hidden_layers=1)).ops)
    outside -= per_layer(QWEN3_0_6B, variant=variant)

    own = {name[len("nanovllm::") :]: n for name, n in outside.items() if "nanovllm" in name}
    assert own == OWN_OPS_OUTSIDE_LAYERS[variant]
    assert outside["aten::mm"] == 1  # the output projection
    num_small = outside.total() - sum(own.values()) - 1
    assert num_small <= MAX_SMALL_OPS[variant], outside


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_each_weight_once(name):
    model = MODELS[name]
    config = read_model_config(model, source="test")
    decoder = random_decoder(config, device=torch.device("meta"), dtype=torch.bfloat16)
    weights = {id(tensor): tensor for tensor in decoder.tensors()}.values()
    weight_bytes = sum(tensor.nbytes for tensor in weights)

    step = audit(program_maker(model, bucket=1))

    # A tied embedding is read twice by this count, though of the first time only one row.
    counted = step.read_bytes - decoder.embedding.nbytes
    assert weight_bytes <= counted <= 1.05 * weight_bytes


@pytest.mark.parametrize("buckets", [(1, 3, FEW), (FEW + 4, MANY)])
def test_the_batch_size_changes_no_operation(buckets):
    first, *others = (
        dict(audit(program_maker(SMOLLM2_SHAPE, "sample", bucket)).ops) for bucket in buckets
    )

    assert all(other == first for other in others)


BESIDE_A_HOST = """
from graphs.audit import audit, fake_accelerator
from tests.runtime.test_decode_audit import QWEN3_0_6B, program_maker

for variant in ("greedy", "sample"):
    make = program_maker(QWEN3_0_6B, variant, num_hidden_layers=2)
    with fake_accelerator() as device:
        step = audit(make, device)
    assert (step.copies, step.findings, step.is_complete) == ((), (), True), step
    assert dict(step.ops) == dict(audit(make).ops)
"""


@pytest.mark.skipif(not has_fake_accelerator(), reason="this torch can't make up a device")
def test_beside_a_host_nothing_is_copied_either():
    """On "meta" a copy from the host passes unseen; on a made-up accelerator it does not.

    In a process of its own: torch keeps the made-up device for good.
    """
    run = subprocess.run(
        [sys.executable, "-c", BESIDE_A_HOST],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr


# The executor around it


class RecordingQueue(ImmediateQueue):
    """Writes down what is asked of it."""

    def __init__(self):
        self.calls = []

    def upload(self, host, device):
        self.calls.append(f"upload {len(host)}")
        super().upload(host, device)

    def run(self, work):
        self.calls.append("run")
        super().run(work)

    def download(self, device, host):
        self.calls.append(f"download {len(host)}")
        super().download(device, host)
        return RecordedTicket(self.calls)


@attrs.frozen
class RecordedTicket:
    calls: list

    def wait(self):
        self.calls.append("wait")


def executor(queue, sizes=(1, 2, 4), *, with_graphs=True):
    geometry = Geometry(sizes=sizes, block_size=4, max_model_len=16)
    decoder = plain_decoder("llama")
    attention = attention_for(decoder.config, geometry)
    statics = CapturedWorld(decoder, attention, geometry).statics
    num_words = max_mixed_words(16, geometry.max_num_rows, geometry.num_table_columns)
    statics = attrs.evolve(statics, mixed=torch.zeros(num_words, dtype=torch.int32))
    plan = plan_buckets(geometry.max_num_rows, sizes=sizes)
    captured = None
    if with_graphs:
        captured = CapturedSteps(statics, attention, plan, EagerBackend(), ignore_event)
    made = GraphExecutor(statics, attention, captured, queue)
    queue.calls.clear()
    return made, statics.layout


def decode_batch(num_rows, context_len=3, sources=None):
    rows = np.arange(num_rows, dtype=np.int32)
    return Batch(
        num_decodes=num_rows,
        input_ids=rows + 5,
        positions=np.full(num_rows, context_len - 1, np.int32),
        slot_mapping=rows * 4 + context_len - 1,
        context_lens=np.full(num_rows, context_len, np.int32),
        block_tables=rows[:, None],
        cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
        sampled_rows=rows,
        logits_indices=rows,
        max_seqlen_q=1,
        sources=sources,
    )


def sampling_rows(num_rows, **params):
    params = SamplingParams(**{"temperature": 0, **params})
    return [SamplingRow(params, seed=row, position=3) for row in range(num_rows)]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_is_one_upload_one_replay_one_download_and_no_wait(num_rows, params):
    queue = RecordingQueue()
    made, layout = executor(queue)
    with torch.inference_mode():
        flight = made.submit(decode_batch(num_rows), sampling_rows(num_rows, **params))
        bucket = {1: 1, 3: 4}[num_rows]
        submitted = [f"upload {layout.num_words(bucket)}", "run", f"download {num_rows}"]
        assert queue.calls == submitted

        sampled, trace = flight.result()

    assert queue.calls == [*submitted, "wait"]
    assert len(sampled.token_ids) == num_rows
    assert trace.bucket == bucket


def test_a_step_ahead_of_the_host_waits_for_nothing_either():
    queue = RecordingQueue()
    made, _ = executor(queue)
    rows = sampling_rows(2)
    with torch.inference_mode():
        first = made.submit(decode_batch(2, context_len=3), rows)
        ahead = made.submit(
            decode_batch(2, context_len=4, sources=np.array([1, 0], np.int32)), rows
        )
        assert "wait" not in queue.calls
        assert queue.calls.count("run") == 2

        first.result()
        assert queue.calls.count("wait") == 1
        ahead.result()

    assert queue.calls.count("wait") == 2


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}])
def test_steps_ahead_of_the_host_give_the_same_tokens_without_graphs(params):
    """They read the tokens of the step before, which the host does not have yet."""
    rows = sampling_rows(3, **params)
    sources = np.array([2, 0, 1], np.int32)
    drawn = []
    for with_graphs in (True, False):
        made, _ = executor(RecordingQueue(), with_graphs=with_graphs)
        with torch.inference_mode():
            first = made.submit(decode_batch(3, context_len=1), rows)
            ahead = made.submit(decode_batch(3, context_len=2, sources=sources), rows)
            more = made.submit(decode_batch(3, context_len=3, sources=sources), rows)
            drawn.append([flight.result()[0].token_ids for flight in (first, ahead, more)])

    assert drawn[0] == drawn[1]


def test_a_step_with_prefills_is_one_upload_too():
    queue = RecordingQueue()
    made, _ = executor(queue)
    prompt = np.arange(3, dtype=np.int32)
    batch = attrs.evolve(
        decode_batch(1),
        num_decodes=0,
        input_ids=prompt,
        positions=prompt,
        slot_mapping=prompt,
        cu_seqlens_q=np.array([0, 3], np.int32),
        logits_indices=np.array([2], np.int32),
        max_seqlen_q=3,
    )
    with torch.inference_mode():
        made.submit(batch, sampling_rows(1)).result()

    assert [call.split()[0] for call in queue.calls] == ["upload", "run", "download", "wait"]


# Steps that can't be submitted


class LateQueue(RecordingQueue):
    """Does nothing until somebody waits; fails in a call that a test names.

    Attributes:
        failing: The next call of this name raises, once.
    """

    def __init__(self):
        super().__init__()
        self.failing = None
        self._todo = []

    def upload(self, host, device):
        self._fail_in("upload")
        self._todo.append(lambda: device.copy_(host))

    def run(self, work):
        self._fail_in("run")
        self._todo.append(work)

    def download(self, device, host):
        self._fail_in("download")
        self._todo.append(lambda: host.copy_(device))
        return LateTicket(self, len(self.calls))

    def _fail_in(self, call):
        self.calls.append(call)
        if self.failing == call:
            self.failing = None
            raise RuntimeError(f"no {call} today")

    def work(self):
        while self._todo:
            self._todo.pop(0)()


@attrs.frozen
class LateTicket:
    queue: LateQueue
    number: int

    def wait(self):
        self.queue.work()


@pytest.mark.parametrize("call", ["upload", "run", "download"])
def test_a_step_that_can_not_be_submitted_leaves_the_next_ones_right(call):
    """Not even what it has put on the queue already sees the inputs of another step."""
    rows = sampling_rows(2)
    with torch.inference_mode():
        made, _ = executor(LateQueue())
        want = made.submit(decode_batch(2, context_len=1), rows).result()[0].token_ids

        queue = LateQueue()
        made, _ = executor(queue)
        seen = []
        upload = queue.upload

        def watched_upload(host, device):
            given = host.clone()
            upload(host, device)
            queue._todo.append(lambda: seen.append(torch.equal(given, device)))

        queue.upload = watched_upload
        for _ in range(4):
            queue.failing = call
            with pytest.raises(RuntimeError, match=f"no {call} today"):
                made.submit(decode_batch(2, context_len=4), rows)
            sampled, _ = made.submit(decode_batch(2, context_len=1), rows).result()
            assert sampled.token_ids == want

    assert len(seen) >= 4
    assert all(seen)


def test_a_device_that_takes_nothing_any_more_does_not_hide_its_error():
    queue = LateQueue()
    made, _ = executor(queue)
    queue.failing = "run"

    def broken(device, host):
        raise RuntimeError("nor a download")

    queue.download = broken
    with pytest.raises(RuntimeError, match="no run today"):
        made.submit(decode_batch(2), sampling_rows(2))
    # Nor does the ring stand in the way of the next one.
    with pytest.raises(RuntimeError, match="nor a download"):
        made.submit(decode_batch(2), sampling_rows(2))
