"""Every family computes what transformers computes, however the work is cut up and stored."""

import random

import pytest
import torch

from tests.checkpoints import FAMILIES, VOCAB_SIZE, reference_model
from tests.model.paged_model import NUM_BLOCKS, kv_cache, load, logits_in_steps, make_batch, run

TOKENS = random.Random(1).choices(range(VOCAB_SIZE), k=45)
SCATTERED = random.Random(2).sample(range(NUM_BLOCKS), 12)

CUTS = {
    "one prefill": [45],
    "chunks of 5": [*range(5, 46, 5)],
    "a prefix, then the rest": [24, 45],
    "decodes after a prefill": [30, *range(31, 46)],
    "decodes from the first token": [*range(1, 46)],
    "unequal chunks": [1, 2, 9, 10, 33, 45],
}


def reference_logits(name, tokens):
    with torch.inference_mode():
        return reference_model(name)(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
def test_logits_equal_those_of_transformers_over_scattered_blocks(name, cut):
    logits = logits_in_steps(load(name), TOKENS, CUTS[cut], SCATTERED)

    torch.testing.assert_close(logits, reference_logits(name, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_decodes_and_prefills_gives_each_row_what_it_gets_alone(name):
    decoder = load(name)
    rng = random.Random(3)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = [rng.choices(range(VOCAB_SIZE), k=k) for k in (9, 4, 17, 13, 20)]
    rows = [(tokens, start) for tokens, start in zip(sequences, (8, 3, 16, 0, 7), strict=True)]
    tables = [[blocks.pop() for _ in range(-(-len(tokens) // 4))] for tokens, _ in rows]
    cache = kv_cache(decoder)
    for (tokens, start), table in zip(rows, tables, strict=True):
        if start:
            run(decoder, cache, make_batch([(tokens[:start], 0, table)]))
    mixed = [(tokens, start, table) for (tokens, start), table in zip(rows, tables, strict=True)]
    logits = run(decoder, cache, make_batch(mixed))
    expected = torch.cat([reference_logits(name, tokens)[start:] for tokens, start in rows])

    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_position_past_the_cached_part_reads_nothing_unwritten():
    """Caches start as NaN here, so this is what `test_logits_...` rests on."""
    decoder = load("llama")
    cache = kv_cache(decoder)
    unwritten = run(decoder, cache, make_batch([(TOKENS[:9], 8, SCATTERED)]))

    assert unwritten.isnan().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_stays_near_float32(name):
    logits = logits_in_steps(
        load(name, torch.bfloat16), TOKENS, CUTS["chunks of 5"], SCATTERED, torch.bfloat16
    )
    expected = reference_logits(name, TOKENS)
    error = (logits.float() - expected).abs().mean() / expected.abs().mean()

    assert logits.dtype == torch.bfloat16
    assert error < 0.05


def test_the_forward_pass_leaves_its_weights_as_they_were():
    decoder = load("qwen3")
    before = decoder.embedding.clone(), decoder.layers[0].input_norm.clone()
    logits_in_steps(decoder, TOKENS, CUTS["unequal chunks"], SCATTERED)

    assert torch.equal(decoder.embedding, before[0])
    assert torch.equal(decoder.layers[0].input_norm, before[1])
