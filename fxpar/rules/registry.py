"""The table of rules: one declaration per op.

``rule("mm", "m k, k n -> m n", linear=("0", "1"))`` declares; :func:`rule_for` looks up. An op without a rule gets
the default: nothing splits, nothing pending passes; it is computed whole from whole operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from fxpar.rules.expansion import Expand
from fxpar.rules.factor_rule import Call, Factors, Localise, Offers, Rule
from fxpar.rules.parse import string_factors

_Function = TypeVar("_Function", bound=Callable[..., Any])

_RULES: dict[str, Rule] = {}
_CACHES: list[Callable[[], None]] = []


def rule_cache(size: int) -> Callable[[_Function], _Function]:
    """``lru_cache`` for a function whose results follow from the rules: emptied when a rule is declared."""

    def cached(function: _Function) -> _Function:
        kept: Any = lru_cache(maxsize=size)(function)
        _CACHES.append(kept.cache_clear)
        return kept

    return cached


def rules_changed() -> None:
    """Forget what was computed from the rules as they were."""
    for clear in _CACHES:
        clear()


def full_name(op: str) -> str:
    """``"mm"`` -> ``"aten.mm.default"``, ``"add.Tensor"`` -> ``"aten.add.Tensor"``, ``"mylib::f"`` ->
    ``"mylib.f.default"``."""
    namespace, _, rest = op.rpartition("::")
    name, _, overload = rest.partition(".")
    return f"{namespace or 'aten'}.{name}.{overload or 'default'}"


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
    expand: Expand | None = None,
    offers: Offers | None = None,
) -> None:
    """Declare the rule of one op or of several that share it.

    Args:
        ops: names as in ``full_name``; the op need not exist in this torch version.
        factors: rule text (see :mod:`fxpar.rules.parse`) or a function of the call.
        linear, reduce, reads, addends, nonempty: as in ``string_factors``, for rule texts.
        localise: how the call becomes local when an argument depends on global sizes or positions.
        random: the op draws stateless random numbers.
        expand: what runs in place of the call where a loop that ``expands`` is split.
        offers: which splits of such loops are possible, None when all are.

    Raises:
        ValueError: the op already has a rule.
    """
    for op in [ops] if isinstance(ops, str) else ops:
        declare(
            op, factors, linear=linear, reduce=reduce, reads=reads, addends=addends, nonempty=nonempty,
            localise=localise, random=random, expand=expand, offers=offers,
        )


def declare(
    op: str,
    factors: str | Callable[[Call], Factors],
    *,
    linear: Sequence[str],
    reduce: str,
    reads: Sequence[str] | None,
    addends: Sequence[int],
    nonempty: bool,
    localise: Localise | None,
    random: bool,
    declared: str = "",
    expand: Expand | None = None,
    offers: Offers | None = None,
) -> None:
    """Enter the rule of one op; arguments as in :func:`rule`, ``declared`` as in :class:`Rule`.

    Raises:
        ValueError: the op already has a rule.
    """
    name = full_name(op)
    if name in _RULES:
        raise ValueError(f"{name} already has a rule")
    if isinstance(factors, str):
        text = factors

        def function(call: Call) -> Factors:
            return string_factors(
                call, text, linear=linear, reduce=reduce, reads=reads, addends=addends, nonempty=nonempty
            )

        _RULES[name] = Rule(name, function, localise, text, random, declared, expand, offers)
    else:
        said = getattr(factors, "__name__", "function")
        _RULES[name] = Rule(name, factors, localise, said, random, declared, expand, offers)
    rules_changed()


def rule_for(op: str) -> Rule | None:
    """The declared rule of a full op name, None when it has only the default."""
    _load_tables()
    return _RULES.get(op)


def all_rules() -> tuple[Rule, ...]:
    """Every declared rule, sorted by op name."""
    _load_tables()
    return tuple(_RULES[name] for name in sorted(_RULES))


_loaded = False


def _load_tables() -> None:
    global _loaded
    if not _loaded:
        _loaded = True  # first: the tables import this module
        import fxpar.rules.tables  # noqa: F401
