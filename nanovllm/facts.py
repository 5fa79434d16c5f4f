"""Facts of an engine for reports: which model on which device, and the bytes that it holds."""

from typing import Any

import attrs
import torch

from nanovllm.model.decoder import Decoder
from nanovllm.workloads.machine import cpu_name, installed_version


def read_facts(
    name: str, decoder: Decoder, device: torch.device, *, kv_cache_bytes: int
) -> dict[str, Any]:
    """Facts in values that JSON can hold.

    Returns:
        `engine` (name, version), `model` (name and shape), `device` (type, index, uuid, name),
        and `memory` (weights_bytes, kv_cache_bytes).
    """
    shape = attrs.asdict(decoder.config, recurse=False)
    plain = {key: value for key, value in shape.items() if isinstance(value, int | float | str)}
    return {
        "engine": {"name": "nanovllm", "version": package_version()},
        "model": {"name": name, **plain},
        "device": _device_facts(device),
        "memory": {"weights_bytes": weights_bytes(decoder), "kv_cache_bytes": kv_cache_bytes},
    }


def package_version() -> str:
    """This package's version; "unknown" when it runs from a folder that was never installed."""
    return installed_version("nanovllm") or "unknown"


def weights_bytes(decoder: Decoder) -> int:
    """Bytes of a decoder's weights; what several layers share counts once."""
    # By identity: a weight that oneDNN has packed has no storage to tell it by.
    unique = {id(tensor): tensor.numel() * tensor.element_size() for tensor in decoder.tensors()}
    return sum(unique.values())


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"type": "cpu", "index": None, "uuid": None, "name": cpu_name()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "index": device.index,
        "uuid": str(properties.uuid),
        "name": properties.name,
    }
