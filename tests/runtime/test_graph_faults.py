"""Faults put into the decode step, each of which the verification of `verify_graphs` must find.

What is covered here, by the number of the pitfall; where a test stands elsewhere, its file:

     2  block table one column short            TestSizes
     3  stale padding rows                      [stale padding rows]
     4  stale columns of a block table          TestStaleColumns
     5  a slot of -1 used as an index           [slot of -1 as index], [padding has slots]
     6  padding that reaches shared state       [padding reaches live rows]
     7  outputs left in the shared pool         [logits stay in the pool]
     8  Python branches on device values        [branch on a length], [list of lengths]
     9  shapes made of device values            [boolean index]
    10  host constants                          [host constant]
    11  tensors that are not static             [table of cosines not named]
    12  static buffers that are replaced        [cache replaced], [tokens replaced]
    14  plans made of live lengths              [splits of live lengths], [longest at capture]
    22  bucket views read as dense              [table read as dense]
    23  random draws                            [torch draws], [draws depend on the row]
    31  metadata for live rows only             [tail not written]
    32  NaN of a freed block times 0            [values not masked]
     -  the other half of the tokens            [writes to the other half], [reads the other half]
     -  failed rows                             TestFailedRows
     -  the arithmetic of the step              [positions off by one], [rows in place of slots]

13 (staging refilled in flight) is in `test_staging.py`. The others are the library's, listed in
`tests/graphs/test_pitfalls.py`, the kernels' or the host loop's.

A fault is made of the program's own source, by replacing one piece of it: when the program changes
so that the piece is gone, the test says so.
"""

import inspect
from types import SimpleNamespace

import attrs
import pytest
import torch

from graphs import LayoutError
from graphs.findings import FindingKind
from graphs.verdict import MismatchKind
from nanovllm.kernels import step_ops
from nanovllm.kernels.reference import steps as reference_steps
from nanovllm.runtime import decode_program as program_module
from nanovllm.runtime import fused_decoder as fused_module
from nanovllm.runtime.captured_steps import VARIANTS
from nanovllm.runtime.decode_program import decode_program
from nanovllm.runtime.verify_graphs import attention_for, decode_schedule, verify_world
from nanovllm.runtime.verify_model import random_decoder, small_config
from nanovllm.runtime.verify_worlds import CapturedWorld, Geometry, PlainWorld
from tests.graphs.toy import Fault as BufferFault
from tests.graphs.toy import ForgetfulBuffer
from tests.runtime.decoders import plain_decoder
from tests.runtime.sampling_rows import leave_the_cores_to_others

GEOMETRY = Geometry(sizes=(2, 5))
NUM_STEPS = 12

one_thread = pytest.fixture(autouse=True, scope="module")(leave_the_cores_to_others)


def with_pieces_replaced(module, *pieces, **names):
    """`make_program` from a module's source with pieces of it replaced.

    Args:
        module: The module.
        *pieces: Of (piece, replacement).
        **names: Other globals that the replacements use.
    """
    source = inspect.getsource(module)
    for piece, replacement in pieces:
        assert source.count(piece) == 1, f"{piece!r} is there {source.count(piece)} times"
        source = source.replace(piece, replacement)
    changed = {"__name__": f"{module.__name__} with a fault", **names}
    exec(compile(source, f"{module.__file__} with a fault", "exec"), changed)
    return changed


def faulty_program(*pieces, **names):
    return with_pieces_replaced(program_module, *pieces, **names)["decode_program"]


def captured(name="qwen3", make_program=decode_program, world=CapturedWorld, attention=None):
    decoder = plain_decoder(name)
    attention = attention or attention_for(decoder.config, GEOMETRY)
    return world(decoder, attention, GEOMETRY, make_program)


def report_on(make_world, *, name="qwen3", num_steps=NUM_STEPS):
    decoder = plain_decoder(name)
    steps = decode_schedule(GEOMETRY, decoder.config.vocab_size, num_steps=num_steps, seed=0)
    return verify_world(make_world, lambda: PlainWorld(decoder, GEOMETRY), steps, GEOMETRY)


OUTPUT, CACHE = MismatchKind.OUTPUT, MismatchKind.CACHE
NOT_FINITE, CANARY, RAISED = MismatchKind.NOT_FINITE, MismatchKind.CANARY, MismatchKind.RAISED

LENS = 'inputs["context_len"]'
HIDDEN = "hidden = fused.hidden(token_ids, positions, slots, attend)"
NUMBER = 'number = ops.uniform(columns["seed_low"], columns["seed_high"], position)'
TOKENS = 'ops.keep_tokens(drawn, peak, inputs["out_offset"], statics.tokens)'
SOURCE = 'inputs["source"],'

