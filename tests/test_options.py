"""The options as `help` shows them, and those that reach beyond the engine."""

import gc
import pydoc

import attrs
import pytest

from nanovllm import LLM, AsyncLLM, EngineConfig
from nanovllm.config import documents_options
from tests.engines import greedy, tiny_llm


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_help_lists_every_option_with_what_it_does(engine):
    shown = pydoc.plain(pydoc.render_doc(engine))
    lines = [line.strip(" |") for line in shown.splitlines()]

    for field in attrs.fields(EngineConfig):
        assert any(line.startswith(f"{field.name}: ") for line in lines), field.name
    assert any(line.startswith("refused with `QueueFullError`") for line in lines)


def test_without_docstrings_there_is_nothing_to_add():
    def init(self):
        pass

    assert documents_options(init) is init and init.__doc__ is None


@pytest.fixture
def unfrozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_by_default_nothing_is_frozen():
    with tiny_llm() as llm:
        llm.generate([1, 2], greedy(2))

        assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("unfrozen")
def test_a_frozen_engine_runs_and_thaws_when_it_is_closed():
    llm = tiny_llm(freeze_gc=True)
    assert gc.get_freeze_count() > 1000
    assert llm.generate([1, 2], greedy(2))[0].finish_reason == "length"

    llm.close()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    llm.close()
    assert gc.get_freeze_count() > 0, "a second close leaves what others froze alone"
