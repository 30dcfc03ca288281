"""Progress of long work: a function that wraps each phase.

    with progress("capturing the graph"):
        ...

The compiler is given one and knows nothing of terminals; `silent` shows nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Called with the name of a phase, gives what is entered for its duration."""

    def __call__(self, phase: str, /) -> AbstractContextManager[None]: ...


@contextmanager
def silent(phase: str, /) -> Iterator[None]:
    """Shows nothing."""
    yield
