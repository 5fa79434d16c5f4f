"""A decode program over a paged cache, small enough to read, with every fault it could have.

One layer, one head, random weights. Written as a program for graphs must be: inputs and outputs in
static buffers, padding rows that store nothing, values masked by `where`. Each member of `Fault`
spoils it in one way that has happened to an engine in the field.
"""

from contextlib import contextmanager
from enum import Enum, auto

import torch

from graphs import ZERO, Column, Fill, GraphKey, Scalar, StepBuffer, StepLayout, Table, plan_buckets
from graphs.churn import churn
from graphs.verify import VerifyStep, verify

NUM_PAGES, PAGE_SIZE, MAX_LEN, MAX_ROWS = 24, 3, 9, 6
SCRATCH_PAGE, CANARY_PAGE = 0, NUM_PAGES - 1
FIRST_PAGE = 1
MAX_PAGES = 4  # one more than MAX_LEN needs, so that a row's table is wider than what it uses
WIDTH, VOCABULARY = 16, 61

PLAN = plan_buckets(MAX_ROWS, sizes=[1, 2, 4, 6])
KEYS = [GraphKey(size) for size in PLAN.sizes]
LAYOUT = StepLayout(
    MAX_ROWS,
    (Scalar("step"),),
    (
        Column("source", Fill(-1)),
        Column("token", ZERO),
        Column("position", ZERO),
        Column("length", ZERO),
        Column("seed", ZERO),
        Column("temperature", Fill(1.0), "float32"),
    ),
    Table("pages", MAX_PAGES, Fill(SCRATCH_PAGE)),
)


class Fault(Enum):
    """What can be wrong; the comment is the number in the list of pitfalls."""

    STALE_PAD_ROWS = auto()  # 3
    STALE_TABLE_COLUMNS = auto()  # 4
    SLOT_AS_INDEX = auto()  # 5
    PADS_REACH_SHARED_STATE = auto()  # 6
    OUTPUT_IN_POOL = auto()  # 7
    TENSOR_RETURNED = auto()  # 7
    BRANCH_ON_VALUE = auto()  # 8
    LIST_OF_VALUES = auto()  # 8
    BOOLEAN_INDEX = auto()  # 9
    HOST_CONSTANT = auto()  # 10
    EXTERNAL_TENSOR = auto()  # 11
    STATIC_REPLACED = auto()  # 12
    LENGTH_AT_CAPTURE = auto()  # 14
    TABLE_READ_AS_DENSE = auto()  # 22
    TORCH_RNG = auto()  # 23
    NOISE_BY_ROW = auto()  # 23
    TAIL_NOT_WRITTEN = auto()  # 31
    VALUES_NOT_MASKED = auto()  # 32
    UNSET_MEMORY = auto()  # no pitfall: reads what `empty` happened to hold


