import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.text.stop_strings import StopChecker


def naive(text, stop, include_stop, is_active=lambda index: True):
    """What is shown in the end, and by which stop string, from the whole text at once."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found and is_active(end - 1):
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def naive_held(text, stop):
    """The longest end of the text that is a beginning of a stop string, but not all of one."""
    lengths = range(min(len(text), max(map(len, stop)) - 1), 0, -1)
    for length in lengths:
        end = text[len(text) - length :]
        if any(string.startswith(end) and string != end for string in stop):
            return end
    return ""


def stream(pieces, stop, include_stop=False):
    checker = StopChecker(stop, include_stop)
    shown = [checker.push(piece) for piece in pieces]
    return [*shown, checker.flush()], checker.stopped_by


TEXT = st.text("abc", max_size=30)
STOP = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def pieces_of(data, text):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text))), label="cuts"))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class TestExamples:
    @pytest.mark.parametrize(
        ("pieces", "stop", "shown", "stopped_by"),
        [
            (["ab", "cd", "ef"], ("bc",), "a", "bc"),
            (["ab", "cd", "ef"], ("d", "bc"), "a", "bc"),
            (["abcdef"], ("d", "bc"), "a", "bc"),
            (["ab", "cd"], ("ab",), "", "ab"),
            (["ab"], ("abc",), "ab", None),
            (["aab"], ("ab",), "a", "ab"),
            (["a", "a", "a", "b"], ("aab",), "a", "aab"),
            # Of two that end together the longer one, whatever their order.
            (["xabc"], ("bc", "abc"), "x", "abc"),
            (["xabc"], ("abc", "bc"), "x", "abc"),
            # The first to be complete wins over one that begins earlier and takes longer.
            (["abcd"], ("abcd", "bc"), "a", "bc"),
            # One that can no longer be completed leaves the shorter one within it to be found.
            (["abx", "bc"], ("abxd", "xb"), "ab", "xb"),
            (["삼겹", "살 🌶"], ("겹살",), "삼", "겹살"),
            ([], ("a",), "", None),
            (["", "", "b"], ("a",), "b", None),
        ],
    )
    def test_cut_the_text_and_say_which(self, pieces, stop, shown, stopped_by):
        texts, by = stream(pieces, stop)

        assert ("".join(texts), by) == (shown, stopped_by)

    def test_the_stop_string_is_shown_if_wanted_and_nothing_after_it(self):
        texts, by = stream(["ab", "cd", "ef"], ("bc",), include_stop=True)

        assert "".join(texts) == "abc"
        assert by == "bc"

    def test_nothing_is_shown_after_the_stop_not_even_by_flush(self):
        checker = StopChecker(("b",), include_stop=False)

        assert checker.push("abc") == "a"
        assert [checker.push("d"), checker.push("", active=False), checker.flush()] == ["", "", ""]
        assert checker.stopped_by == "b"

    def test_only_what_may_become_a_stop_string_is_held_back(self):
        checker = StopChecker(("</tool>",), include_stop=False)

        assert checker.push("a < b </to") == "a < b "
        assert checker.push("p> c </") == "</top> c "
        assert checker.flush() == "</"
        assert checker.stopped_by is None

    def test_without_stop_strings_all_passes_at_once(self):
        texts, by = stream(["ab", "", "c"], ())

        assert texts == ["ab", "", "c", ""]
        assert by is None


class TestInactiveText:
    def test_cannot_complete_a_stop_string(self):
        checker = StopChecker(("ab",), include_stop=False)

        assert checker.push("xaby", active=False) == "xaby"
        assert checker.push("zab") == "z"
        assert checker.stopped_by == "ab"

    def test_may_begin_one_and_is_held_back_for_it(self):
        checker = StopChecker(("abc",), include_stop=False)

        assert checker.push("xab", active=False) == "x"
        assert checker.push("cd") == ""
        assert checker.stopped_by == "abc"

    def test_is_not_held_back_for_what_it_completed(self):
        checker = StopChecker(("abab",), include_stop=False)

        assert checker.push("abab", active=False) == "ab"
        assert checker.push("ab") == "ab"[:0]
        assert checker.stopped_by == "abab"


class TestProperties:
    @settings(max_examples=400)
    @given(TEXT, STOP, st.booleans(), st.data())
    def test_any_cutting_shows_what_the_whole_text_shows(self, text, stop, include_stop, data):
        texts, by = stream(pieces_of(data, text), stop, include_stop)

        assert ("".join(texts), by) == naive(text, stop, include_stop)

    @settings(max_examples=400)
    @given(TEXT, STOP)
    def test_what_is_held_back_is_the_longest_possible_beginning(self, text, stop):
        checker = StopChecker(stop, include_stop=False)
        shown = ""
        for end in range(1, len(text) + 1):
            shown += checker.push(text[end - 1])
            if checker.stopped_by is not None:
                break
            assert shown + naive_held(text[:end], stop) == text[:end]

    @settings(max_examples=400)
    @given(TEXT, TEXT, STOP, st.booleans(), st.data())
    def test_text_that_cannot_stop_is_as_if_matches_in_it_did_not_count(
        self, early, late, stop, include_stop, data
    ):
        checker = StopChecker(stop, include_stop)
        shown = [checker.push(piece, active=False) for piece in pieces_of(data, early)]
        assert checker.stopped_by is None
        shown += [checker.push(piece) for piece in pieces_of(data, late)]
        shown.append(checker.flush())

        expected = naive(early + late, stop, include_stop, lambda index: index >= len(early))
        assert ("".join(shown), checker.stopped_by) == expected

    def test_the_work_does_not_grow_with_the_text_nor_with_the_length_of_the_stop_string(self):
        """A search that starts again at every character takes minutes for this."""
        stop = ("a" * 50_000 + "b",)
        checker = StopChecker(stop, include_stop=False)
        num_shown = sum(len(checker.push("a" * 50)) for _ in range(4_000))

        assert num_shown == 200_000 - 50_000
        assert checker.push("b") == ""
        assert checker.stopped_by == stop[0]
