"""Golden traces: every state of a small run as readable JSON, with the inputs that made it.

Regenerate with `python -m tests.core.golden_traces`, and read the difference.
"""

import json
from pathlib import Path

from nanovllm.core import EngineState, SchedulerLimits, Sequence, admit, postprocess, schedule
from nanovllm.sampling_params import SamplingParams

FOLDER = Path(__file__).parent / "golden"


def replay(trace):
    """Run a trace's inputs; returns the events that it should hold."""
    limits = SchedulerLimits(**{**trace["limits"], "eos_token_ids": frozenset(trace["eos"])})
    state = EngineState.create(trace["num_blocks"], trace["block_size"])
    for seq_id, request in enumerate(trace["requests"]):
        params = SamplingParams(**request["params"])
        state = admit(state, Sequence.create(seq_id, request["prompt"], params), limits)
    events = [{"after": "admit", **describe(state)}]
    for tokens in trace["drawn"]:
        state, plan = schedule(state, limits)
        events.append(
            {
                "after": "schedule",
                "scheduled": [seq.seq_id for seq in plan.scheduled],
                "num_decode_tokens": plan.num_decode_tokens,
                "num_prefill_tokens": plan.num_prefill_tokens,
                "preempted": list(plan.preempted),
                **describe(state),
            }
        )
        state, outputs = postprocess(state, plan, tokens)
        events.append(
            {
                "after": "postprocess",
                "outputs": [
                    [output.seq_id, output.new_token_id, output.finish_reason] for output in outputs
                ],
                "finished": [
                    describe_sequence(output.sequence)
                    for output in outputs
                    if output.finish_reason is not None
                ],
                **describe(state),
            }
        )
    return events


def describe(state):
    pool = state.pool
    return {
        "waiting": [describe_sequence(seq) for seq in state.waiting],
        "running": [describe_sequence(seq) for seq in state.running],
        "free_blocks": list(pool.free_block_ids),
        "cached_blocks": [block for block, key in enumerate(pool.keys) if key],
    }


def describe_sequence(seq):
    return {
        "seq_id": seq.seq_id,
        "status": seq.status.name,
        "token_ids": list(seq.token_ids),
        "num_cached_tokens": seq.num_cached_tokens,
        "num_scheduled_tokens": seq.num_scheduled_tokens,
        "block_table": list(seq.block_table),
    }


def read_traces():
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def write(name, trace):
    lines = [f'{{\n "config": {json.dumps(trace["config"])},\n "events": [']
    lines.append(",\n".join("  " + json.dumps(event) for event in trace["events"]))
    (FOLDER / f"{name}.json").write_text("\n".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    for name, trace in read_traces().items():
        write(name, {"config": trace["config"], "events": replay(trace["config"])})
