"""The command line: `nanovllm generate`, `chat`, `bench`, `report`, `top` and `doctor`.

Results go to standard output, everything else to standard error. Exit code 0, 1 for a run that
failed, 2 for wrong usage; an error is one line, and `--debug` adds the traceback.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

import nanovllm
from nanovllm.cli_bench import app as bench_app
from nanovllm.cli_errors import errors_as_lines
from nanovllm.cli_report import check_run_path, recorded, report, top
from nanovllm.errors import ConfigError, NanoVLLMError, RequestError
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.run_summary import RunSummary, StepLog
from nanovllm.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(
    help="Run language models in this process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nanovllm {nanovllm.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run language models in this process."""
    del version  # its callback has done all there is to do


app.add_typer(bench_app, name="bench")
app.command()(report)
app.command()(top)

Model = Annotated[str, typer.Option(help="A folder, a .gguf file, a hub id, or smollm2-135m.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or int8.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")]
TopK = Annotated[int, typer.Option(help="Keep this many of the most likely tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")]
Seed = Annotated[int | None, typer.Option(help="Makes the answer reproducible.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text here; may be repeated.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None, typer.Option(help="A .txt (a prompt a line) or .jsonl file of prompts.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message.")
    ] = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end of the text.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    summary: Annotated[bool, typer.Option(help="End with a table of the run's figures.")] = False,
    telemetry: Annotated[
        Path | None, typer.Option(help="Record the run to this file, for `nanovllm report`.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Complete a prompt and print its text as it comes, or each prompt of a file."""
    with errors_as_lines(debug):
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        texts = _read_prompts(prompt, prompts)
        check_run_path(telemetry)
        start_s = time.perf_counter()
        steps = StepLog()
        with LLM(
            model, device=device, dtype=dtype, max_model_len=max_model_len, on_step=steps
        ) as llm:
            loaded_s = time.perf_counter()
            items: list[Any] = list(texts)
            if chat_template:
                items = [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
            with recorded(llm, telemetry):
                if len(items) == 1 and not as_json:
                    outputs = [_stream(llm, items[0], params)]
                else:
                    outputs = llm.generate(items, params)
            if len(items) > 1 or as_json:
                _print_outputs(texts, outputs, as_json=as_json)
            if summary:
                _show(RunSummary.of(outputs, steps, llm.stats(), load_s=loaded_s - start_s))
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            raise NanoVLLMError(f"{len(failed)} of {len(outputs)} prompts failed: {failed[0]}.")


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    debug: Debug = False,
) -> None:
    """Talk to a model. /reset forgets, /quit ends, Ctrl-C stops an answer."""
    with errors_as_lines(debug):
        # Delayed: only this command needs it.
        from nanovllm.chat_loop import run_chat

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
        )
        with LLM(model, device=device, dtype=dtype, max_model_len=max_model_len) as llm:
            run_chat(llm, params, system=system)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    verify_graphs: Annotated[
        bool,
        typer.Option(
            "--verify-graphs", help="Prove on the CPU that decode steps are safe as CUDA graphs."
        ),
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Whose decode step to verify; the built-in model's if unset.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Say what is here: devices, drivers, packages, kernels, and why each choice is made."""
    with errors_as_lines(debug):
        if model is not None and not verify_graphs:
            raise ConfigError(
                f"`--model` is {model!r}, but only `--verify-graphs` looks at a model; give both."
            )
        # Delayed: this loads torch.
        from nanovllm.doctor import examine, examine_graphs

        findings, is_well = examine_graphs(model) if verify_graphs else (examine(), True)
        if as_json:
            _print(json.dumps([attrs.asdict(finding) for finding in findings], indent=1))
        else:
            width = max(len(finding.what) for finding in findings)
            for finding in findings:
                _print(f"{finding.what:<{width}}  {finding.found}")
        if not is_well:
            raise NanoVLLMError("the decode step is not safe to replay")


def main() -> None:
    """Entry point of the `nanovllm` command."""
    app()


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """Print one answer as it comes."""
    deltas = llm.stream(prompt, params)
    try:
        for delta in deltas:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    finally:
        deltas.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    return deltas.output


def _print_outputs(texts: list[str], outputs: list[RequestOutput], *, as_json: bool) -> None:
    for text, output in zip(texts, outputs, strict=True):
        if as_json:
            _print(json.dumps({"prompt": text, **_as_data(output)}, ensure_ascii=False))
        else:
            _print(f"{output.text}\n")


def _as_data(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.outputs[0].stop_reason,
        "error": output.error,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_s": output.metrics.ttft_s,
        "mean_itl_s": output.metrics.mean_itl_s,
    }


def _read_prompts(prompt: str | None, path: Path | None) -> list[str]:
    """The prompts of an argument, of standard input, or of a file."""
    if (prompt is None) == (path is None):
        raise RequestError(
            "Give one of the two: a prompt (- reads standard input), or `--prompts` with a file."
        )
    if path is None:
        assert prompt is not None
        return [_read_stdin() if prompt == "-" else prompt]
    try:
        # "-sig": Windows' editors put a mark at the start. Newlines are translated to \n.
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"`--prompts` is {str(path)!r}, which can't be read: {error}") from error
    # Not splitlines, which also splits at marks that may stand inside a prompt, such as U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".jsonl":
        return [_prompt_of_line(number, line, path) for number, line in lines]
    return [line for _, line in lines]


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")  # which `echo` adds, and no prompt means
    except UnicodeDecodeError as error:
        raise RequestError(f"What came on standard input is no text: {error}.") from error


def _prompt_of_line(number: int, line: str, path: Path) -> str:
    """A line of a .jsonl file: a string, or an object with a `prompt`."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{path}, line {number} is not JSON: {error}") from error
    text = item.get("prompt") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise RequestError(
            f"{path}, line {number} is {line!r}; it must be a string or an object with a "
            "`prompt` string."
        )
    return text


def _print(text: str) -> None:
    typer.echo(text)


def _show(summary: RunSummary) -> None:
    # Delayed: only needed when somebody asked for the table.
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in summary.rows():
        table.add_row(name, value)
    Console(stderr=True).print(table)
