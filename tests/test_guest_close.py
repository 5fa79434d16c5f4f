"""An engine that ends gives everything back, however it ends, and says nothing about it."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from nanovllm import LLM, AsyncLLM, ConfigError, NanoVLLMError
from tests.checkpoints import checkpoint_folder
from tests.engines import greedy, is_idle, random_prompts

ROOT = Path(__file__).parents[1]

OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}


def make(maker=LLM, **options):
    return maker(checkpoint_folder("llama"), **{"num_kvcache_blocks": 64, **OPTIONS, **options})


ENDS = """
import asyncio, os, sys, threading, time
import torch
from nanovllm import LLM, AsyncLLM, SamplingParams, build

build.QUIET_S = 1e9  # a slow machine is told what takes so long
folder, out = sys.argv[1:]
options = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, num_kvcache_blocks=64)
long = SamplingParams(max_tokens=200, ignore_eos=True)


async def first_delta(llm):
    asyncio.get_running_loop().slow_callback_duration = 60  # a slow machine is no news here
    async for delta in llm.stream([1, 2, 3], long):
        return delta


def never_closed():
    global llm, stream
    llm = LLM(folder, **options)
    stream = llm.stream([1, 2, 3], long)
    next(stream)

def never_closed_in_a_cycle():
    llm = LLM(folder, attention_backend="torch", **options)
    cycle = [llm, llm.stream([1, 2, 3], long)]
    cycle.append(cycle)

def deleted():
    llm = LLM(folder, **options)
    llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
    del llm

def async_never_closed():
    global llm
    llm = AsyncLLM(folder, **options)
    assert asyncio.run(first_delta(llm)).token_ids

def async_in_the_middle_of_a_request():
    global llm
    llm = AsyncLLM(folder, attention_backend="torch", **options)
    def ask():
        asyncio.run(llm.generate([[1, 2, 3]] * 8, long))
    threading.Thread(target=ask, daemon=True).start()
    while not llm.stats().num_generated_tokens:
        time.sleep(0.001)

def failed():
    global error
    try:
        AsyncLLM(folder, max_model_len=10**6, **options)
    except ValueError as caught:
        error = caught

def left_by_an_exit():
    global llm
    llm = LLM(folder, **options)
    llm.add_request([1, 2, 3], long)
    llm.step()
    sys.exit(0)

SCENARIOS = [never_closed, never_closed_in_a_cycle, deleted, async_never_closed,
             async_in_the_middle_of_a_request, failed, left_by_an_exit]
# Children have torch loaded already; each ends by itself, as a program does.
for scenario in SCENARIOS:
    pid = os.fork()
    if pid == 0:
        file = os.open(f"{out}/{scenario.__name__}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        scenario()
        break
    print(scenario.__name__, os.waitpid(pid, 0)[1], flush=True)
"""


def test_a_program_that_ends_without_closing_ends_without_a_word(tmp_path):
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-X",
            "dev",
            "-c",
            ENDS,
            checkpoint_folder("llama"),
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )

    assert run.stderr == ""
    ended = dict(line.split() for line in run.stdout.splitlines())
    assert len(ended) == 7
    assert set(ended.values()) == {"0"}, ended
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(ended, "")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files():
    return len(os.listdir("/proc/self/fd"))


def num_threads():
    return len(os.listdir("/proc/self/task"))


TOLERANCE_BYTES = 6 << 20
"""Three engines' worth of what is looked for is twice that: each fills 4 MiB of K/V cache."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
# Not torch in a thread of its own: OpenMP gives each such thread helpers of its own, and what the
# allocator keeps for threads that have ended goes up and down by more than is looked for. That such
# an engine holds on to nothing is seen below.
@pytest.mark.parametrize(
    ("maker", "backend"), [(LLM, "native"), (LLM, "torch"), (AsyncLLM, "native")]
)
def test_engines_that_come_and_go_leave_memory_threads_and_files_as_they_were(maker, backend):
    if backend == "native":
        pytest.importorskip("numba")
    prompts = [[index] * 250 for index in range(1, 9)]  # 2,000 positions of 2 KiB

    def cycle():
        llm = make(maker, num_kvcache_blocks=2048, attention_backend=backend)
        answers = llm.generate(prompts, greedy(2))
        if maker is AsyncLLM:
            answers = asyncio.run(answers)
        assert {answer.finish_reason for answer in answers} == {"length"}
        llm.close()
        return llm

    kept = [cycle(), cycle()]  # closed ones that somebody still holds
    gc.collect()
    before = resident_bytes(), open_files(), num_threads()
    kept += [cycle() for _ in range(3)]
    gc.collect()
    after = resident_bytes(), open_files(), num_threads()

    assert after[0] - before[0] < TOLERANCE_BYTES
    assert after[1:] == before[1:]


@pytest.mark.parametrize("maker", [LLM, AsyncLLM])
def test_a_closed_engine_keeps_no_weights_and_no_cache_although_it_is_held(maker):
    llm = make(maker, attention_backend="torch")
    executor = llm._engine._loop.executor
    gone = [weakref.ref(executor._decoder), weakref.ref(executor._kv_cache)]
    del executor
    llm.close()
    gc.collect()

    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("maker", [LLM, AsyncLLM])
def test_an_engine_is_closed_any_number_of_times_from_any_thread(maker):
    llm = make(maker)
    closers = [threading.Thread(target=llm.close) for _ in range(4)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    llm.close()

    assert is_idle(llm)
    assert llm.stats().num_running == 0


def test_what_is_left_of_a_closed_engine_says_so():
    llm = make()
    stream = llm.stream([1, 2, 3], greedy(50))
    next(stream)
    llm.close()

    assert [delta.finish_reason for delta in stream] == ["abort"]
    assert llm.step() == []
    assert not llm.has_unfinished_requests()
    with pytest.raises(NanoVLLMError, match="closed"):
        llm.generate([1], greedy(1))
    assert llm.reset_prefix_cache() is None
    stream.close()


def test_an_async_engine_that_is_dropped_ends_its_thread():
    llm = make(AsyncLLM)
    thread = llm._thread._thread
    asyncio.run(llm.generate(random_prompts(2), greedy(3)))
    del llm
    gc.collect()
    thread.join(30)

    assert not thread.is_alive()


class Careful(LLM):
    """Closes itself if it can't be made."""

    def __init__(self, *args, **options):
        try:
            super().__init__(*args, **options)
        except ConfigError:
            self.close()
            raise


def test_an_engine_that_could_not_be_made_can_be_closed_and_leaves_no_thread():
    before = threading.enumerate()
    for options in ({"max_num_seqs": 0}, {"max_model_len": 10**6}, {"kv_cache_bytes": 1}):
        with pytest.raises(ConfigError):
            make(Careful, **{"num_kvcache_blocks": None, **options})

    assert threading.enumerate() == before
