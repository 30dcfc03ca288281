"""The numbers a plan must reproduce: one process, eager, on the whole batch.

Judged in float64 the reference must not round in between, so every narrower dtype that the model asks for by name
(``.float()``, ``dtype=torch.bfloat16``) is answered in float64, as the plan's retyped program does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpar.capture.retype import ALL_DOUBLE
from fxpar.model_source import ModelSource
from fxpar.plans.program import Program
from fxpar.runtime.binding import leaf_paths
from fxpar.runtime.interpret import run_global
from fxpar.runtime.pieces import input_of_microbatch, join_microbatches
from fxpar.step_values import StepResults, input_values, named_parameters, named_results

DTYPES = {"f32": torch.float32, "f64": torch.float64}
TRAIN_STEPS = 3
CLIP_NORM = 1.0
_WIDER = {getattr(torch, old): getattr(torch, new) for old, new in ALL_DOUBLE.items()}
_CASTS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)


@dataclass(frozen=True)
class Training:
    """A short training: the loss and the gradient norm of every step, and the parameters after the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class _Wider(TorchFunctionMode):
    """A narrower dtype asked for by name becomes float64; an op without a float64 kernel is computed from others."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        if func is torch._grouped_mm:
            return grouped_product(*args, **kwargs)
        args, kwargs = pytree.tree_map(
            lambda leaf: _WIDER.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf, (args, kwargs)
        )
        return func(*args, **kwargs)


def grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``torch._grouped_mm`` by one matmul a group, of any dtype: torch has no float64 kernel for it.

    ``[s, k] x [g, k, n] -> [s, n]``, rows of group i end at ``offs[i]``, rows behind the last group are 0;
    ``[g, s, k] x [k, n] -> [s, n]`` groups columns; ``[m, s] x [s, n] -> [g, m, n]`` groups the contracted dim; without
    ``offs`` a batched product. ``out_dtype`` is not looked at: everything is computed and returned in ``a``'s dtype.
    """
    if offs is None:
        product = a @ b
    else:
        ends = [int(end) for end in offs]
        cuts = [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]
        if a.dim() == b.dim() == 2:
            product = torch.stack([a[:, cut] @ b[cut] for cut in cuts])
        elif a.dim() == 2:
            parts = [a[cut] @ b[group] for group, cut in enumerate(cuts)]
            product = torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
        else:
            parts = [a[group] @ b[:, cut] for group, cut in enumerate(cuts)]
            product = torch.cat([*parts, a.new_zeros(a.shape[1], b.shape[-1] - ends[-1])], dim=-1)
    return product if bias is None else product + bias


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Everything inside runs as it is (``dtype`` float32), or in float64: nothing is rounded to less."""
    if dtype is not torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)


def widen(tree: Any, dtype: torch.dtype) -> Any:
    """Tensors of a pytree as detached copies; for float64 narrower ones are made double."""
    table = _WIDER if dtype is torch.float64 else {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().to(table.get(leaf.dtype, leaf.dtype))

    return pytree.tree_map(one, tree)


def widen_module(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model as it is (``dtype`` float32), or with all its floating parameters and buffers in float64; ties stay."""
    if dtype is torch.float64:
        narrow = [b for b in model.buffers() if b.dtype in _WIDER]
        wide = {id(buffer): widen(buffer, dtype) for buffer in narrow}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(_WIDER.get(parameter.dtype, parameter.dtype))
            for name, buffer in module._buffers.items():
                if id(buffer) in wide:
                    module._buffers[name] = wide[id(buffer)]
    return model


def built(source: ModelSource, dtype: torch.dtype, state: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
    """The model on the CPU, deterministic, in ``dtype``, optionally with the weights of ``state``."""
    torch.manual_seed(source.seed)
    model = source.build()
    if state is not None:
        model.load_state_dict(state)
    return widen_module(model, dtype)


class EagerStep:
    """Steps of the model itself; each leaves its gradients in ``.grad``."""

    def __init__(self, source: ModelSource, model: nn.Module, dtype: torch.dtype) -> None:
        self.source, self.model, self.dtype = source, model, dtype

    def __call__(self) -> StepResults:
        """One forward and backward."""
        args, kwargs = widen(self.source.example_inputs(), self.dtype)
        with computing_in(self.dtype):
            torch.manual_seed(self.source.seed + 1)
            output = self.model(*args, **kwargs)
            loss = self.source.loss(output, (args, kwargs))
            loss.backward()
        outputs = tuple(t.detach().clone() for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor))
        return StepResults(loss.detach(), gradients_of(self.model), buffers_of(self.model), outputs)