@torch.library.custom_op("graphs_toy::store", mutates_args=("cache",))
def store(entries: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write `[B, E]` entries to their `[B]` slots; a negative slot drops its row."""
    kept = slots >= 0  # inside an operation a boolean mask is the kernel's own business
    cache.view(-1, cache.shape[-1])[slots[kept]] = entries[kept]


@store.register_fake
def _(entries, cache, slots):
    return None


class ToyWorld:
    """Buffers, cache and weights of one toy engine (see `graphs.verify.World`)."""

    def __init__(self, *faults, device="cpu"):
        self.faults = frozenset(faults)
        draw = torch.Generator().manual_seed(3)
        self.weights = {
            name: (torch.randn(*shape, generator=draw) / 4).to(device)  # 4: the root of WIDTH
            for name, shape in {
                "embedding": (VOCABULARY, WIDTH),
                "query": (WIDTH, WIDTH),
                "key": (WIDTH, WIDTH),
                "value": (WIDTH, WIDTH),
                "head": (WIDTH, VOCABULARY),
            }.items()
        }
        self.device = torch.device(device)
        self.staging = torch.zeros(LAYOUT.num_words(), dtype=torch.int32, device=device)
        self.tokens = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(MAX_ROWS, device=device)
        # [N, P, 2 * E]: keys and values of a token side by side.
        self.cache = torch.zeros(NUM_PAGES, PAGE_SIZE, 2 * WIDTH, device=device)
        self.not_named = torch.ones(WIDTH, device=device)
        self.buffer = ForgetfulBuffer(self.faults)
        self.longest = 1
        self.kept = None

    def named_tensors(self):
        names = {"staging": self.staging, "tokens": self.tokens, "logprobs": self.logprobs}
        return {**names, "cache": self.cache, **self.weights}

    def inputs(self):
        return {"staging": self.staging}

    def outputs(self):
        return {"tokens": self.tokens, "logprobs": self.logprobs}

    def caches(self):
        return {"cache": self.cache}

    def reset(self, key):
        self.fill(key, 0, no_rows())

    def fill(self, key, num_rows, inputs):
        self.longest = max([1, *inputs["length"].tolist()])
        self.buffer.pack(num_rows, inputs)
        if Fault.TAIL_NOT_WRITTEN in self.faults:
            views = LAYOUT.torch_views(self.staging, max(1, num_rows))
            for name, view in LAYOUT.numpy_views(self.buffer.vector, max(1, num_rows)).items():
                views[name].copy_(torch.from_numpy(view))
            return
        num_words = LAYOUT.num_words(key.bucket)
        self.staging[:num_words] = torch.from_numpy(self.buffer.vector[:num_words])

    def program(self, key):
        return lambda: decode(self, LAYOUT.torch_views(self.staging, key.bucket))


class ForgetfulBuffer(StepBuffer):
    """A buffer that can be told to forget what it must clear."""

    def __init__(self, faults):
        super().__init__(LAYOUT)
        self.faults = faults

    def pack(self, num_rows, values):
        if Fault.STALE_PAD_ROWS in self.faults:
            self._num_dirty_rows = 0
        if Fault.STALE_TABLE_COLUMNS in self.faults:
            self._num_dirty_columns = 0
        super().pack(num_rows, values)


def decode(world, inputs):
    """One step: gather tokens, store K/V, attend over pages, sample."""
    faults, weights = world.faults, world.weights
    num_rows = len(inputs["token"])
    position, length, table = (inputs[name].long() for name in ("position", "length", "pages"))
    source = inputs["source"].long()
    token = torch.where(source >= 0, world.tokens[source.clamp(min=0)], inputs["token"].long())

    hidden = weights["embedding"][token]
    if Fault.EXTERNAL_TENSOR in faults:
        hidden = hidden * world.not_named
    if Fault.HOST_CONSTANT in faults:
        hidden = hidden * torch.tensor([1.0], device=world.device)
    if Fault.UNSET_MEMORY in faults:
        hidden = hidden + torch.empty_like(hidden) * 0

    page = table.gather(1, (position // PAGE_SIZE)[:, None])[:, 0]
    slot = page * PAGE_SIZE + position % PAGE_SIZE
    slot = torch.where(length > 0, slot, -1)
    entries = torch.cat([hidden @ weights["key"], hidden @ weights["value"]], dim=1)
    if Fault.SLOT_AS_INDEX in faults:
        world.cache.view(-1, 2 * WIDTH)[slot] = entries
    elif Fault.BOOLEAN_INDEX in faults:
        world.cache.view(-1, 2 * WIDTH)[slot[slot >= 0]] = entries[slot >= 0]
    else:
        store(entries, world.cache, slot)

    if Fault.TABLE_READ_AS_DENSE in faults:
        used = table[:, : MAX_PAGES - 1]
        table = used.as_strided(used.shape, (used.shape[1], 1))
    hidden = hidden + attend(world, hidden @ weights["query"], table, length)
    if Fault.PADS_REACH_SHARED_STATE in faults:
        hidden = hidden / hidden.abs().amax()
    if Fault.BRANCH_ON_VALUE in faults and int(length.max()) > 2:
        hidden = hidden + 1.0
    if Fault.LIST_OF_VALUES in faults and 3 in length.tolist():
        hidden = hidden + 1.0
    sample(world, inputs, num_rows, hidden @ weights["head"])
    return world.kept if Fault.TENSOR_RETURNED in faults else None


def attend(world, query, table, length):
    """Attention of `[B, E]` queries over all pages of their tables."""
    entries = world.cache[table].flatten(1, 2)  # [B, M * P, 2 * E]
    if Fault.LENGTH_AT_CAPTURE in world.faults:
        entries = entries[:, : world.longest]
    keys, values = entries.split(WIDTH, dim=2)
    is_past = torch.arange(keys.shape[1], device=query.device) < length[:, None]
    scores = (keys * query[:, None]).sum(2).masked_fill(~is_past, float("-inf"))
    shares = scores.softmax(1)
    if Fault.PADS_REACH_SHARED_STATE not in world.faults:
        shares = torch.where(is_past, shares, 0.0)  # a row of length 0 has only NaN otherwise
    if Fault.VALUES_NOT_MASKED not in world.faults:
        values = torch.where(is_past[:, :, None], values, 0.0)  # 0 * NaN is NaN
    return (shares[:, :, None] * values).sum(1)


def sample(world, inputs, num_rows, logits):
    """Draw tokens with noise that depends on seed and position only."""
    column = torch.arange(VOCABULARY, device=logits.device)
    counter = inputs["seed"].long()[:, None] * 7919 + inputs["position"].long()[:, None] * 104729
    if Fault.NOISE_BY_ROW in world.faults:
        counter = counter + torch.arange(num_rows, device=logits.device)[:, None] * 613
    noise = torch.sin(((counter + column) % 9973).float() * 12.9898) * 43758.5453
    noise = noise - noise.floor()
    if Fault.TORCH_RNG in world.faults:
        noise = torch.rand_like(noise)
    logits = logits + 4.0 * noise * inputs["temperature"][:, None]
    tokens = logits.argmax(1)
    logprobs = logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    if Fault.OUTPUT_IN_POOL in world.faults:
        world.logprobs = logprobs
    elif Fault.STATIC_REPLACED in world.faults:
        world.logprobs = torch.zeros(MAX_ROWS, device=logits.device)
        world.logprobs[:num_rows].copy_(logprobs)
    else:
        world.logprobs[:num_rows].copy_(logprobs)
    world.tokens[:num_rows].copy_(tokens)
    if Fault.TENSOR_RETURNED in world.faults:
        world.kept = logprobs


def no_rows():
    """The inputs of a step without live rows."""
    return step_inputs(())


def step_inputs(rows, step=0):
    """What `LAYOUT` packs for these rows of a churn step."""
    num_pages = max((len(row.pages) for row in rows), default=0)
    pages = torch.full((len(rows), num_pages), SCRATCH_PAGE, dtype=torch.int32)
    for index, row in enumerate(rows):
        pages[index, : len(row.pages)] = torch.tensor(row.pages) + FIRST_PAGE
    columns = {
        "source": [-1 if row.previous_row is None else row.previous_row for row in rows],
        "token": [row.request % VOCABULARY for row in rows],
        "position": [row.position for row in rows],
        "length": [row.position + 1 for row in rows],  # +1: its own token counts
        "seed": [row.request for row in rows],
    }
    ints = {name: torch.tensor(column, dtype=torch.int32) for name, column in columns.items()}
    inputs = {name: column.numpy() for name, column in ints.items()}
    temperature = torch.ones(len(rows)).numpy()
    return {**inputs, "step": step, "temperature": temperature, "pages": pages.numpy()}


def schedule(num_steps=40, seed=0):
    """A churn of the toy's size, for `verify`."""
    usable_pages = NUM_PAGES - FIRST_PAGE - 1  # -1: the canary
    for index, step in enumerate(
        churn(
            num_steps=num_steps,
            max_rows=MAX_ROWS,
            page_size=PAGE_SIZE,
            num_pages=usable_pages,
            max_len=MAX_LEN,
            seed=seed,
        )
    ):
        yield VerifyStep(
            GraphKey(PLAN.bucket_for(len(step.rows))),
            len(step.rows),
            step_inputs(step.rows, index),
            [page + FIRST_PAGE for page in step.freed_pages],
        )


def verify_toy(*faults, num_steps=24, seed=0, scratch_pages=(SCRATCH_PAGE,), steps=None):
    """Verify the toy with these faults over a churn."""
    with one_thread():
        return verify(
            lambda: ToyWorld(*faults),
            KEYS,
            schedule(num_steps, seed) if steps is None else steps,
            canary_pages=(CANARY_PAGE,),
            scratch_pages=scratch_pages,
        )


@contextmanager
def one_thread():
    """Keep torch from splitting tensors this small: threads that wait cost more than the work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
