"""Fewer searches for reference cycles: inside only, and never more than the caller wants."""

from __future__ import annotations

import gc

import pytest

from fxpar.rare_collections import ALLOCATIONS, rare_collections


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("first", [1, 700, ALLOCATIONS - 1])
def test_fewer_inside_and_as_before_after_an_error(first):
    gc.set_threshold(first, 11, 12)
    with pytest.raises(ValueError, match="inside"), rare_collections():
        assert gc.get_threshold() == (ALLOCATIONS, 11, 12)
        raise ValueError("inside")
    assert gc.get_threshold() == (first, 11, 12)


@pytest.mark.parametrize("first", [0, ALLOCATIONS, 10 * ALLOCATIONS])
def test_what_the_caller_made_rarer_stays(first):
    gc.set_threshold(first, 11, 12)
    with rare_collections():
        assert gc.get_threshold() == (first, 11, 12)
    assert gc.get_threshold() == (first, 11, 12)


def test_the_command_line_and_compile_model_collect_rarely(monkeypatch):
    import fxpar.cli.main as command_line
    from fxpar.compile import compile_model

    seen = []

    def run(options):
        seen.append(gc.get_threshold()[0])
        return 0

    class Parsed:
        def parse_args(self, arguments):
            return type("Options", (), {"run": staticmethod(run)})()

    monkeypatch.setattr(command_line, "make_parser", lambda: Parsed())
    gc.set_threshold(700, 10, 10)
    assert command_line.main([]) == 0
    assert seen == [ALLOCATIONS] and gc.get_threshold()[0] == 700

    class Source:
        def __getattr__(self, name):
            seen.append(gc.get_threshold()[0])
            raise RuntimeError("seen enough")

    with pytest.raises(RuntimeError, match="seen enough"):
        compile_model(Source(), cluster="1x2:h100")
    assert seen[-1] == ALLOCATIONS and gc.get_threshold()[0] == 700
