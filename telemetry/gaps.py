"""The time between tokens: every gap of every sequence, from the steps that gave them.

A gap is kept per step and not per sequence: sequences that decode together share it.
"""

from array import array
from collections import Counter
from collections.abc import Sequence

import attrs
import numpy as np

from telemetry.stats import Counts, Distribution, Floats


@attrs.frozen(eq=False)
class Gaps:
    """Gaps between outputs of sequences by column, `[N]` each, in order of their ends.

    Attributes:
        step: Position of the step that ended the gap, in the steps given.
        previous_step: Position of the step that began it.
        stall_s: From the end of the one step to the end of the other: what a reader waits.
        num_tokens: Tokens that each of its sequences got at its end.
        num_seqs: Sequences that had this gap.
    """

    step: Counts
    previous_step: Counts
    stall_s: Floats
    num_tokens: Counts
    num_seqs: Counts

    def __len__(self) -> int:
        return len(self.step)

    @property
    def itl_s(self) -> Floats:
        """`[N]` the inter-token latency of each token at the end of a gap."""
        return self.stall_s / self.num_tokens

    def itl(self) -> Distribution | None:
        """Inter-token latencies: a gap over n tokens counts n times gap/n.

        They are pooled over all sequences and never averaged per request first, which would hide
        the tail.
        """
        return Distribution.of(self.itl_s, self.num_tokens * self.num_seqs)

    def stall(self) -> Distribution | None:
        """Gaps as a reader saw them, however many tokens came at their end."""
        return Distribution.of(self.stall_s, self.num_seqs)


def token_gaps(ends_s: Sequence[float] | Floats, sampled: Sequence[Sequence[int]]) -> Gaps:
    """Every gap between outputs of one sequence, in order of the steps that ended them.

    The first output of a sequence ends no gap: its wait is the time to first token.

    Args:
        ends_s: `[N]` when each step ended.
        sampled: `[N]` the ids of the sequences that got a token in it; an id stands once per token.
    """
    # Step, previous step, tokens and sequences of each gap, one after the other.
    flat = array("q")
    last: dict[int, int] = {}  # sequence -> the last step that gave it a token, before the batch
    batch: Sequence[int] = ()
    tokens: Counter[int] = Counter()  # of the batch: sequence -> tokens in its last step
    alike: dict[int, int] = {}  # of the batch: tokens -> sequences that get so many
    for step, seq_ids in enumerate(sampled):
        if seq_ids == batch:
            # Most steps are those of the same batch: each sequence was in the step before.
            for num_tokens, num_seqs in alike.items():
                flat.extend((step, step - 1, num_tokens, num_seqs))
            continue
        last.update(dict.fromkeys(tokens, step - 1))
        batch, tokens = seq_ids, Counter(seq_ids)
        alike = Counter(tokens.values())
        since = Counter((last[seq_id], num) for seq_id, num in tokens.items() if seq_id in last)
        for (previous, num_tokens), num_seqs in since.items():
            flat.extend((step, previous, num_tokens, num_seqs))
    columns = np.frombuffer(flat, np.int64).reshape(-1, 4).T
    steps, previous_steps, num_tokens_of, num_seqs_of = columns
    ends = np.asarray(ends_s, np.float64)
    return Gaps(
        steps, previous_steps, ends[steps] - ends[previous_steps], num_tokens_of, num_seqs_of
    )


def tpot_s(first_token_s: float | None, last_token_s: float, num_tokens: int) -> float | None:
    """Time per output token of one request: its decode time over the tokens after the first."""
    if first_token_s is None or num_tokens < 2:
        return None
    return (last_token_s - first_token_s) / (num_tokens - 1)
