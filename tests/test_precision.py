"""bfloat16 over float32: the surface is float32, what is computed is bfloat16, gradients are never summed in it."""

import msgspec
import pytest
import torch
from torch import nn

from fxpar.captured import capture_program
from fxpar.compile import compile_model
from fxpar.formulate import formulate
from fxpar.model_source import ModelSource
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.precision import (
    COMPUTE,
    STORED,
    float32_inputs,
    inputs_in_bf16,
    parameters_in_bf16,
    reduced_early,
    with_float32_surface,
)
from fxpar.progress import silent
from fxpar.rules.ops.hub import HUB
from fxpar.runtime.interpret import run_global
from fxpar.runtime.local import CollectiveStep, LocalProgram, OpStep
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.runtime.virtual import run_virtual
from fxpar.solver.random_assignment import random_assignment
from tests.compiled import VOCAB, adamw, decoder_plan, decoder_program, mlp_plan, mlp_program, prices

torch.set_num_threads(1)


def test_parameters_come_back_as_they_were():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    model.add_module("tied", nn.Linear(3, 3, bias=False))
    model.tied.weight = model[0].weight
    before = {n: (p, p.data_ptr()) for n, p in model.named_parameters(remove_duplicate=False)}
    with pytest.raises(ZeroDivisionError):
        with parameters_in_bf16(model) as names:
            assert names == {"0.weight", "0.bias", "tied.weight"}
            assert model[0].weight.dtype is torch.bfloat16 and model[1].weight.dtype is torch.float64
            assert model.tied.weight is model[0].weight
            raise ZeroDivisionError
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert (parameter, parameter.data_ptr()) == before[name]


def test_inputs():
    tree = (torch.zeros(2), {"a": torch.zeros(2, dtype=torch.int64), "b": 1.5})
    cast = inputs_in_bf16(tree)
    assert cast[0].dtype is torch.bfloat16 and cast[1]["a"].dtype is torch.int64 and cast[1]["b"] == 1.5
    assert float32_inputs(tree) and not float32_inputs(cast) and not float32_inputs(())


@pytest.mark.parametrize("make", [mlp_program, decoder_program])
def test_the_surface_is_that_of_the_float32_program(make):
    half, full = make(precision="bf16"), make()

    def surface(p: Program):
        inputs = [(i.kind, i.name, p.types[i.value]) for i in p.inputs if i.kind in ("parameter", "buffer", "input")]
        return inputs, [(o.kind, o.name, p.types[o.value]) for o in p.outputs if o.kind == "gradient"]

    assert surface(half) == surface(full)
    products = [n for n in half.nodes if n.op in ("aten.mm.default", "aten.addmm.default")]
    assert products and all(half.types[n.outputs[0]].dtype == COMPUTE for n in products)
    casts = [n for n in half.nodes if n.source == "mixed precision"]
    assert len(casts) == len(surface(half)[1]) * 2 + (make is mlp_program)
    assert with_float32_surface(full, frozenset(), False) == msgspec.structs.replace(full)


def test_it_computes_what_autocast_weights_would():
    """Against the model itself in bfloat16, to the bit."""
    program = mlp_program(precision="bf16")
    torch.manual_seed(0)
    values = {i.value: torch.randn(program.types[i.value].shape) for i in program.inputs if i.kind != "tangent"}
    values |= {i.value: torch.ones((), dtype=getattr(torch, program.types[i.value].dtype))
               for i in program.inputs if i.kind == "tangent"}
    results = run_global(program, values)
    named = {i.name: values[i.value] for i in program.inputs}
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16), nn.Linear(16, 24), nn.ReLU(),
                          nn.Linear(24, 16))
    model.load_state_dict({n: named[n] for n, _ in model.named_parameters()})
    model.bfloat16()
    loss = model(next(t for n, t in named.items() if t.shape == (8, 16)).bfloat16()).square().mean()
    loss.backward()
    for output, got in zip(program.outputs, results, strict=True):
        want = loss.detach() if output.kind == "loss" else model.get_parameter(output.name).grad
        assert torch.equal(got, want.to(got.dtype)), output
        assert got.dtype is torch.float32 or output.kind == "loss"


