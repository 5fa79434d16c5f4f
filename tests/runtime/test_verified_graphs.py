"""The decode step of every family survives what a replay does to it (`test_graph_faults` fails)."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from graphs import GraphKey, plan_buckets
from graphs.verdict import MismatchKind
from nanovllm import doctor
from nanovllm.kernels.reference.steps import FAILED_TOKEN
from nanovllm.model.config import read_model_config
from nanovllm.runtime import verify_graphs
from nanovllm.runtime.captured_steps import VARIANTS
from nanovllm.runtime.decode_program import NO_SOURCE
from nanovllm.runtime.verify_graphs import (
    NUM_STEPS,
    attention_for,
    decode_schedule,
    verify_decode,
    verify_world,
)
from nanovllm.runtime.verify_model import random_decoder, small_config
from nanovllm.runtime.verify_worlds import CapturedWorld, Geometry, PlainWorld
from tests.checkpoints import FAMILIES, checkpoint_folder
from tests.command_line import assert_fails_in_one_line, run
from tests.runtime.decoders import plain_decoder
from tests.runtime.sampling_rows import leave_the_cores_to_others

GEOMETRY = Geometry()

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)


def steps(num_steps=NUM_STEPS, seed=0, vocab_size=320):
    return list(decode_schedule(GEOMETRY, vocab_size, num_steps=num_steps, seed=seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_every_batch_size_is_safe_to_replay(name):
    report = verify_decode(plain_decoder(name))

    assert report.ok, report
    assert report.num_steps == NUM_STEPS
    assert set(report.num_ops) == {
        GraphKey(size, variant) for size in GEOMETRY.sizes for variant in VARIANTS
    }


def test_so_it_is_over_another_schedule():
    report = verify_decode(plain_decoder("qwen3"), num_steps=80, seed=1)

    assert report.ok, report


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(sizes=(3,), block_size=1, max_model_len=5),
        Geometry(sizes=(1, 5), block_size=8, max_model_len=16),
        Geometry(sizes=(2, 4), block_size=16, max_model_len=7),
    ],
    ids=str,
)
def test_so_it_is_with_other_blocks(geometry):
    report = verify_decode(plain_decoder("llama"), geometry=geometry, num_steps=25)

    assert report.ok, report


class TestTheSchedule:
    """What a verification without findings is worth depends on what it has tried."""

    def test_replays_every_graph_with_and_without_padding(self):
        plan = plan_buckets(GEOMETRY.max_num_rows, sizes=GEOMETRY.sizes)
        tried = {(step.key, step.num_rows) for step in steps()}

        # Every number of rows, in both variants, each in the smallest batch size that holds it.
        assert {(key.variant, rows) for key, rows in tried} == {
            (variant, rows) for variant in VARIANTS for rows in range(1, GEOMETRY.max_num_rows + 1)
        }
        assert all(key.bucket == plan.bucket_for(rows) for key, rows in tried)

    def test_gives_freed_blocks_to_others_at_once(self):
        owners, num_taken_over = {}, 0
        for step in steps()[1:]:
            tables = step.inputs.batch.block_tables
            for row, table in zip(step.inputs.rows, tables, strict=True):
                for block in table[table >= 0]:
                    num_taken_over += block in step.freed_pages
                    owners[int(block)] = row.seed

        assert num_taken_over >= 10
        assert len(owners) <= GEOMETRY.num_blocks

    def test_mixes_tokens_of_the_device_and_of_the_host(self):
        kinds = Counter()
        for step in steps():
            has_source = step.inputs.sources != NO_SOURCE
            kinds["all" if has_source.all() else "some" if has_source.any() else "none"] += 1

        assert min(kinds[kind] for kind in ("all", "some", "none")) >= 3, kinds

    def test_moves_rows_so_that_sources_are_not_their_own_rows(self):
        moved = sum(
            ((step.inputs.sources != NO_SOURCE) & (step.inputs.sources != np.arange(step.num_rows)))
            .sum()
            .item()
            for step in steps()
        )

        assert moved >= 5

    def test_reaches_the_longest_context_and_every_offset_of_a_block(self):
        lens = {int(n) for step in steps() for n in step.inputs.batch.context_lens}

        assert lens == set(range(1, GEOMETRY.max_model_len + 1))

    def test_draws_tokens_that_are_not_the_likeliest(self):
        decoder = plain_decoder("llama")
        plain = PlainWorld(decoder, GEOMETRY)
        num_drawn = num_other = 0
        with torch.no_grad():
            for step in steps():
                plain.fill(step.key, step.num_rows, step.inputs)
                plain.program(step.key)()
                outputs = plain.outputs()
                likeliest = outputs["logits"][: step.num_rows].argmax(1)
                differs = outputs["tokens"][: step.num_rows] != likeliest
                greedy = torch.tensor([row.is_greedy for row in step.inputs.rows])
                assert not differs[greedy].any()
                num_drawn += int((~greedy).sum())
                num_other += int(differs.sum())

        assert num_other > num_drawn / 4 > 5


BROKEN_TOKEN = 7


@pytest.fixture(scope="module")
def with_failed_rows():
    """A verification with a token whose embedding is NaN, and the failed rows of each step."""
    decoder = random_decoder(small_config(plain_decoder("qwen3").config))
    decoder.embedding[BROKEN_TOKEN] = float("nan")
    schedule = steps(30, vocab_size=BROKEN_TOKEN + 5)
    num_failed = []

    class Plain(PlainWorld):
        def outputs(self):
            outputs = super().outputs()
            num_failed.append(outputs["tokens"].eq(FAILED_TOKEN).sum().item())
            return outputs

        def fill(self, key, num_rows, inputs):
            super().fill(key, num_rows, inputs)
            super().outputs()["tokens"].zero_()

    report = verify_world(
        lambda: CapturedWorld(decoder, attention_for(decoder.config, GEOMETRY), GEOMETRY),
        lambda: Plain(decoder, GEOMETRY),
        schedule,
        GEOMETRY,
    )
    return report, num_failed, [step.num_rows for step in schedule]


def test_failed_rows_give_the_mark_and_leave_all_else_right(with_failed_rows):
    """They go on until the host has seen it, from whatever token the mark is clamped to."""
    report, num_failed, num_rows = with_failed_rows

    assert report.num_steps == len(num_failed) == len(num_rows)
    assert not report.findings
    # Their own logits are the only thing that may be found, and in those steps only.
    assert [(one.step, one.kind, one.detail) for one in report.mismatches] == [
        (step, MismatchKind.NOT_FINITE, "`logits`")
        for step, count in enumerate(num_failed)
        if count
    ]


def test_failed_rows_stood_beside_others(with_failed_rows):
    _, num_failed, num_rows = with_failed_rows

    assert sum(0 < bad < num for bad, num in zip(num_failed, num_rows, strict=True)) >= 3


class TestModelsMadeForIt:
    def test_keep_what_the_step_depends_on(self):
        config = plain_decoder("qwen3").config
        small = small_config(config)

        for name in ("architecture", "num_heads", "num_kv_heads", "head_dim", "qk_norm", "rope"):
            assert getattr(small, name) == getattr(config, name)

    @pytest.mark.parametrize("heads", [(9, 3, 64), (16, 8, 128), (4, 4, 80)], ids=str)
    def test_of_other_head_shapes_are_safe_too(self, heads):
        num_heads, num_kv_heads, head_dim = heads
        config = read_model_config(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": 4000,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": num_heads,
                "num_key_value_heads": num_kv_heads,
                "head_dim": head_dim,
            },
            source="test",
        )
        report = verify_decode(random_decoder(small_config(config)), num_steps=12)

        assert report.ok, report

    def test_are_equal_each_time(self):
        first, again = (random_decoder(small_config(plain_decoder("llama").config)) for _ in "ab")

        assert all(map(torch.equal, first.tensors(), again.tensors()))


class TestTheCommand:
    """`nanovllm doctor --verify-graphs`."""

    def test_verifies_the_built_in_model_without_fetching_it(self, monkeypatch):
        monkeypatch.setattr(doctor, "find_model", lambda spec: pytest.fail(f"looked for {spec}"))
        result = run("doctor", "--verify-graphs")

        assert (result.exit_code, result.stderr) == (0, "")
        lines = result.stdout.splitlines()
        assert "smollm2-135m: LlamaForCausalLM, 9 query heads on 3 of K/V, 64 wide" in lines[0]
        assert lines[-1].split("  ")[-1] == "safe to replay"

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("llama_biased", "biases"),
            ("qwen3", "norms of queries and keys"),
            ("qwen2_yarn", "yarn rope"),
        ],
    )
    def test_verifies_a_model_of_ones_own_and_says_what_it_is_like(self, name, said):
        result = run("doctor", "--verify-graphs", "--json", "--model", str(checkpoint_folder(name)))

        findings = {entry["what"]: entry["found"] for entry in json.loads(result.stdout)}
        assert said in findings["model"]
        assert findings["decode step"] == "safe to replay"
        assert result.exit_code == 0

    def test_fails_and_says_what_is_wrong(self, monkeypatch):
        class Forgetful(CapturedWorld):
            def named_tensors(self):
                return {
                    name: tensor
                    for name, tensor in super().named_tensors().items()
                    if name != "cos_sin"
                }

        monkeypatch.setattr(verify_graphs, "CapturedWorld", Forgetful)
        result = run("doctor", "--verify-graphs")

        assert_fails_in_one_line(result, 1, "not safe to replay")
        wrong = [line for line in result.stdout.splitlines() if line.startswith("wrong")]
        assert wrong
        assert all("qkv_rope_store" in line for line in wrong)

    def test_a_model_that_is_not_there_is_wrong_usage(self):
        result = run("doctor", "--verify-graphs", "--model", "no/where/at/all")

        assert_fails_in_one_line(result, 2, "no/where/at/all")

    def test_a_model_for_nothing_is_wrong_usage(self):
        assert_fails_in_one_line(run("doctor", "--model", "x"), 2, "--model", "--verify-graphs")
