"""How many bytes of tensors are alive while a block runs: counted from the tensors themselves, on any device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.runtime.collectives import WAIT

SETTLING_SECONDS = 0.002
"""After a collective: a thread of gloo lets go of what it sent as soon as it runs again and gets Python's lock. It is
waited for, as how long that takes says nothing of the plan."""


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an op's result lives in, once, from the op on until its last tensor is gone.

        with LiveBytes(counted=parameters, known=batch) as live:
            step()
        live.peak

    Args:
        counted: tensors that are there already and count from the start.
        known: tensors that are there already and never count, nor does any view of them.
    """

    def __init__(self, counted: Iterable[torch.Tensor], known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._holders: dict[int, int] = {}
        self._outside = {t.untyped_storage().data_ptr() for t in known}
        self._before = [t for t in counted]
        for tensor in self._before:
            self._track(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is WAIT:
            time.sleep(SETTLING_SECONDS)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._track(getattr(leaf, "_local_tensor", leaf))
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return  # another stage's parameter
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._outside:
            return
        if key not in self._holders:
            self._holders[key] = 0
            self.live += size
            self.peak = max(self.peak, self.live)
        self._holders[key] += 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= size
