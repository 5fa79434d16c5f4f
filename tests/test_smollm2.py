"""The built-in model, a real one: exact tokens in float32, near ones in bfloat16, sensible text."""

import pytest
import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.model.gguf_checkpoint import GgufCheckpoint
from tests.builtin import builtin_gguf_path
from tests.engines import ON_GPU, is_idle

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees",
    "Zwei mal drei ist",
    "1, 2, 3, 5, 8, 13,",
    "The three laws of motion are: 1.",
    "Dear Sir or Madam,\n\nI am writing to",
]
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

SCHEDULES = {
    "plain": {},
    "in chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "preempted": {"num_kvcache_blocks": 20, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def path():
    return builtin_gguf_path()


@pytest.fixture(scope="module")
def reference(path):
    """The same weights in transformers' own model, in float32."""
    checkpoint = GgufCheckpoint(path)
    config = transformers.LlamaConfig(**checkpoint.config)
    model = transformers.LlamaForCausalLM(config).float().eval()
    state = {name: checkpoint.tensor(name).float().clone() for name in checkpoint.shapes()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


def reference_logits(reference, prompt_ids, completion_ids):
    """Logits from which each token of a completion was drawn, `[tokens, V]`."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt_ids, *completion_ids]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1]  # -1: the last prompt token gives the first draw


@pytest.mark.parametrize(
    ("schedule", "backend"),
    [
        *((name, "native") for name in SCHEDULES),
        ("plain", "torch"),
        pytest.param("plain", "triton", marks=ON_GPU.marks),
        pytest.param("in chunks of 5", "triton", marks=ON_GPU.marks),
    ],
)
def test_greedy_tokens_in_float32_are_those_of_transformers(path, reference, schedule, backend):
    """Each token is the argmax after all before it: then all are what greedy search gives."""
    device = "cuda" if backend == "triton" else "cpu"
    options = {"device": device, "dtype": "float32", "attention_backend": backend}
    with LLM(path, **options, **SCHEDULES[schedule]) as llm:
        first = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS[:2], GREEDY)
        stats = llm.stats()

        assert is_idle(llm)
    for output in first:
        logits = reference_logits(reference, output.prompt_token_ids, output.token_ids)

        assert logits.argmax(-1).tolist() == list(output.token_ids)
    assert [o.token_ids for o in again] == [o.token_ids for o in first[:2]]
    if schedule == "preempted":
        assert stats.num_preemptions


def test_logits_in_float32_are_within_a_ten_thousandth(path, reference):
    tokens = list(range(100, 160))
    captured = []
    with LLM(path, device="cpu", dtype="float32", attention_backend="native") as llm:
        program = llm._engine._loop.executor._program
        run = program.run

        def recording(batch):
            logits = run(batch)
            captured.append(logits.clone())
            return logits

        program.run = recording
        (output,) = llm.generate([tokens], GREEDY)
    expected = reference_logits(reference, tokens, output.token_ids)

    torch.testing.assert_close(torch.cat(captured), expected, atol=1e-4, rtol=0)


def agreement(path, reference, dtype, backend="native"):
    """How many of the model's tokens float32 would choose after the same ones, and how far below
    its choice the worst of the others is."""
    device = "cuda" if backend == "triton" else "cpu"
    with LLM(path, device=device, dtype=dtype, attention_backend=backend) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    agreed = worst_gap = 0.0
    for output in outputs:
        logits = reference_logits(reference, output.prompt_token_ids, output.token_ids)
        chosen = logits.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        gaps = logits.max(-1).values - chosen
        agreed += int((gaps == 0).sum())
        worst_gap = max(worst_gap, gaps.max().item())
    return agreed, worst_gap


@pytest.mark.parametrize("backend", ["native", ON_GPU])
def test_bfloat16_agrees_with_float32_on_nearly_every_token(path, reference, backend):
    agreed, worst_gap = agreement(path, reference, "bfloat16", backend)

    print(f"{backend}: {agreed:.0f} of {len(PROMPTS) * NUM_TOKENS}, at worst {worst_gap:.2f} below")
    assert agreed / (len(PROMPTS) * NUM_TOKENS) >= 0.98
    assert worst_gap < 1.0


def test_text_is_sensible_streamed_and_whole_and_stops_at_a_string(path):
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(path, device="cpu") as llm:
        (whole,) = llm.generate(PROMPTS[0], params)
        streamed = "".join(delta.text for delta in llm.stream(PROMPTS[0], params))
        (stopped,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, stop="Paris"))
        (answer,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], params)

    assert "Paris" in whole.text
    assert streamed == whole.text
    assert whole.text.startswith(stopped.text)
    assert "Paris" not in stopped.text
    assert stopped.outputs[0].stop_reason == "Paris"
    assert "4" in answer.text
    assert "<|im_" not in answer.text


def test_a_shared_prompt_is_computed_once(path):
    system = [{"role": "system", "content": "You answer in one word. " * 20}]
    params = SamplingParams(temperature=0, max_tokens=2)
    with LLM(path, device="cpu") as llm:
        llm.chat([*system, {"role": "user", "content": "One?"}], params)
        (second,) = llm.chat([*system, {"role": "user", "content": "Two?"}], params)

    assert second.num_cached_tokens >= 0.8 * len(second.prompt_token_ids)