PROGRAM_FAULTS = {
    "slot of -1 as index": (
        (HIDDEN, f"slots = slots % fused.kv_cache.shape[2]; {HIDDEN}"),
        {CANARY},
    ),
    "padding reaches live rows": (
        (HIDDEN, HIDDEN + "; hidden = hidden / hidden.abs().amax()"),
        {OUTPUT, NOT_FINITE},
    ),
    "branch on a length": (
        (HIDDEN, f"{HIDDEN}; hidden = hidden * (int({LENS}.max()) < 99)"),
        {FindingKind.HOST_SYNC},
    ),
    "list of lengths": (
        (HIDDEN, f"{HIDDEN}; hidden = hidden * (99 not in {LENS}.tolist())"),
        {FindingKind.HOST_SYNC},
    ),
    "boolean index": (
        (HIDDEN, f"{HIDDEN}; hidden = hidden[{LENS} > 0]"),
        {FindingKind.DYNAMIC_SHAPE},
    ),
    "host constant": (
        (HIDDEN, f"slots = slots.maximum(torch.tensor(-1, dtype=torch.int32)); {HIDDEN}"),
        {FindingKind.HOST_CONSTANT},
    ),
    "table read as dense": (
        (
            f'value_cache, inputs["block_table"], {LENS}',
            f'value_cache, read_as_dense(inputs["block_table"]), {LENS}',
        ),
        {OUTPUT, NOT_FINITE},
    ),
    "torch draws": (
        (NUMBER, f"{NUMBER}; number = torch.rand_like(number)"),
        {FindingKind.TORCH_RNG, OUTPUT},
    ),
    "draws depend on the row": (
        (NUMBER, f"{NUMBER}; number = (number + 0.1 * torch.arange(len(number))) % 1.0"),
        {OUTPUT},
    ),
    "writes to the other half": (
        (TOKENS, TOKENS.replace('inputs["out_offset"]', 'inputs["out_offset"] * 0')),
        {OUTPUT},
    ),
    "reads the other half": (
        (SOURCE, f'in_other_half({SOURCE} inputs["out_offset"], len(statics.tokens)),'),
        {OUTPUT, CACHE},
    ),
    "rows in place of slots": (
        (HIDDEN, f"slots = torch.arange(bucket).int(); {HIDDEN}"),
        {OUTPUT, CACHE},
    ),
    "greedy where rows draw": (
        ('if variant == "sample":', 'if variant == "never":'),
        {OUTPUT},
    ),
}
"""Name -> (what is replaced, what must be found at least)."""

MASK = "torch.where(rows < num_rows, slots, -1)"
CLAMP = "torch.where(source >= 0, fetched, token).clamp(min=0)"

STEP_FAULTS = {
    "padding has slots": ((MASK, "slots"), {CACHE}),
    "never reads the device's tokens": (("source >= 0", "source < -1"), {OUTPUT, CACHE}),
    "positions off by one": (
        ("positions = context_lens - 1", "positions = (context_lens - 2).clamp(min=0)"),
        {OUTPUT, CACHE},
    ),
}
"""The same, of the operators at both ends of the step."""


@pytest.fixture
def with_step_faults(monkeypatch):
    """Puts faults into the operators that `nanovllm.kernels.step_ops` has on a CPU."""

    def replace(*pieces):
        changed = with_pieces_replaced(reference_steps, *pieces)
        monkeypatch.setattr(step_ops, "steps", SimpleNamespace(**changed))

    return replace


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_fault_of_what_a_step_reads_is_found(fault, with_step_faults):
    piece, wanted = STEP_FAULTS[fault]
    with_step_faults(piece)

    report = report_on(captured)

    assert wanted <= kinds_in(report), report


@pytest.mark.parametrize("fault", PROGRAM_FAULTS)
def test_a_fault_of_the_program_is_found(fault):
    (piece, replacement), wanted = PROGRAM_FAULTS[fault]
    make_program = faulty_program(
        (piece, replacement), read_as_dense=read_as_dense, in_other_half=in_other_half
    )

    report = report_on(lambda: captured(make_program=make_program))

    assert wanted <= kinds_in(report), report


def kinds_in(report):
    return {found.kind for found in (*report.findings, *report.mismatches)}


