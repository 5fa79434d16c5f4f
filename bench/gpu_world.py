"""What `gpu_check` works on: a random model on a device, and engines around it."""

from typing import Any

import attrs
import torch

from graphs import EagerBackend, GraphBackend
from nanovllm.build_graphs import attention_for, build_graph_executor, log_event
from nanovllm.config import DeviceFacts, EngineConfig, ModelFacts, ResolvedConfig
from nanovllm.engine import Engine
from nanovllm.facts import weights_bytes
from nanovllm.model.config import ModelConfig, read_model_config
from nanovllm.model.decoder import Decoder
from nanovllm.model.linear import PlainLinear
from nanovllm.model.weights import load_decoder
from nanovllm.prompts import Prompt
from nanovllm.resolve import resolve
from nanovllm.runtime.device_queue import DeviceQueue, ImmediateQueue
from nanovllm.runtime.graph_executor import GraphExecutor
from nanovllm.runtime.verify_model import RandomCheckpoint
from nanovllm.sampling_params import SamplingParams

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}

SMALL = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}


@attrs.define(eq=False)
class World:
    """The model, and how engines around it are made."""

    device: torch.device
    dtype: torch.dtype
    model: ModelConfig
    decoder: Decoder
    is_small: bool
    num_sms: int

    def facts(self) -> dict[str, Any]:
        """For the log."""
        return {
            "weights_gib": weights_bytes(self.decoder) / 2**30,
            "dtype": str(self.dtype),
            "layers": len(self.decoder.layers),
        }

    @property
    def max_num_seqs(self) -> int:
        """Rows of the biggest batch that is checked."""
        return 12 if self.is_small else 64

    def config(self, **options: Any) -> ResolvedConfig:
        """A configuration of this model, with graphs whatever the device."""
        name = str(self.dtype).removeprefix("torch.")
        facts = ModelFacts(
            max_position_embeddings=self.model.max_position_embeddings,
            sliding_window=None,
            kv_values_per_token=2
            * self.model.num_layers
            * self.model.num_kv_heads
            * self.model.head_dim,
            dtype=name,
            eos_token_ids=frozenset(),
        )
        if self.is_small:  # what takes a GPU no time takes a CPU long
            options = {"graph_prompt_sizes": (4, 64), **options}
        given = EngineConfig(dtype=name, attention_backend="triton", **options)
        # As of a GPU with room for everything, on a CPU too: there the operators have references.
        device = DeviceFacts("cuda:0", 80 * 2**30, 80 * 2**30, frozenset({name}))
        return resolve(given, facts, device)

    def backend(self) -> GraphBackend:
        """CUDA graphs, or on a CPU the programs themselves."""
        if self.device.type == "cpu":
            return EagerBackend()
        from graphs.cuda import CudaBackend
        from graphs.cuda_driver import TorchCudaDriver

        return CudaBackend(TorchCudaDriver(self.device))

    def queue(self) -> DeviceQueue:
        """The device's queue."""
        if self.device.type == "cpu":
            return ImmediateQueue()
        from nanovllm.runtime.cuda_queue import CudaQueue

        return CudaQueue(self.device)

    def executor(
        self, config: ResolvedConfig, backend: GraphBackend | None = None
    ) -> GraphExecutor:
        """An executor; by default with captured steps."""
        return build_graph_executor(
            self.decoder,
            config,
            attention=attention_for(self.decoder, config, self.num_sms),
            backend=backend or self.backend(),
            queue=self.queue(),
            on_event=log_event,
        )

    def engine(self, config: ResolvedConfig, backend: GraphBackend | None = None) -> Engine:
        """An engine on such an executor."""
        return Engine(config, self.executor(config, backend), None)

    def prompts(
        self, lengths: list[int], *, prompt_seed: int, max_tokens: int, **params: Any
    ) -> list[Prompt]:
        """Random prompts of these lengths, greedy unless said otherwise."""
        generator = torch.Generator().manual_seed(prompt_seed)
        given = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **params}
        sampling = SamplingParams(**given)
        return [
            Prompt(
                None,
                tuple(
                    torch.randint(self.model.vocab_size, (length,), generator=generator).tolist()
                ),
                sampling,
            )
            for length in lengths
        ]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_world(device: torch.device, *, is_exact: bool = False) -> World:
    """The whole model on a GPU, exact in float32; a small one of the same family on a CPU."""
    is_small = device.type == "cpu"
    model = read_model_config(SMALL if is_small else QWEN3_0_6B, source="gpu_check")
    dtype = torch.float32 if is_small or is_exact else torch.bfloat16
    num_sms = 8 if is_small else int(torch.cuda.get_device_properties(device).multi_processor_count)
    decoder = load_decoder(
        RandomCheckpoint(model), model, dtype=dtype, device=device, make_linear=PlainLinear
    )
    return World(device, dtype, model, decoder, is_small, num_sms)
