"""Random data for concrete calls, and the table of generators: ``@calls("mm")`` declares one for an op."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpar.rules.soundness import Example

GENERATORS: dict[str, list[Callable[[Draw], Example]]] = {}


class Draw:
    """Seeded draws. Reals are multiples of 1/64, so that random summands of them are exact.

    ``rare``: sizes that are drawn are 0 or 1 now and then; not every op takes them.
    """

    def __init__(self, seed: int, *, rare: bool = False) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.rare = rare

    def size(self, low: int = 2, high: int = 6) -> int:
        return self.rarely(self.random.randint(low, high))

    def rarely(self, size: int) -> int:
        """The size, or 0 or 1 where those are wanted."""
        return self.random.choice((0, 1, 1)) if self.rare and self.random.random() < 0.3 else size

    def sizes(self, *usual: int) -> tuple[int, ...]:
        """As many sizes as ``usual`` ones: half of them these."""
        return tuple(self.rarely(n if self.random.random() < 0.5 else self.random.randint(2, 7)) for n in usual)

    def shape(self, low: int = 1, high: int = 3) -> tuple[int, ...]:
        """A shape of ``low`` to ``high`` dims; now and then a dim is 1."""
        dims = self.random.randint(low, high)
        return tuple(self.rarely(self.random.choice((1, 2, 3, 4, 5, 6, 4, 6))) for _ in range(dims))

    def broadcast(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to ``shape`` (often ``shape`` itself)."""
        if self.random.random() < 0.4:
            return shape
        kept = tuple(1 if self.random.random() < 0.3 else size for size in shape)
        return kept[self.random.randint(0, len(kept)) :] if self.random.random() < 0.5 else kept

    def real(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) * 64).round() / 64

    def positive(self, *shape: int) -> Tensor:
        return self.real(*shape).abs() + 1 / 64

    def unit(self, *shape: int) -> Tensor:
        """Strictly between 0 and 1."""
        return (torch.rand(shape, generator=self.generator, dtype=torch.float64) * 62).floor() / 64 + 1 / 64

    def distinct(self, *shape: int) -> Tensor:
        """Distinct values along every dim, so that orders are unique."""
        count = max(torch.Size(shape).numel(), 1)
        return (torch.randperm(count, generator=self.generator).to(torch.float64) / 8 - count / 16).reshape(shape)

    def below(self, high: int, *shape: int) -> Tensor:
        """Integers in [0, high), with repeats."""
        return torch.randint(high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.5

    def unique_rows(self, high: int, *shape: int, dim: int) -> Tensor:
        """Integers in [0, high), distinct along ``dim``."""
        order = torch.rand((*shape[:dim], high, *shape[dim + 1 :]), generator=self.generator).argsort(dim)
        return order.narrow(dim, 0, shape[dim])

    def chance(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)


def calls(*ops: str) -> Callable[[Callable[..., Example]], Callable[..., Example]]:
    """Declare ``function(draw)``, or ``function(draw, op)`` for several ops, as a generator of calls."""

    def declare(function: Callable[..., Example]) -> Callable[..., Example]:
        for op in ops:
            takes_op = function.__code__.co_argcount == 2

            def generate(draw: Draw, op: str = op, takes_op: bool = takes_op) -> Example:
                return function(draw, op) if takes_op else function(draw)

            GENERATORS.setdefault(op, []).append(generate)
        return function

    return declare