def in_other_half(source, out_offset, num_tokens):
    """Places in the half that the step itself writes."""
    return torch.where(source < 0, source, source % (num_tokens // 2) + out_offset)


def read_as_dense(table):
    """A table of as many columns as are needed, read as if its rows lay next to each other."""
    num_columns = GEOMETRY.num_table_columns - 1
    return table[:, :num_columns].as_strided((len(table), num_columns), (num_columns, 1))


def test_what_is_replaced_by_itself_is_no_fault():
    """So it is the replacements that are found, and not that there are any."""
    make_program = faulty_program(*((piece, piece) for (piece, _), _ in PROGRAM_FAULTS.values()))

    assert report_on(lambda: captured(make_program=make_program)).ok


class TestBuffers:
    """Faults of what owns or fills the buffers."""

    def kinds(self, world, **options):
        return kinds_in(report_on(lambda: captured(world=world, **options)))

    def test_logits_stay_in_the_pool(self):
        kept: dict[tuple[int, str], torch.Tensor] = {}
        make_program = faulty_program(
            (
                "logits.copy_(fused.decoder.lm_head(hidden))",
                "kept[bucket, variant] = logits = fused.decoder.lm_head(hidden)",
            ),
            ("logits, fused = statics.logits[:bucket], statics.fused", "fused = statics.fused"),
            kept=kept,
        )

        class World(CapturedWorld):
            def fill(self, key, num_rows, inputs):
                super().fill(key, num_rows, inputs)
                self.key = key

            def outputs(self):
                return {**super().outputs(), "logits": kept[self.key.bucket, self.key.variant]}

        kinds = self.kinds(World, make_program=make_program)

        assert {FindingKind.ESCAPED_TENSOR, OUTPUT, NOT_FINITE} <= kinds

    def test_table_of_cosines_not_named(self):
        class World(CapturedWorld):
            def named_tensors(self):
                named = dict(super().named_tensors())
                del named["cos_sin"]
                return named

        assert FindingKind.EXTERNAL_TENSOR in self.kinds(World)

    def test_a_weight_not_named(self):
        class World(CapturedWorld):
            def named_tensors(self):
                named = dict(super().named_tensors())
                # The last one is of the last layer: a tied embedding would be named twice.
                del named[max(named, key=lambda name: (len(name), name))]
                return named

        assert FindingKind.EXTERNAL_TENSOR in self.kinds(World)

    def test_tokens_replaced(self):
        class World(CapturedWorld):
            def fill(self, key, num_rows, inputs):
                tokens = self.statics.tokens.clone()
                self.statics = attrs.evolve(self.statics, tokens=tokens)
                super().fill(key, num_rows, inputs)

        assert {FindingKind.STATIC_MOVED, OUTPUT} <= self.kinds(World)

    def test_cache_replaced(self):
        """Keys and values go to a copy of the cache, which takes its place."""
        piece = "query = ops.qkv_rope_store("
        make_fused = with_pieces_replaced(
            fused_module, (piece, f"cache = replaced(self, cache)\n            {piece}")
        )

        def replaced(fused, layer_cache):
            object.__setattr__(fused, "kv_cache", fused.kv_cache.clone())
            index = layer_cache.storage_offset() // layer_cache.numel()
            return fused.kv_cache[index]

        class World(CapturedWorld):
            def __init__(self, *args):
                super().__init__(*args)
                fields = attrs.asdict(self.statics.fused, recurse=False)
                fused = make_fused["FusedDecoder"](**fields)
                self.statics = attrs.evolve(self.statics, fused=fused)

        make_fused["replaced"] = replaced
        kinds = self.kinds(World)

        assert {FindingKind.STATIC_MOVED, FindingKind.ESCAPED_TENSOR, CACHE} <= kinds

    def test_stale_padding_rows(self, with_step_faults):
        class World(CapturedWorld):
            def __init__(self, *args):
                super().__init__(*args)
                self.buffer = forgetful(self.statics.layout, BufferFault.STALE_PAD_ROWS)

        # Padding has no slots, so a row that stays writes nowhere: this alone does no harm.
        assert self.kinds(World) == set()

        with_step_faults((MASK, "slots"))
        assert CACHE in self.kinds(World)

    def test_tail_not_written(self):
        class World(CapturedWorld):
            def fill(self, key, num_rows, inputs):
                super().fill(key, num_rows, inputs)
                layout, staging = self.statics.layout, self.statics.staging
                for view in layout.torch_views(staging, key.bucket).values():
                    if view.ndim:
                        view[num_rows:] = torch.iinfo(torch.int32).min

        assert RAISED in self.kinds(World)

    def test_number_of_rows_not_written(self):
        class World(CapturedWorld):
            def fill(self, key, num_rows, inputs):
                super().fill(key, num_rows, inputs)
                self.statics.layout.torch_views(self.statics.staging)["num_rows"].fill_(key.bucket)

        assert CACHE in self.kinds(World)


def forgetful(layout, fault):
    """A buffer that does not clear what it must."""
    buffer = ForgetfulBuffer(frozenset([fault]))
    super(ForgetfulBuffer, buffer).__init__(layout)
    return buffer


@attrs.define
class FaultyAttention:
    """Attention in a few lines, right unless told otherwise."""

    block_size: int
    scale: float
    masks_values: bool = True
    cuts_at: int | None = None
    reads_longest: bool = False

    def decode(self, query, key_cache, value_cache, block_tables, context_lens):
        columns = torch.arange(block_tables.shape[1] * self.block_size)
        if self.reads_longest:
            columns = columns[: int(context_lens.max())]
        if self.cuts_at is not None:
            columns = columns[: self.cuts_at]
        is_past = columns < context_lens[:, None]
        slots = block_tables[:, columns // self.block_size] * self.block_size
        slots = (slots + columns % self.block_size).clamp(min=0).long()
        keys, values = key_cache[slots], value_cache[slots]  # [B, W, K, D]
        if self.masks_values:
            values = torch.where(is_past[..., None, None], values, 0.0)
        grouped = query.unflatten(1, (keys.shape[2], -1))
        scores = torch.einsum("bkgd,bwkd->bkgw", grouped, keys) * self.scale
        shares = scores.masked_fill(~is_past[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("bkgw,bwkd->bkgd", shares, values).flatten(1, 2)


class TestAttention:
    def kinds(self, world=CapturedWorld, **faults):
        scale = plain_decoder("qwen3").config.head_dim ** -0.5
        attention = FaultyAttention(GEOMETRY.block_size, scale, **faults)
        return kinds_in(report_on(lambda: captured(world=world, attention=attention)))

    def test_without_faults_is_right(self):
        assert self.kinds() == set()

    def test_values_not_masked(self):
        assert NOT_FINITE in self.kinds(masks_values=False)

    def test_splits_of_live_lengths(self):
        assert {FindingKind.HOST_SYNC, OUTPUT} <= self.kinds(reads_longest=True)

    def test_longest_at_capture(self):
        """A capture has no live row, so all contexts that the program can know of are 1 long."""

        class World(CapturedWorld):
            def fill(self, key, num_rows, inputs):
                super().fill(key, num_rows, inputs)
                self.attention.cuts_at = int(inputs.batch.context_lens.max())

        assert OUTPUT in self.kinds(World, cuts_at=1)


class TestStaleColumns:
    """Blocks that a longer predecessor left in the table."""

    class World(CapturedWorld):
        def __init__(self, *args):
            super().__init__(*args)
            self.buffer = forgetful(self.statics.layout, BufferFault.STALE_TABLE_COLUMNS)

    def test_are_there(self):
        world = captured(world=self.World)
        clean = captured()
        seen = 0
        for step in decode_schedule(GEOMETRY, 320, num_steps=NUM_STEPS, seed=0):
            for one in (world, clean):
                one.fill(step.key, step.num_rows, step.inputs)
            seen += not torch.equal(world.statics.staging, clean.statics.staging)

        assert seen >= 3

    def test_do_no_harm_as_contexts_are_masked_before_the_table_is_read(self):
        assert report_on(lambda: captured(world=self.World)).ok


class TestFailedRows:
    """Their token, -1, comes back as the next one's input."""

    def report(self):
        decoder = random_decoder(small_config(plain_decoder("qwen3").config))
        decoder.embedding[7] = float("nan")
        steps = decode_schedule(GEOMETRY, 12, num_steps=NUM_STEPS, seed=0)
        attention = attention_for(decoder.config, GEOMETRY)
        return verify_world(
            lambda: CapturedWorld(decoder, attention, GEOMETRY),
            lambda: PlainWorld(decoder, GEOMETRY),
            steps,
            GEOMETRY,
        )

    def test_go_on_if_the_mark_is_clamped(self):
        assert RAISED not in kinds_in(self.report())

    def test_end_the_step_if_it_is_not(self, with_step_faults):
        with_step_faults((CLAMP, CLAMP.removesuffix(".clamp(min=0)")))

        assert RAISED in kinds_in(self.report())

    def test_without_a_mark_are_not_told_from_others(self, with_step_faults):
        with_step_faults(("torch.where(peak.isfinite(), token_ids, FAILED_TOKEN)", "token_ids"))

        assert OUTPUT in kinds_in(self.report())


class TestSizes:
    """Pitfall 2: the first decode after a full prompt needs a column of its own."""

    def fill_all(self, geometry):
        decoder = plain_decoder("qwen3")
        world = CapturedWorld(decoder, attention_for(decoder.config, geometry), geometry)
        for step in decode_schedule(geometry, 320, num_steps=30, seed=0):
            world.fill(step.key, step.num_rows, step.inputs)

    def test_a_table_one_column_short_is_refused(self):
        class Short(Geometry):
            @property
            def num_table_columns(self):
                return (self.max_model_len - 1) // self.block_size  # -1: less the last position

        self.fill_all(Geometry(max_model_len=5))
        with pytest.raises(LayoutError, match="block_table"):
            self.fill_all(Short(max_model_len=5))


def test_every_variant_is_captured():
    assert {key.variant for key in report_on(captured, num_steps=1).num_ops} == set(VARIANTS)
