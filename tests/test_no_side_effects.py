"""The engine is a guest: what it finds in its host's process is there, as it was, when it has gone.

Two hosts, each in a process of its own. One has torch, transformers and its own settings before the
engine comes; the other has nothing, and all that is loaded is loaded by the engine. A snapshot of
what belongs to the process is taken before and after each thing that an app does with an engine,
the things that go wrong included.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_folder import tiny_model_folder

ROOT = Path(__file__).parents[1]

HOST = """
import asyncio, gc, hashlib, json, locale, logging, multiprocessing, os, random, resource, signal
import sys, threading, warnings
from pathlib import Path

import psutil

folder, broken, host = sys.argv[1:]
if host == "settled":
    import numpy, torch, transformers
    from transformers import LlamaConfig
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(3); numpy.random.seed(4); random.seed(5)
    numpy.seterr(under="raise")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("nanovllm").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    multiprocessing.set_start_method("forkserver")
    gc.set_threshold(500, 5, 5)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    caller_config = LlamaConfig(num_hidden_layers=3, rope_parameters={
        "rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    torch.ones(64, 64) @ torch.ones(64, 64)
warnings.filterwarnings("error", message="of the host")


def digest(data):
    return hashlib.sha256(bytes(data)).hexdigest()[:12]


def umask():
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def logger_settings():
    root, found = logging.getLogger(), {}
    names = [n for n, l in logging.root.manager.loggerDict.items() if isinstance(l, logging.Logger)]
    for logger in (root, *map(logging.getLogger, sorted(names))):
        handlers = [repr(h) for h in logger.handlers if not isinstance(h, logging.NullHandler)]
        if logger is root or logger.level or handlers or not logger.propagate or logger.disabled:
            found[logger.name] = [logger.level, handlers, logger.propagate, logger.disabled]
    return {"loggers": found, "disabled": logging.root.manager.disable,
            "class": repr(logging.getLoggerClass()), "factory": repr(logging.getLogRecordFactory())}


def snapshot():
    process = psutil.Process()
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{fd}")] if os.path.isdir("/proc/self/fd") else []
    found = {
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "umask": umask(),
        "signals": {int(s): repr(signal.getsignal(s)) for s in signal.valid_signals()},
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), repr(gc.callbacks)],
        "locale": locale.setlocale(locale.LC_ALL),
        "path": list(sys.path), "flags": [sys.flags.dev_mode, sys.dont_write_bytecode],
        "hooks": list(map(repr, (sys.excepthook, threading.excepthook, sys.unraisablehook,
            sys.displayhook, sys.gettrace(), sys.getprofile(), warnings.showwarning, sys.stdout,
            sys.stderr, sys.breakpointhook))),
        "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(),
                        threading.stack_size(), sys.get_int_max_str_digits()],
        "loop": repr(type(asyncio.get_event_loop_policy())),
        "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource)
                   if n.startswith("RLIMIT_")],
        "cpus": [sorted(process.cpu_affinity()), process.nice()],
        "children": [child.pid for child in process.children(recursive=True)],
        "sockets": sorted(link for link in links if link.startswith("socket:")),
        "random": digest(repr(random.getstate()).encode()),
    }
    if host == "settled":
        found |= {
            "logging": logger_settings(),
            "warnings": list(map(repr, warnings.filters)),
            "torch": list(map(repr, (torch.get_default_dtype(), torch.get_default_device(),
                torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(), torch.is_autocast_enabled(),
                torch._C._get_mkldnn_enabled()))),
            "torch random": digest(torch.random.get_rng_state().numpy()),
            "numpy random": digest(repr(numpy.random.get_state()).encode()),
            "numpy": [numpy.geterr(), numpy.get_printoptions()],
            "process group": torch.distributed.is_available()
            and torch.distributed.is_initialized(),
            "transformers config": [caller_config.to_dict(), LlamaConfig().to_dict()],
            "transformers": [transformers.logging.get_verbosity(),
                             transformers.logging.is_progress_bar_enabled()],
        }
    return json.loads(json.dumps(found, default=str))


def tell(what):
    gc.collect()
    now = snapshot()
    changes = {k: [before[k], now[k]] for k in now if now[k] != before[k]}
    print(json.dumps([what, changes]), flush=True)


