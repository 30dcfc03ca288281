"""``fxpar.rule``: a user declares the rule of an op of theirs, in model.py.

    @torch.library.custom_op("mylib::scale", mutates_args=())
    def scale(x: Tensor, weight: Tensor) -> Tensor: ...

    fxpar.rule("mylib::scale", "rows width, width -> rows width", linear=("0", "1"))

The plan records a digest of the rules it uses; it is loaded only where the same ones are declared.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence

from fxpar.plans.errors import FxparError
from fxpar.rules.factor_rule import Call, Factors, Localise
from fxpar.rules.registry import declare, full_name, rule_for


def rule(
    ops: str | Sequence[str],
    factors: str | Callable[[Call], Factors],
    *,
    linear: Sequence[str] = (),
    reduce: str = "sum",
    reads: Sequence[str] | None = None,
    addends: Sequence[int] = (),
    nonempty: bool = False,
    localise: Localise | None = None,
    random: bool = False,
) -> None:
    """Declare the rule of one op or of several that share it; once more in the same words changes nothing.

    Args:
        ops: ``"mylib::op"`` or ``"mylib::op.overload"``; an op of torch itself is ``"aten::op"``.
        factors: rule text (see :mod:`fxpar.rules.parse`), or a function of the call.
        linear, reduce, reads, addends, nonempty: what the text cannot say, as for fxpar's own rules.
        localise: how the call becomes local when an argument depends on global sizes or positions.
        random: the op draws stateless random numbers.

    Raises:
        FxparError: the text is no rule, or the op already has another rule.
    """
    if isinstance(factors, str) and factors.count("->") != 1:
        raise FxparError(
            f"'{factors}' is not a rule", way_out='write operands -> results, such as "rows width, width -> rows width"'
        )
    said = (words(factors), tuple(linear), reduce, reads and tuple(reads), tuple(addends), nonempty, random,
            localise and words(localise))
    digest = hashlib.sha256(repr(said).encode()).hexdigest()
    for op in [ops] if isinstance(ops, str) else ops:
        known = rule_for(full_name(op))
        if known is not None and known.declared == digest:
            continue
        if known is not None:
            raise FxparError(
                f"{full_name(op)} already has a rule", numbers=f"it is {known.text!r}",
                way_out="declare a rule once; fxpar rules list shows those of fxpar",
            )
        declare(
            op, factors, linear=linear, reduce=reduce, reads=reads, addends=addends, nonempty=nonempty,
            localise=localise, random=random, declared=digest,
        )


def words(said: str | Callable[..., object]) -> str:
    """A rule text without its spacing, or the source of a function."""
    if isinstance(said, str):
        return " ".join(said.split())
    try:
        return inspect.getsource(said)
    except (OSError, TypeError):
        return f"{getattr(said, '__module__', '')}.{getattr(said, '__qualname__', repr(type(said)))}"
