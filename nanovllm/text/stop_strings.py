"""Stop strings: finds them in a growing text, however it is cut into pieces.

The search is an Aho-Corasick automaton: one state for every beginning of a stop string, and always
the state of the longest beginning that the text ends with. So each character is looked at once,
and the state says how much of the text must be held back, as it may yet become a stop string.
"""

from collections import deque

import attrs


class StopChecker:
    """Passes text through until a stop string is complete.

    The first stop string to be complete wins, as with vLLM when tokens come one by one; of those
    that end at the same character the longest, which is the one that starts first. What is shown
    does not depend on how the text is cut into pieces. Nothing after the stop is ever shown.

    Attributes:
        stopped_by: The stop string that was found, or None so far.
    """

    def __init__(self, stop: tuple[str, ...], include_stop: bool) -> None:
        """Prepare the search.

        Args:
            stop: Non-empty strings. Without any, all text passes at once.
            include_stop: Show the stop string too, at the end of the text.
        """
        self.stopped_by: str | None = None
        self._include_stop = include_stop
        self._root = _build(stop)
        self._state = self._root
        self._held = ""

    def push(self, text: str, *, active: bool = True) -> str:
        """Add text; return what may be shown now.

        Held back is the longest end of the text that may yet become a stop string.

        Args:
            text: What comes next.
            active: Whether a stop string may be completed by this text. If not, one may still
                begin in it and count if it ends in a later, active text: so it is with `min_tokens`
                in vLLM.

        Returns:
            Text that follows what was shown before; "" once stopped.
        """
        if self.stopped_by is not None:
            return ""
        held = self._held + text
        state = self._state
        for num_read, character in enumerate(text, start=len(self._held) + 1):
            state = _follow(state, character)
            if active and state.found is not None:
                self.stopped_by = state.found
                self._held = ""
                # None of it was shown: while it grew, it was among what could still grow.
                return held[: num_read if self._include_stop else num_read - len(state.found)]
        self._state = state
        num_shown = len(held) - state.num_held
        self._held = held[num_shown:]
        return held[:num_shown]

    def flush(self) -> str:
        """Return the text held back, as none is to follow; "" once stopped."""
        held, self._held, self._state = self._held, "", self._root
        return held


@attrs.define(eq=False)
class _State:
    """The longest beginning of a stop string that the text ends with.

    Attributes:
        depth: Its length.
        fallback: The state of the next shorter one that the text ends with too; None at the root.
        next: The longer ones by one character.
        found: The longest stop string that the text ends with, if any.
        num_held: Length of the longest one that the text ends with and that can still grow.
    """

    depth: int = 0
    fallback: "_State | None" = None
    next: dict[str, "_State"] = attrs.Factory(dict)
    found: str | None = None
    num_held: int = 0


def _build(stop: tuple[str, ...]) -> _State:
    """The root of the automaton."""
    root = _State()
    for string in stop:
        state = root
        for character in string:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.found = string
    # Breadth first, so that the shorter states that a state falls back to are complete.
    queue = deque([root])
    while queue:
        parent = queue.popleft()
        for character, state in parent.next.items():
            # Below the root there is nothing shorter but the root: not the state itself.
            shorter = root if parent.fallback is None else _follow(parent.fallback, character)
            state.fallback = shorter
            state.found = state.found or shorter.found
            state.num_held = state.depth if state.next else shorter.num_held
            queue.append(state)
    return root


def _follow(state: _State, character: str) -> _State:
    """The state after one more character. Amortised O(1): each step back undoes one forward."""
    while character not in state.next:
        if state.fallback is None:
            return state
        state = state.fallback
    return state.next[character]
