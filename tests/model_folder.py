"""A tiny random model with a tokenizer and a chat template, as a Hugging Face folder."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.checkpoints import VOCAB_SIZE, checkpoint_folder, edit_json
from tests.tokenizer_files import ADDED, CORPUS, SPECIAL, TEMPLATE, config_json

EOS_TEXT = SPECIAL[0]
EOS_ID = 0  # the trainer numbers special tokens first

_FOLDERS = tempfile.TemporaryDirectory(prefix="nanovllm-models-")


@functools.cache
def small_tokenizer():
    """A byte-level tokenizer that has a string for each id of the checkpoints, and no more."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(ADDED),
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    trained.decoder = decoders.ByteLevel()
    trained.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return trained


def write_model_folder(
    path, *, family="llama", chat_template=TEMPLATE, eos=EOS_TEXT, config=None, generation=None
):
    """Write a model that the caller may change further.

    `config` and `generation` are entries to change in `config.json` and `generation_config.json`;
    None removes one.
    """
    shutil.copytree(checkpoint_folder(family), path)
    content = json.loads(small_tokenizer().to_str())
    told = config_json(content, chat_template=chat_template, eos_token=eos)
    told = {key: value for key, value in told.items() if value is not None}
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    edit_json(path / "config.json", **(config or {}))
    edit_json(path / "generation_config.json", **(generation or {}))
    return path


@functools.cache
def tiny_model_folder():
    """The plain one, kept for the session and not to be changed."""
    return write_model_folder(Path(_FOLDERS.name) / "tiny")
