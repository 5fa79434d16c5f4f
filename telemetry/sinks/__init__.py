"""Where a run goes: `jsonl` is the canonical form, and the others are derived from it."""
