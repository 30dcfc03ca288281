"""Errors a user meets: what is wrong, where, why in numbers, and the way out.

Every layer may raise these. A subclass exists only where a caller would act differently on it; everything else is
`FxparError` with its own words. A message renders as

    fxpar: the model does not fit: stage 1 needs 91.2 GiB of 80.0 GiB per device
      model.py:41, in module layers.3.mlp
      parameters 22.0, gradients 22.0, optimizer 44.0, activations 3.2 (after rematerialisation)
      the smallest mesh on which it fits is dp=4,tp=4; or compile with --microbatches 2

Nothing is gathered implicitly: a pass that can go on after a failure uses `collect_errors` and reports all at once.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class FxparError(Exception):
    """Something the user can act on.

    Args:
        what: one sentence, naming the thing that is wrong and the offending value.
        where: the user's source line and module path, or the place in a file; may be empty.
        numbers: the numbers behind it, one line each; may be empty.
        way_out: what to do instead; may be empty.
    """

    def __init__(self, what: str, where: str = "", numbers: str | Iterable[str] = (), way_out: str = "") -> None:
        self.what = what
        self.where = where
        self.numbers: tuple[str, ...] = (numbers,) if isinstance(numbers, str) else tuple(numbers)
        self.way_out = way_out
        super().__init__(what, where, self.numbers, way_out)

    def __str__(self) -> str:
        lines: list[str] = []
        for part in (self.where, *self.numbers, self.way_out):
            lines.extend(part.splitlines())
        return "\n".join([f"fxpar: {self.what}", *(f"  {line}" for line in lines)])

    def as_dict(self) -> dict[str, Any]:
        """The four parts as plain data, for --json."""
        return {"what": self.what, "where": self.where, "numbers": list(self.numbers), "way_out": self.way_out}


class FxparErrors(FxparError):
    """Several errors found by one pass, printed one after the other; `errors` holds them flat."""

    def __init__(self, errors: Iterable[FxparError]) -> None:
        self.errors = tuple(errors)
        super().__init__(f"{len(self.errors)} errors", numbers=tuple(str(error) for error in self.errors))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "errors": [error.as_dict() for error in self.errors]}


class PlanFileError(FxparError):
    """The file is not a plan this version can read: damaged, hostile, or of an unknown version."""


class PlanMismatch(FxparError):
    """The plan is sound but belongs to another model, other sizes or another number of ranks."""


class CaptureError(FxparError):
    """The model cannot be turned into one graph: a data-dependent branch, an op without a rule that is needed, ..."""


class Infeasible(FxparError):
    """No plan meets the request: memory, the mesh, or the hints rule out every choice."""


class UnsupportedError(FxparError):
    """The request is understood, but this version does not do it."""


class ErrorCollector:
    """Errors gathered by one pass; see `collect_errors`."""

    def __init__(self) -> None:
        self._errors: list[FxparError] = []

    def add(self, error: FxparError) -> None:
        """Keep `error`; one that says the same as an earlier one is dropped."""
        for one in error.errors if isinstance(error, FxparErrors) else (error,):
            if all(str(one) != str(known) for known in self._errors):
                self._errors.append(one)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep a FxparError raised in the block and go on after it."""
        try:
            yield
        except FxparError as error:
            self.add(error)

    @property
    def errors(self) -> tuple[FxparError, ...]:
        return tuple(self._errors)

    def raise_if_any(self) -> None:
        """Raise the only error as it is, or several as one FxparErrors."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise FxparErrors(self._errors)


@contextmanager
def collect_errors() -> Iterator[ErrorCollector]:
    """Gather every error of a block and raise them together at its end.

        with collect_errors() as errors:
            for parameter in parameters:
                with errors.catching():
                    check(parameter)

    A FxparError that leaves the block itself ends it and is raised with those gathered before it. Other exceptions
    pass through unchanged.
    """
    collector = ErrorCollector()
    with collector.catching():
        yield collector
    collector.raise_if_any()
