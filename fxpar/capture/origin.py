"""Where a traced node comes from: the module path and the user's source line."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def frame_text(file: str, line: int | str, function: str) -> str:
    return f"{Path(file).name}:{line} in {function}"


def is_user_file(file: str) -> bool:
    """False for torch's own frames, this package's, and code without a file."""
    return not file.startswith(_INTERNAL) and not file.startswith("<")


@lru_cache(maxsize=4096)
def user_line(stack_trace: str) -> str:
    """``"model.py:12 in forward"``: the innermost frame of a formatted stack that is not torch's own."""
    for file, line, function in reversed(_FRAME.findall(stack_trace)):
        if is_user_file(file):
            return frame_text(file, line, function)
    return ""


def module_path(stack: dict[str, Any] | None, paths: dict[int, str]) -> str:
    """Dotted path of the innermost module of an ``nn_module_stack`` that belongs to the user's model."""
    for key, (text, _) in reversed(list((stack or {}).items())):
        number = str(key).partition("@")[0]
        if number.isdigit() and int(number) in paths:
            return paths[int(number)]
        found = re.match(r"L\['self'\]\.model\.(.+)", str(text))
        if found:
            return re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", found[1]).replace("_modules.", "")
    return ""


def stack_of(meta: dict[str, Any]) -> Any:
    """The modules whose forward an FX node comes from, None where autograd made it on its own."""
    return meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")


def origin(meta: dict[str, Any], paths: dict[int, str]) -> tuple[str, str]:
    """(module path, source line) of an FX node; empty where unknown."""
    return module_path(stack_of(meta), paths), user_line(meta.get("stack_trace") or "")