class ProgramStep:
    """Steps of a program run whole in this process: the reference of one that draws random numbers."""

    def __init__(
        self, program: Program, source: ModelSource, model: nn.Module, dtype: torch.dtype, seed_of: Callable[[int], int]
    ) -> None:
        self.program, self.source, self.model, self.dtype, self.seed_of = program, source, model, dtype, seed_of
        self.count = 0
        self.run = run_global if program.time is None else run_repeated

    def __call__(self) -> StepResults:
        """One step on the model's current weights; step ``i`` draws from ``seed_of(i)``."""
        args, kwargs = widen(self.source.example_inputs(), self.dtype)
        values = input_values(self.program, self.model, args, kwargs, seed=self.seed_of(self.count))
        self.count += 1
        results = named_results(self.program, self.model, self.run(self.program, values))
        for name, parameter in named_parameters(self.model):
            gradient = results.gradients[name]
            # a copy: clipping writes to .grad
            parameter.grad = None if gradient is None else gradient.clone()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers(remove_duplicate=False):
                buffer.copy_(results.buffers[name])
        return results


class EagerMicrobatches(EagerStep):
    """Steps of the model itself in microbatches, each a batch of its own; loss and gradients are averaged.

    ``program``: repeats in time, says which arguments are cut and how outputs join.
    """

    def __init__(self, source: ModelSource, model: nn.Module, dtype: torch.dtype, program: Program) -> None:
        super().__init__(source, model, dtype)
        assert program.time is not None
        self.program, self.time = program, program.time
        self.cuts = {i.name: cut for i, cut in zip(program.inputs, self.time.inputs, strict=True) if i.kind == "input"}

    def __call__(self) -> StepResults:
        """Forward and backward of every microbatch, in order."""
        count, total = self.time.count, torch.zeros(())
        for number in range(count):
            args, kwargs = widen(self.part(*self.source.example_inputs(), number), self.dtype)
            with computing_in(self.dtype):
                torch.manual_seed(self.source.seed + 1)
                loss = self.source.loss(self.model(*args, **kwargs), (args, kwargs)) / count
                loss.backward()
            total = total + loss.detach()
        return StepResults(total.to(loss.dtype), gradients_of(self.model), buffers_of(self.model))

    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> tuple[Any, ...]:
        """The call of one microbatch."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        for place, (name, leaf) in enumerate(leaf_paths(self.program.call, args, kwargs)):
            dim = self.cuts.get(name, -1)
            if dim >= 0 and isinstance(leaf, torch.Tensor):
                length = leaf.shape[dim] // self.time.count
                leaves[place] = leaf.narrow(dim, number * length, length)
        return pytree.tree_unflatten(leaves, tree)


def run_repeated(program: Program, values: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Run a program whose microbatches hang together by nothing but their buffers on whole tensors, one after the
    other; ``values`` as for ``run_global``, of the whole batch. Returns one tensor per output."""
    assert program.time is not None and not program.time.once
    handed_on = dict(values)
    found: list[list[torch.Tensor]] = []
    buffers = {i.name: i.value for i in program.inputs if i.kind == "buffer"}
    for number in range(program.time.count):
        of_one = {
            i.value: input_of_microbatch(program, position, handed_on, number)
            for position, i in enumerate(program.inputs)
        }
        found.append(run_global(program, of_one))
        for output, join, tensor in zip(program.outputs, program.time.outputs, found[-1], strict=True):
            if join == "chain":
                handed_on[buffers[output.name]] = tensor
    rows = zip(*found, strict=True)
    return [join_microbatches(row, join) for row, join in zip(rows, program.time.outputs, strict=True)]


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients, under every name."""
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in named_parameters(model)}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all buffers, under every name."""
    return {n: b.detach().clone() for n, b in model.named_buffers(remove_duplicate=False)}


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an eps that does not blow up rounding noise in tiny gradients."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.01)


def train(
    model: nn.Module, first: torch.Tensor, step: Callable[[], torch.Tensor],
    clip: Callable[[list[nn.Parameter]], torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor],
) -> Training:
    """``TRAIN_STEPS`` steps of AdamW with clipping; the gradients of the first step are there already.

    Args:
        first: the loss of the first step.
        step: a further step: gradients into ``.grad``, returns the loss.
        clip: clips the gradients of the trained parameters to ``CLIP_NORM`` and returns the norm before.
        whole: a parameter as one plain tensor.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(trained)
    losses, norms = [float(first)], []
    for index in range(TRAIN_STEPS):
        if index:
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(step()))
        norms.append(float(clip(trained)))
        optimizer.step()
    return Training(losses, norms, {n: whole(p.detach()).clone() for n, p in named_parameters(model)})


def train_one_process(model: nn.Module, first: torch.Tensor, step: Callable[[], StepResults]) -> Training:
    """The reference training of :func:`train`."""
    return train(
        model, first, lambda: step().loss,
        lambda trained: torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM), lambda tensor: tensor,
    )
