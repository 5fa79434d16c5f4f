"""Checkpoints that load, and every way in which one may not: by name, before anything is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.errors import WeightsError
from nanovllm.model.config import FAMILIES as ARCHITECTURES
from nanovllm.model.config import read_model_config, read_token_ids
from nanovllm.model.safetensors_checkpoint import open_folder
from nanovllm.model.weights import load_decoder
from tests.checkpoints import checkpoint_folder, edit_json, reference_model
from tests.engines import greedy, tiny_llm
from tests.model.paged_model import load, logits_in_steps

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A copy of a small llama that a test may damage."""
    target = tmp_path / "a folder with spaces"
    shutil.copytree(checkpoint_folder("llama"), target)
    return target


@pytest.fixture
def sharded(tmp_path):
    """The same in several files with an index."""
    target = tmp_path / "sharded"
    shutil.copytree(checkpoint_folder("llama", max_shard_size="200KB"), target)
    assert len(list(target.glob("*.safetensors"))) > 1
    return target


def load_from(folder):
    checkpoint = open_folder(folder)
    config = read_model_config(checkpoint.config, source=checkpoint.source)
    return load_decoder(checkpoint, config, dtype=torch.float32, device=CPU)


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    save_file(tensors, path)


def same_model(decoder):
    tokens = list(range(10))
    blocks = [3, 9, 1]
    return torch.equal(
        logits_in_steps(decoder, tokens, [10], blocks),
        logits_in_steps(load("llama"), tokens, [10], blocks),
    )


def test_one_file_and_several_files_are_the_same_model(folder, sharded):
    assert same_model(load_from(folder))
    assert same_model(load_from(sharded))


def test_the_index_decides_and_other_copies_of_the_weights_are_left_alone(sharded):
    save_file({"lm_head.weight": torch.zeros(3)}, sharded / "consolidated.safetensors")
    save_file({"adapter": torch.zeros(3)}, sharded / "adapter_model.safetensors")

    assert same_model(load_from(sharded))


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightsError, match=shard.name):
        open_folder(sharded)


def test_a_shard_without_what_the_index_promises_is_named(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=r"model\.extra\.weight"):
        open_folder(sharded)


@pytest.mark.parametrize("index", ["{}", "[]", "not json"])
def test_a_broken_index_is_refused(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match="index"):
        open_folder(sharded)


@pytest.mark.parametrize("keep", [0, 7, 1000])
def test_a_truncated_file_is_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match="truncated"):
        open_folder(folder)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(NORM), rf"missing {NORM}"),
        (lambda tensors: tensors.update({"model.more": torch.zeros(1)}), "unexpected model.more"),
        (
            lambda tensors: tensors.update({NORM: torch.zeros(3)}),
            rf"{NORM} is \(3,\), not \(128,\)",
        ),
    ],
)
def test_tensors_that_are_missing_or_unexpected_or_of_another_shape_are_listed(
    folder, edit, message
):
    edit_weights(folder, edit)
    with pytest.raises(WeightsError, match=message):
        load_from(folder)


def test_buffers_that_follow_from_the_config_are_ignored(folder):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32)}
    edit_weights(folder, lambda tensors: tensors.update(buffer))

    assert same_model(load_from(folder))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_the_config_says_whether_the_output_projection_is_the_embedding(folder, tied, present):
    edit_json(folder / "config.json", tie_word_embeddings=tied)
    if present:
        other = torch.ones_like(reference_model("llama").model.embed_tokens.weight)
        edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": other}))
    if not tied and not present:
        with pytest.raises(WeightsError, match=r"missing lm_head\.weight"):
            load_from(folder)
        return
    decoder = load_from(folder)
    logits = decoder.logits(torch.randn(1, 128, generator=torch.Generator().manual_seed(0)))

    # A projection of ones gives every id the same logit; the embedding does not.
    assert bool(logits.std() < 1e-4) is (not tied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
        ({"architectures": None}, "`architectures` is missing"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "supported are"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_key_value_heads": 3}, "4 query heads"),
        ({"vocab_size": None}, "`vocab_size` is None"),
        ({"num_hidden_layers": "2"}, "`num_hidden_layers`"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs `factor`"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs `low_freq_factor`"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(folder, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(WeightsError, match=message):
        load_from(folder)


def test_the_supported_architectures_are_listed_in_the_refusal(folder):
    edit_json(folder / "config.json", architectures=["FooForCausalLM"])
    with pytest.raises(WeightsError) as caught:
        load_from(folder)

    assert all(name in str(caught.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 32), ({"head_dim": None}, 32), ({"head_dim": 64}, 64)]
)
def test_head_dim_may_be_absent_or_null_or_its_own(given, expected):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        **given,
    }

    assert read_model_config(config, source="x").head_dim == expected


@pytest.mark.parametrize(
    ("architecture", "given", "expected"),
    [
        ("MistralForCausalLM", {"sliding_window": 8}, 8),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, 8),
        ("Qwen3ForCausalLM", {"sliding_window": 8}, None),
    ],
)
def test_the_sliding_window_counts_only_where_it_is_switched_on(architecture, given, expected):
    config = {
        "architectures": [architecture],
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        **given,
    }

    assert read_model_config(config, source="x").sliding_window == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        ),
    ],
)
def test_old_and_new_spelling_of_rope_mean_the_same(folder, old, new):
    def rope(changes):
        cleared = {"rope_parameters": None, "rope_theta": None, "rope_scaling": None}
        edit_json(folder / "config.json", **{**cleared, **changes})
        return read_model_config(open_folder(folder).config, source="x").rope

    assert rope(old) == rope(new)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, set()), (7, {7}), ([5, 9], {5, 9}), ([], set())]
)
def test_token_ids_in_a_config_may_be_absent_or_one_or_several(value, expected):
    assert read_token_ids(value) == expected


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "other.gguf", None])
def test_a_folder_without_safetensors_says_what_it_holds(folder, name):
    (folder / "model.safetensors").unlink()
    if name is not None:
        (folder / name).write_bytes(b"")
    with pytest.raises(WeightsError, match=name or "holds no weights"):
        open_folder(folder)


def test_a_folder_whose_config_is_no_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config\.json can't be read"):
        open_folder(folder)


def test_the_end_of_text_ids_of_config_and_generation_config_all_count(folder):
    edit_json(folder / "config.json", eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    from nanovllm import LLM

    with LLM(folder, device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=8) as llm:
        assert llm.config.eos_token_ids == {5, 7, 9}


def test_a_bfloat16_checkpoint_runs_in_bfloat16_and_in_float32(folder):
    edit_weights(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    edit_json(folder / "config.json", dtype="bfloat16")
    from nanovllm import LLM

    for dtype, expected in (("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")):
        with LLM(
            folder, device="cpu", dtype=dtype, skip_tokenizer_init=True, num_kvcache_blocks=8
        ) as llm:
            assert llm.config.dtype == expected
            assert len(llm.generate([1, 2], greedy(3))[0].token_ids) == 3


def test_a_float16_engine_runs_on_torch_and_says_why():
    with tiny_llm(dtype="float16") as llm:
        assert llm.config.attention_backend == "torch"
        assert any("float16" in note for note in llm.config.notes)
