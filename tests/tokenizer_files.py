"""Small tokenizers trained on the spot, as Hugging Face folders and as `.gguf` metadata."""

import json

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox doesn't jump over 12 lazy dogs, they'll walk 345 miles.",
    "def main(x):\n    return x ** 2  # squared\n\n\nclass HelloWorld:\n\tpass",
    "Grüße aus Köln, où est le café? 日本語のテキスト 삼겹살 и русский текст",
    "   leading, trailing   and   inner    spaces\r\n\r\nTheQuickBrownFox 2024-01-31",
] * 4

SPECIAL = ("<|endoftext|>", "<|turn|>", "<|pad|>")
ADDED = ("<think>", "</think>")

# What the models' own tokenizer.json files say, in that file's words.
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SMOLLM = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2],
}
BYTES_ONLY = {**GPT2, "use_regex": False}


def cut_by(pattern):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, BYTES_ONLY]}


LLAMA3 = cut_by(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = cut_by(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = cut_by(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_json(pre_tokenizer, *, normalizer=None, whole_words=False):
    """A trained byte-level tokenizer as a `tokenizer.json` object."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    trained.decoder = decoders.ByteLevel()
    trained.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    content = json.loads(trained.to_str())
    content["pre_tokenizer"] = pre_tokenizer
    content["normalizer"] = normalizer
    content["model"]["ignore_merges"] = whole_words
    return content


def bos_json():
    """A `tokenizer.json` that puts BOS first, and has limits left over from training."""
    made = byte_level_json(LLAMA3, whole_words=True)
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|turn|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|turn|>": {"id": "<|turn|>", "ids": [1], "tokens": ["<|turn|>"]}},
    }
    return made


def gguf_metadata(content, pre, **more):
    """The metadata that a converter makes of a `tokenizer.json` object."""
    ids = content["model"]["vocab"] | {
        token["content"]: token["id"] for token in content["added_tokens"]
    }
    special = {token["content"]: token["special"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {None: 1, True: 3, False: 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": tuple(kinds[special.get(token)] for token in tokens),
        "tokenizer.ggml.merges": tuple(" ".join(pair) for pair in content["model"]["merges"]),
        "tokenizer.ggml.eos_token_id": ids["<|endoftext|>"],
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }


def write_folder(path, content, *, config=None, model=None, **files):
    """A Hugging Face folder. `files` are further JSON files by stem."""
    path.mkdir(parents=True, exist_ok=True)
    named = {"tokenizer": content, "config": {"model_type": "llama"} if model is None else model}
    if config is not None:
        named["tokenizer_config"] = config
    for stem, value in {**named, **files}.items():
        (path / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


def config_json(content, **more):
    """A `tokenizer_config.json` object that agrees with the `tokenizer.json` object."""
    listed = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in content["added_tokens"]
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": listed,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "chat_template": TEMPLATE,
        **more,
    }


TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def texts(count=60, seed=0):
    """Varied texts: written ones, and random ones over scripts, digits, spaces and symbols."""
    rng = np.random.default_rng(seed)
    pools = [
        range(0x20, 0x7F),
        range(0x30, 0x3A),
        range(0xA0, 0x250),
        range(0x370, 0x530),
        range(0x3040, 0x30FF),
        range(0x1F300, 0x1F650),
        [0x20, 0x20, 0x0A, 0x09, 0x0D, 0xA0, 0x3000],
        [0x301, 0x308, 0x200D, 0x2028, 0xBD, 0x2167],
    ]
    random = [
        "".join(chr(rng.choice(pools[rng.integers(len(pools))])) for _ in range(rng.integers(40)))
        for _ in range(count)
    ]
    written = [
        "",
        " ",
        "  two spaces before and after  ",
        "Hello, world! It's 2024, and they'll pay $1,234,567.89.",
        "DON'T shout, I'M listening; HTTPServer camelCase snake_case",
        "a\n\n\nb\r\n\r\nc\t\td  \n  e",
        "x = {'key': [1, 22, 333, 4444]}  # comment/with/slashes\n",
        "e\u0301 and \u00e9, n\u0303 and \u00f1, ½ ² Ⅷ ١٢٣",
        "日本語テキスト 삼겹살 🌶️👨‍👩‍👧 ᄀ",
        "<|turn|>user\nhi<|endoftext|>\n<|turn|> <think>no</think>done",
        "<think> spaced </think>",
        *CORPUS[:4],
    ]
    return written + random
