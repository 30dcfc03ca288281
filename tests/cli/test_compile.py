import os

import pytest

from fxpar.cli.compile import check_writable, write_file
from fxpar.plans.errors import FxparError


def test_a_plan_is_written_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "plan.msgpack"
    path.write_bytes(b"old")
    write_file(str(path), b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["plan.msgpack"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "plan").mkdir()
    with pytest.raises(FxparError, match="cannot write the plan"):
        write_file(str(tmp_path / "plan"), b"new")
    assert os.listdir(tmp_path) == ["plan"]


def test_places_that_cannot_be_written_are_refused_early(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_writable("plan.msgpack")
    with pytest.raises(FxparError, match="not a folder that can be written to"):
        check_writable("none/plan.msgpack")