def threads():
    return sorted(thread.name for thread in threading.enumerate())


def fails(what, make):
    try:
        make()
    except (ValueError, TypeError):
        tell(what)
    else:
        print(json.dumps([what, "it did not fail"]))


before, threads_before = snapshot(), threads()
from nanovllm import LLM, AsyncLLM, SamplingParams
tell("import")
from nanovllm import build
build.QUIET_S = 1e9  # a slow machine is told what takes so long

options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}
params = SamplingParams(temperature=0.8, max_tokens=6)
for maker in (LLM, AsyncLLM):
    fails("no such model", lambda: maker("/no/such/model"))
    fails("no such option", lambda: maker(folder, max_seqs=1))
    fails("an option that can't work", lambda: maker(folder, max_model_len=10**6, **options))
    fails("broken weights", lambda: maker(broken, **options))
    fails("too big a cache", lambda: maker(folder, device="cpu", num_kvcache_blocks=10**15))

llm = LLM(folder, **options)
tell("construct")
llm.generate(["one", "two"], params)
tell("generate")
llm.chat([{"role": "user", "content": "walk"}], params)
tell("chat")
stream = llm.stream("three", params)
next(stream)
tell("stream")
stream.close()
try:
    llm.generate([[1], []])
except ValueError:
    tell("a bad prompt")
llm.close(), llm.close()
tell("close")


async def use():
    async with AsyncLLM(folder, attention_backend="torch", freeze_gc=True, **options) as llm:
        await llm.generate("four", params)
        async for delta in llm.stream("five", params):
            break
        llm.describe(), llm.stats(), await llm.preview("six", params)

policy = asyncio.get_event_loop_policy()
asyncio.run(use())
tell("async")

elsewhere = []
def work():
    with LLM(folder, **options) as llm:
        elsewhere.extend(llm.generate("seven", params)[0].token_ids)
thread = threading.Thread(target=work)
thread.start(), thread.join()
tell("another thread" if len(elsewhere) else "nothing came from the other thread")

class Careful(LLM):
    def __init__(self, *args, **kwargs):
        try:
            super().__init__(*args, **kwargs)
        finally:
            self.close()
fails("close after a failed construction", lambda: Careful(broken, **options))
print(json.dumps(["threads", threads_before == threads()]))

# What the snapshots would have seen.
random.random(), os.environ.update(GUEST="1"), os.chdir("/"), gc.freeze(), sys.path.append("guest")
signal.signal(signal.SIGTERM, lambda *_: None)
sys.excepthook = print
if host == "settled":
    torch.rand(1), torch.set_grad_enabled(False), numpy.random.rand(), logging.basicConfig()
    logging.getLogger("guest").setLevel(1), warnings.simplefilter("ignore")
listener = __import__("socket").create_server(("127.0.0.1", 0))
child = __import__("subprocess").Popen(["sleep", "9"])
tell("seen")
child.kill(), child.wait()
"""

SEEN = {"random", "environment", "working folder", "gc", "path", "signals", "hooks"}
SEEN |= {"sockets", "children"}
SEEN_WHEN_SETTLED = {"torch", "torch random", "numpy random", "logging", "warnings"}

STAGES = [
    "import",
    *[
        "no such model",
        "no such option",
        "an option that can't work",
        "broken weights",
        "too big a cache",
    ]
    * 2,
    "construct",
    "generate",
    "chat",
    "stream",
    "a bad prompt",
    "close",
    "async",
    "another thread",
    "close after a failed construction",
]


@pytest.fixture(scope="module")
def broken_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_model_folder(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


@pytest.mark.parametrize("host", ["settled", "empty"])
def test_nothing_of_the_host_is_changed_at_any_time(host, broken_folder):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", HOST, tiny_model_folder(), broken_folder, host],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert run.stderr == ""
    *told, (last, threads_are_as_before), (_, seen) = map(json.loads, run.stdout.splitlines())
    assert {stage: changes for stage, changes in told if changes} == {}
    assert [stage for stage, _ in told] == STAGES
    assert last == "threads" and threads_are_as_before
    assert set(seen) == SEEN | (SEEN_WHEN_SETTLED if host == "settled" else set())
