"""`nanovllm bench latency` and `nanovllm bench throughput`: figures of a model on this machine."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli_errors import errors_as_lines
from nanovllm.errors import RequestError
from nanovllm.llm import LLM

if TYPE_CHECKING:
    from nanovllm.workloads.arrivals import Arrival
    from nanovllm.workloads.bandwidth import Bandwidth

app = typer.Typer(help="Measure a model on this machine.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="A folder, a .gguf file, a hub id, or smollm2-135m.")]
Batch = Annotated[str, typer.Option(help="Sequences at a time, one column each, such as 1,8,64.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of every prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens that every request generates.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write everything here too.")]
Seed = Annotated[int, typer.Option(help="Of the random prompts and arrivals.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or int8.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_NUM_SEQS = 64


@app.command()
def latency(
    model: Model = DEFAULT_MODEL,
    batch: Batch = "1,8",
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed batches.")] = 10,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before them.")] = 2,
    json_path: JsonPath = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    debug: Debug = False,
) -> None:
    """Time whole batches, one after the other: how long a call takes when nothing else runs."""
    with errors_as_lines(debug):
        # Delayed, as in `throughput`: for this command only.
        from nanovllm.workloads.closed_batch import BatchShape, run_batches
        from nanovllm.workloads.tables import latency_lines, table

        batches = _parse_batches(batch)
        with _bench("latency", model, batches, device=device, dtype=dtype) as (llm, run):
            reports = []
            for size in batches:
                run.say(f"batch {size}: {num_iters_warmup} + {num_iters} times")
                shape = BatchShape(size, input_len, output_len)
                reports.append(
                    run_batches(
                        llm,
                        shape,
                        num_runs=num_iters,
                        num_warmup_runs=num_iters_warmup,
                        seed=seed,
                    )
                )
                run.measure_bandwidth()
            columns = [
                (f"batch {one.shape.batch}", latency_lines(one, run.bandwidth)) for one in reports
            ]
            title = f"{input_len} prompt tokens, {output_len} generated, {num_iters} batches"
            run.finish(
                title, table(columns), [one.as_data(run.bandwidth) for one in reports], json_path
            )


@app.command()
def throughput(
    model: Model = DEFAULT_MODEL,
    batch: Batch = "1,8",
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests. Default: 4 batches, 16 at least.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second (Poisson), in place of --batch."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace of requests, in place of --batch.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Write the requests as a trace, for --trace.")
    ] = None,
    goodput: Annotated[
        str, typer.Option(help="What a good request keeps, in ms: ttft:500,tpot:50,e2el:3000.")
    ] = "",
    json_path: JsonPath = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    debug: Debug = False,
) -> None:
    """Serve many requests: `--batch` at a time, or as they come (`--rate`, `--trace`)."""
    with errors_as_lines(debug):
        from nanovllm.workloads.arrivals import poisson, read_trace, recorded, write_trace
        from nanovllm.workloads.open_loop import Objective, run_load
        from nanovllm.workloads.tables import load_lines, table

        if rate is not None and trace is not None:
            raise RequestError("`--rate` and `--trace` both say when requests come; give one.")
        objective = Objective.parse(goodput) if goodput else Objective()
        is_open = rate is not None or trace is not None
        batches = [] if is_open else _parse_batches(batch)

        def requests(count: int, per_second: float) -> "tuple[Arrival, ...]":
            return poisson(
                count,
                rate=per_second,
                num_prompt_tokens=input_len,
                num_output_tokens=output_len,
                seed=seed,
            )

        loads: list[tuple[str, tuple[Arrival, ...], int | None]]
        if trace is not None:
            loads = [(trace.name, read_trace(trace), None)]
        elif rate is not None:
            loads = [(f"{rate:g} req/s", requests(num_prompts or 64, rate), None)]
        else:
            loads = [
                (f"batch {size}", requests(num_prompts or max(16, 4 * size), float("inf")), size)
                for size in batches
            ]
        with _bench("throughput", model, batches, device=device, dtype=dtype) as (llm, run):
            reports = []
            run_load(llm, requests(4, float("inf")), seed=seed + 1)  # to warm up
            for name, arrivals, size in loads:
                run.say(f"{name}: {len(arrivals)} requests")
                reports.append(
                    run_load(llm, arrivals, seed=seed, max_in_flight=size, objective=objective)
                )
                run.measure_bandwidth()
            columns = []
            for (name, _, size), report in zip(loads, reports, strict=True):
                limit = size and run.limit_tokens_per_s(size, input_len, output_len)
                columns.append((name, load_lines(report, limit_tokens_per_s=limit)))
            if save_trace is not None:
                write_trace(save_trace, recorded([one.record for one in reports[-1].served]))
            title = f"objective of goodput: {objective}"
            run.finish(title, table(columns), [one.as_data() for one in reports], json_path)


class BenchRun:
    """What both commands share: the machine, and how results are shown."""

    def __init__(self, command: str, llm: LLM) -> None:
        # Delayed: for these commands only.
        from nanovllm.workloads.disturbances import DisturbanceWatch
        from nanovllm.workloads.machine import gpu_facts, machine_facts

        self._command, self._llm = command, llm
        self._engine = llm.describe()
        device = self._engine["device"]
        self._machine = machine_facts()
        if device["type"] == "cuda":
            self._machine |= gpu_facts(device["uuid"])
        self.bandwidth = self._read_bandwidth()
        self.watch = DisturbanceWatch()

    def measure_bandwidth(self) -> None:
        """Measure it again, as a neighbour may have been busy before; the best counts."""
        self.bandwidth = self.bandwidth.best(self._read_bandwidth())

    def say(self, text: str) -> None:
        """Progress, for people."""
        typer.echo(text, err=True)

    def limit_tokens_per_s(self, batch: int, num_prompt_tokens: int, num_output: int) -> float:
        """Tokens a second that the memory's bandwidth allows while a batch decodes."""
        from nanovllm.workloads.bandwidth import decode_step_bytes

        context = num_prompt_tokens + num_output / 2  # half way through
        num_bytes = decode_step_bytes(self._llm, batch=batch, num_context_tokens=context)
        return batch / self.bandwidth.limit_s(num_bytes)

    def _read_bandwidth(self) -> "Bandwidth":
        from nanovllm.workloads.bandwidth import measure_read_bandwidth  # delayed: loads torch

        return measure_read_bandwidth(self._engine["config"]["device"])

    def finish(
        self, title: str, lines: Sequence[str], results: list[Any], json_path: Path | None
    ) -> None:
        """Print the table; write the file, if one is asked for."""
        disturbance = self.watch.so_far()
        model, config = self._engine["model"], self._engine["config"]
        machine = self._machine
        versions = ", ".join(
            f"{name} {machine[name]}" for name in ("python", "torch", "numba") if name in machine
        )
        typer.echo(f"== nanovllm bench {self._command}: {title}")
        typer.echo(
            f"{model['name']}, {config['dtype']}, {config['attention_backend']}; "
            f"{self._engine['device']['name']}, {machine['num_usable_cpus']} of "
            f"{machine['num_cpus']} CPUs; {versions}; commit {machine['commit'] or 'unknown'}"
        )
        typer.echo(
            f"memory reads {self.bandwidth.bytes_per_s / 1e9:.1f} GB/s; load average "
            f"{disturbance.load_average:.1f}; {len(disturbance.gc_pauses_s)} pauses for GC, the "
            f"longest {max(disturbance.gc_pauses_s, default=0.0) * 1e3:.1f} ms"
        )
        for warning in disturbance.warnings():
            typer.echo(f"warning: {warning}")
        typer.echo("\n".join(["", *lines]))
        if json_path is not None:
            data = {
                "command": self._command,
                "machine": machine,
                "engine": self._engine,
                "bandwidth": self.bandwidth.as_data(),
                "disturbance": disturbance.as_data(),
                "warnings": disturbance.warnings(),
                "results": results,
            }
            json_path.expanduser().write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _bench(
    command: str, model: str, batches: Sequence[int], **options: Any
) -> Iterator[tuple[LLM, BenchRun]]:
    """An engine with room for the largest batch, and a heap that garbage collection leaves be."""
    from nanovllm.workloads.disturbances import settled_heap

    max_num_seqs = max([DEFAULT_MAX_NUM_SEQS, *batches])
    with LLM(model, max_num_seqs=max_num_seqs, **options) as llm, settled_heap():
        run = BenchRun(command, llm)
        with run.watch:
            yield llm, run


def _parse_batches(text: str) -> list[int]:
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise RequestError(f"`--batch` is {text!r}; it must be numbers above 0, such as 1,8,64.")
    return batches