def check_gradients(program: Program, local: LocalProgram) -> int:
    """From every gradient back to its first real op: all sums are float32. How many sums there are."""
    made = {v: s for s in local.steps for v in s.writes}
    sums = 0
    queue = [v for o, v in zip(program.outputs, local.outputs, strict=True) if o.kind == "gradient"]
    while queue:
        value = queue.pop()
        step = made.get(value)
        if isinstance(step, CollectiveStep):
            if step.kind in ("all_reduce", "reduce_scatter"):
                assert step.dtype == STORED, step
                sums += 1
            queue.append(step.values[step.outputs.index(value)])
        elif isinstance(step, OpStep):
            if step.node in reduced_early(program):
                queue += step.operands
        elif step is not None:
            queue.append(step.value)
    return sums


@pytest.mark.parametrize(("make", "mesh"), [(mlp_plan, "dp=2"), (mlp_plan, "dp=2,tp=2"), (decoder_plan, "dp=2")])
def test_gradients_are_summed_in_float32(make, mesh):
    plan = make(mesh, precision="bf16")
    local = rewrite(plan.program, plan.decisions, (0,) * len(plan.decisions.mesh.axes))
    assert check_gradients(plan.program, local) >= 8
    # a small parameter may be gathered as it is stored, in a bucket with others; what is computed travels in bfloat16
    stored = {i.value for i in plan.program.inputs}
    assert all(s.dtype == COMPUTE for s in local.steps if isinstance(s, CollectiveStep) and s.phase == "forward"
               and len(local.types[s.outputs[0]].shape) > 1 and local.origins[s.outputs[0]][0] not in stored)


class Tied(nn.Module):
    """An embedding that is also the head: its gradient is a sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.embed(ids) @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def tied_source() -> ModelSource:
    return ModelSource("tied", Tied, lambda: ((torch.arange(32).reshape(8, 4),), {}), lambda o, _: o,
                       torch.optim.SGD, batch_dim=0)


def test_no_plan_at_all_sums_gradients_in_bfloat16():
    """Also where a gradient is the sum of two uses: neither is reduced before they are added and cast."""
    program = capture_program(tied_source(), outputs=("loss",), precision="bf16", progress=silent)[0]
    assert any(n.op == "aten.add.Tensor" and n.phase == "backward" for n in program.nodes)
    sums = 0
    for drawn, seed in [(p, s) for p in (program, decoder_program(precision="bf16")) for s in range(6)]:
        form = formulate(drawn, parse_mesh("2x2"), prices("2x2"), budget_bytes=None, optimizer_bytes=adamw)
        decisions = form.decisions(random_assignment(form.problem, seed))
        sums += check_gradients(drawn, rewrite(drawn, decisions, (0, 0)))
    assert sums > 10


def test_the_guard_covers_the_cast_and_what_it_reads_through():
    program = decoder_program(precision="bf16")
    guarded = reduced_early(program)
    casts = {i for i, n in enumerate(program.nodes) if n.source == "mixed precision" and n.phase == "backward"}
    assert casts <= guarded
    read_through = {program.nodes[i].op for i in guarded} - {"aten._to_copy.default"}
    assert read_through and read_through <= {
        "aten.t.default", "aten.permute.default", "aten.transpose.int", "aten.view.default", HUB
    }
    assert all(program.nodes[i].phase == "backward" for i in guarded)
    assert reduced_early(decoder_program()) == frozenset()


def test_virtual_ranks_agree_within_bfloat16():
    plan = compile_model(tied_source(), mesh="dp=2", precision="bf16").plan
    program = plan.program
    values = {}
    for item in program.inputs:
        kind = program.types[item.value]
        generator = torch.Generator().manual_seed(item.value)
        if kind.dtype == "int64":
            values[item.value] = torch.randint(0, VOCAB, kind.shape, generator=generator)
        else:
            values[item.value] = torch.randn(kind.shape, generator=generator).to(getattr(torch, kind.dtype))
    values |= {i.value: torch.ones_like(values[i.value]) for i in program.inputs if i.kind == "tangent"}
    assert isinstance(plan.decisions, Decisions)
    result = run_virtual(program, plan.decisions, values)
    for got, want in zip(result.outputs, run_global(program, values), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.abs().max()))
    assert max(result.disagreement) == 0.0
