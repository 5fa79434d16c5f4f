"""An engine that describes itself and calls hooks, and computes nothing."""

import time

from nanovllm.records import RequestRecord, StepRecord


class FakeEngine:
    """The least that a recorder asks of an engine."""

    def __init__(self, device=None, memory=None):
        self.hooks = []
        self.num_steps = 0
        self.captures = []
        self._device = device or {"type": "cpu", "index": None, "uuid": None, "name": "a CPU"}
        self._memory = memory or {"weights_bytes": 4096, "kv_cache_bytes": 8192}

    def describe(self):
        return {
            "engine": {"name": "fake", "version": "1"},
            "model": {"name": "none", "num_layers": 2},
            "device": dict(self._device),
            "config": {"max_num_seqs": 4, "folder": ["a", "b"]},
            "memory": dict(self._memory),
            "graphs": {"captures": list(self.captures), "degraded": None},
        }

    def subscribe(self, hook):
        self.hooks.append(hook)
        return lambda: self.hooks.remove(hook)

    def step(self, **fields):
        record = step_record(self.num_steps, **fields)
        self.num_steps += 1
        for hook in self.hooks:
            hook(record)
        return record


def step_record(index, *, start_s=None, **fields):
    """A decode step of one sequence that takes a millisecond."""
    start_s = time.perf_counter() if start_s is None else start_s
    given = {
        "index": index,
        "start_s": start_s,
        "end_s": start_s + 1e-3,
        "num_rows": 1,
        "num_decode_tokens": 1,
        "num_prefill_tokens": 0,
        "num_prefix_hit_tokens": 0,
        "num_waiting": 0,
        "num_running": 1,
        "num_free_blocks": 60,
        "num_used_blocks": 4,
        "num_cached_blocks": 2,
        "num_preempted": 0,
        "mode": "native",
        "bucket": None,
        "fallback": None,
        "schedule_s": 1e-5,
        "execute_s": 9e-4,
        "postprocess_s": 2e-5,
        "pack_s": 0.0,
        "submit_s": 0.0,
        "wait_s": 0.0,
        "sampled": (0,),
        "finished": (),
    }
    return StepRecord(**{**given, **fields})


def request_record(request_id="request-0", **fields):
    """A request that got four tokens."""
    given = {
        "request_id": request_id,
        "seq_ids": (0,),
        "arrival_s": 100.0,
        "first_scheduled_s": 100.1,
        "first_token_s": 100.2,
        "finished_s": 100.5,
        "num_prompt_tokens": 7,
        "num_prefix_hit_tokens": 0,
        "num_generated_tokens": 4,
        "num_preemptions": 0,
        "finish_reason": "length",
    }
    return RequestRecord(**{**given, **fields})
