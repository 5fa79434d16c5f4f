"""Kernels that begin before the one before them has ended: what they do until then.

Nothing here runs. The rules of `nanovllm.kernels.triton.overlap` are read off each kernel's code
for a device that can do it; a kernel that breaks one gives wrong tokens once in a while there, and
nowhere else.
"""

import re

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed", exc_type=ImportError)

from nanovllm.kernels.triton import few_linear, norm, row_linear, steps  # noqa: E402
from nanovllm.kernels.triton.aot import compile_for  # noqa: E402
from nanovllm.kernels.triton.launch import Launch  # noqa: E402
from nanovllm.kernels.triton.shapes import SHAPES, step_launches  # noqa: E402
from tests.kernels.faults import with_fault  # noqa: E402

WAIT = "griddepcontrol.wait"
ANNOUNCE = "griddepcontrol.launch_dependents"
EARLY = {"_row_linear": {"weight"}, "_few_linear": {"weight"}}
"""What may be read before the wait."""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def early_accesses(compiled):
    """What stands before the wait: names of the pointers that are read, and whether any is written.

    Registers carry the names of the arguments that they are computed from.
    """
    names = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    text = compiled.asm["ptx"]
    before = text[text.index("{", text.index(".entry")) :].split(WAIT)[0]
    origins, read, writes = {}, set(), []
    for line in before.splitlines():
        parameter = re.search(r"ld\.param\.\w+(?:\.\w+)*\s+(%\w+), \[\w+_param_(\d+)\]", line)
        if parameter:
            place = int(parameter[2])
            is_ours = place < len(names)  # Triton adds some of its own at the end
            origins[parameter[1]] = {names[place]} if is_ours else set()
            continue
        registers = re.findall(r"%\w+", line)
        if re.search(r"\b(st|red|atom)\.global", line):
            writes.append(line.strip())
        if "ld.global" in line:
            (address,) = re.findall(r"\[\s*(%\w+)", line)
            read |= {
                name for name in origins.get(address, {"unknown"}) if is_pointer(compiled, name)
            }
        elif registers:
            target, *sources = registers
            found = set().union(*(origins.get(source, set()) for source in sources))
            origins[target] = origins.get(target, set()) | found
    return read, writes


def is_pointer(compiled, name):
    return name == "unknown" or compiled.src.signature[name].startswith("*")


def breaches(launch):
    """Rules that a kernel breaks on a Hopper."""
    compiled = compile_for(launch, 90)
    text = compiled.asm["ptx"]
    if text.count(WAIT) != 1 or text.count(ANNOUNCE) != 1:
        return [f"{text.count(WAIT)} waits, {text.count(ANNOUNCE)} announcements"]
    read, writes = early_accesses(compiled)
    found = [f"reads {name} early" for name in read - EARLY.get(launch.kernel.name, set())]
    # A wait that a program may jump over would be none.
    is_skipped = re.search(r"^\s*@%p\d+ bra", text[: text.index(WAIT)], re.M)
    return found + writes + (["may skip the wait"] if is_skipped else [])


def launches():
    by_kind = {}
    for shape in SHAPES:
        for launch in step_launches(shape, num_splits=[1, 8]):
            given = launch.arguments
            kind = (launch.kernel.name, given.get("NORMS"), given.get("GATES"), given.get("SPLITS"))
            by_kind[kind] = launch  # of the last shape
    return by_kind


LAUNCHES = launches()


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=[str(kind) for kind in LAUNCHES])
def test_until_the_kernels_before_have_ended_only_weights_are_read(launch):
    assert breaches(launch) == []


@pytest.mark.parametrize("name", EARLY)
def test_weights_are_on_their_way_before_the_wait(name):
    launch = next(launch for kind, launch in LAUNCHES.items() if kind[0] == name)
    read, _ = early_accesses(compile_for(launch, 90))

    assert read == {"weight"}


@pytest.mark.parametrize("arch", [80, 89])
def test_devices_that_can_not_overlap_are_not_asked_to(arch):
    launch = next(iter(LAUNCHES.values()))
    compiled = compile_for(launch, arch)

    assert "griddepcontrol" not in compiled.asm["ptx"]


FAULTS = {
    "no wait": (norm, "RMS_NORM", ("    begin(OVERLAPS)\n", "")),
    "the wait comes late": (
        steps,
        "KEEP_TOKENS",
        (
            "    begin(OVERLAPS)\n    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
            "    inside = rows < count\n    token = tl.load(token_ids",
            "    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
            "    inside = rows < count\n"
            "    early = tl.load(token_ids + rows, mask=inside, other=0)\n"
            "    begin(OVERLAPS)\n    tl.store(kept + rows, early, mask=rows < 0)\n"
            "    token = tl.load(token_ids",
        ),
    ),
    "the row is read early": (
        row_linear,
        "ROW_LINEAR",
        (
            "    wait_for_previous(OVERLAPS)\n\n    scale = 1.0\n",
            "    eps += tl.load(x).to(tl.float32)\n    wait_for_previous(OVERLAPS)\n\n"
            "    scale = 1.0\n",
        ),
    ),
    "only some wait": (
        few_linear,
        "FEW_LINEAR",
        (
            "    wait_for_previous(OVERLAPS)\n",
            "    if count > 1:\n        wait_for_previous(OVERLAPS)\n",
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_does_not_wait_is_seen(name, tmp_path):
    module, kernel, fault = FAULTS[name]
    faulty = getattr(with_fault(module, tmp_path, fault), kernel)
    sound = next(launch for kind, launch in LAUNCHES.items() if kind[0] == faulty.name)

    assert breaches(Launch(faulty, sound.grid, sound.arguments))
