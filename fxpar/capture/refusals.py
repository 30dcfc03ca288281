"""Tracing failures in the user's terms: what stopped it, on which line of theirs, and what to do."""

from __future__ import annotations

import re
import traceback

from fxpar.capture.lower import SHAPE_WAY_OUT
from fxpar.capture.origin import frame_text, is_user_file
from fxpar.plans.errors import CaptureError

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_DATA_DEPENDENT = re.compile(
    r"data[- ]dependent|DataDependent|DynamicOutputShape|dynamic shape operator|unbacked|_local_scalar_dense",
    re.IGNORECASE,
)
_BRANCH = "a data-dependent branch or size: the traced graph would be right for the example inputs only"
_BRANCH_WAY_OUT = (
    "compute both sides and choose with torch.where, or take the decision before the model is captured "
    "(a Python argument of forward)"
)
_READS_WAY_OUT = "keep the value in a tensor, or pass it as a Python argument of forward"
_WRAP_WAY_OUT = "wrap it in torch.library.custom_op with register_fake and register_autograd, and declare its rule"
_SHAPE_OF_VALUES = re.compile(r"DynamicOutputShapeException.*?op='([\w.]+)', overload='(\w+)'")
_READS_VALUE = re.compile(r"DataDependentOutputException.*?op='([\w.]+)'")
_NO_SHAPE_FUNCTION = re.compile(r"Operator `([\w.]+)` does not have a meta kernel")
_BREAK_WAY_OUT = (
    "rewrite the line with tensor operations that torch.compile(fullgraph=True) accepts, or move it out of forward"
)


def chained(error: BaseException) -> list[str]:
    """Type and message of the error and of those that it came from."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return [f"{type(e).__name__} {e!r} {e}" for e in chain]


def is_data_dependent(error: BaseException) -> bool:
    """True when control flow or a shape hangs on a tensor's values."""
    return any(_DATA_DEPENDENT.search(text) for text in chained(error))


def data_dependence(error: BaseException) -> tuple[str, tuple[str, ...], str]:
    """(what, numbers, way out): which op has a shape that depends on values, or that the traced code branches."""
    for text in chained(error):
        if found := _NO_SHAPE_FUNCTION.search(text):
            what = f"{found[1]} has a data-dependent shape, or one that torch cannot tell before it runs"
            return what, (), _WRAP_WAY_OUT
        if found := _SHAPE_OF_VALUES.search(text):
            return _BRANCH, (f"{found[1]}.{found[2]} gives a shape that depends on values",), SHAPE_WAY_OUT
        if found := _READS_VALUE.search(text):
            return _BRANCH, ("a number is read off a tensor",), _READS_WAY_OUT
    return _BRANCH, (), _BRANCH_WAY_OUT


def user_frame(error: BaseException) -> tuple[str, str]:
    """(``"file.py:12 in forward"``, text of the line): the innermost frame of the user's or the model library's."""
    stack = getattr(error, "real_stack", None)
    frames = list(stack) if stack else []
    if not any(is_user_file(f.filename) for f in frames):
        frames += traceback.extract_tb(error.__traceback__)
        frames += [
            traceback.FrameSummary(file, int(line), name, lookup_line=True)
            for file, line, name in _FRAME.findall(str(error))
        ]
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return frame_text(frame.filename, frame.lineno or 0, frame.name), (frame.line or "").strip()
    return "", ""


def first_lines(error: BaseException) -> list[str]:
    """The sentence of torch's message that says what is wrong, without its advice and stacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("Explanation:")), "")
    head = lines[0] if lines else type(error).__name__
    return [head] if not reason else [head, reason.removeprefix("Explanation:").strip()]


def refusal(error: BaseException, fallback: str = "") -> CaptureError:
    """The error to raise for a failed trace; ``fallback`` says why the other route was no way out either."""
    where, line = user_frame(error)
    numbers = [line] if line else []
    if is_data_dependent(error):
        what, why, way_out = data_dependence(error)
        return CaptureError(what, where, (*numbers, *why), way_out)
    numbers += first_lines(error)
    if fallback:
        numbers.append(fallback)
    return CaptureError("the model cannot be traced into one graph", where, numbers, _BREAK_WAY_OUT)
