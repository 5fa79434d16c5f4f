"""Decoders of every family for tests that look at the decode step itself."""

import functools

import torch

from nanovllm.model.config import read_model_config
from nanovllm.model.linear import PlainLinear
from nanovllm.model.safetensors_checkpoint import open_folder
from nanovllm.model.weights import load_decoder
from tests.checkpoints import checkpoint_folder


@functools.cache
def plain_decoder(name):
    """The same for everybody, who must not change it."""
    return load_plain_decoder(name)


def load_plain_decoder(name):
    """A family's tiny checkpoint in float32, of plain linear layers as on a GPU."""
    checkpoint = open_folder(checkpoint_folder(name))
    config = read_model_config(checkpoint.config, source=checkpoint.source)
    device = torch.device("cpu")
    return load_decoder(
        checkpoint, config, dtype=torch.float32, device=device, make_linear=PlainLinear
    )
