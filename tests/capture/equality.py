"""Comparing a captured program with eager, in single and in double precision."""

import copy
import logging

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpar.capture import capture
from fxpar.capture.compare import eager_step, example_values
from fxpar.capture.outputs import loss_of
from fxpar.capture.retype import retype
from fxpar.runtime.interpret import run_global

torch.set_num_threads(1)
logging.getLogger("torch.__trace").propagate = False  # pytest would render and keep thousands of records
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class InDouble(TorchDispatchMode):
    """Every cast and creation in single precision becomes one in double, as ``retype`` does to a program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def widen(arg):
            return WIDER.get(arg, arg) if isinstance(arg, torch.dtype) else arg

        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


def widened(tree):
    """Single precision tensors of a pytree in double."""
    return pytree.tree_map(lambda t: t.to(WIDER.get(t.dtype, t.dtype)) if isinstance(t, torch.Tensor) else t, tree)


def widened_model(model):
    twin = copy.deepcopy(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        tensor.data = tensor.data.to(WIDER.get(tensor.dtype, tensor.dtype))
    return twin


def run_program(program, model, args, kwargs, seed=0):
    """{(kind, name): tensor}."""
    results = run_global(program, example_values(program, model, args, kwargs, seed=seed))
    for output, tensor in zip(program.outputs, results, strict=True):
        kind = program.types[output.value]
        assert (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) == (kind.shape, kind.dtype), output
    return {(output.kind, output.name): tensor for output, tensor in zip(program.outputs, results, strict=True)}


def difference(got, want):
    """Largest absolute difference over the largest entry (at least 0.1)."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    if not want.numel() or want.dtype == torch.bool:
        return float(not torch.equal(got, want))
    return float((got - want).abs().max()) / max(float(want.abs().max()), 0.1)


def assert_equals_eager(model, args, kwargs, loss=None, *, double=True, tolerance=1e-5):
    """Capture; loss, gradients (the same Nones), buffers and outputs equal eager's. Returns the program."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    program = capture(model, args, kwargs, loss=loss, outputs="all")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    compare(program, model, args, kwargs, loss, tolerance)
    if double:
        args, kwargs = widened((args, kwargs))
        with InDouble():
            compare(retype(program, {"float32": "float64"}), widened_model(model), args, kwargs, loss, 1e-9)
    return program


def compare(program, model, args, kwargs, loss, tolerance):
    got = run_program(program, model, args, kwargs)
    value, gradients = eager_step(model, args, kwargs, loss)
    assert difference(got[("loss", "loss")], value) < tolerance
    assert {name for kind, name in got if kind == "gradient"} == {n for n, g in gradients.items() if g is not None}
    for name, gradient in gradients.items():
        if gradient is not None:
            assert difference(got[("gradient", name)], gradient) < tolerance, name
    twin = copy.deepcopy(model)
    with torch.no_grad():
        inputs = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, (args, kwargs))
        output = twin(*inputs[0], **inputs[1])
    old = dict(model.named_buffers())
    for name, buffer in twin.named_buffers():
        want = got.get(("buffer", name), old[name])
        assert difference(want, buffer) < tolerance, name
    own_loss = loss_of(output) if loss is None else None
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t is not own_loss]
    mine = [tensor for (kind, _), tensor in got.items() if kind == "output"]
    assert len(mine) == len({id(leaf) for leaf in leaves})
    for one, two in zip(mine, leaves, strict=True):
        assert difference(one, two) < tolerance
