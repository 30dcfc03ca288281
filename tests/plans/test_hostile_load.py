"""A hostile plan with a right checksum, loaded on a rank: nothing of it runs, imports or becomes source text."""

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from fxpar.plans.codec import encode
from fxpar.plans.errors import FxparError, PlanFileError
from fxpar.plans.plan import Plan
from fxpar.plans.program import Dtype, Ref, TensorType
from fxpar.runtime.model import load
from fxpar.verify import verify_plan
from tests.compiled import mlp_plan, mlp_source
from tests.runtime.ranks import run_ranks, values
from tests.runtime.tiny_models import captured, random_plan

replace = msgspec.structs.replace


def model() -> nn.Module:
    torch.manual_seed(0)
    return Wrapped(mlp_source().build())


class Wrapped(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x, scale: float = 1.0):
        return {"loss": (self.body(x) * scale).square().mean()}


def inputs() -> torch.Tensor:
    return mlp_source().example_inputs()[0][0]


@cache
def plan() -> Plan:
    return random_plan(captured(model(), (inputs(),), {}), "1", seed=0)


def attack(mark: str) -> str:
    """Python that leaves a file, should anyone run it."""
    return f"__import__('pathlib').Path({mark!r}).touch()"


def texts(mark: str) -> list[str]:
    code = attack(mark)
    return [code, f"x={code}", f"x): {code} #", f"x\n    {code}\n", f"'+{code}+'", f'"""{code}"""', "x=print(1)",
            "__import__('os').system('true')", "self", "boxed", "v1", "lambda: 0", "{0.__class__}"]


def with_program(**changes: Any) -> Plan:
    base = plan()
    return replace(base, program=replace(base.program, **changes))


def with_node(index: int, **changes: Any) -> Plan:
    nodes = list(plan().program.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return with_program(nodes=tuple(nodes))


def labels(mark: str) -> list[Plan]:
    """Text in every place that is only a label."""
    base = plan()
    found = []
    for text in texts(mark):
        found.append(with_node(0, module=text, source=text))
        found.append(replace(base, cluster=text, provenance=((text, text),),
                             fingerprint=replace(base.fingerprint, modules=((text, text),))))
        found.append(with_program(structure=("object", text, (text,), ("value", 0))))
        found.append(with_program(inputs=tuple(
            replace(i, name=text) if i.kind in ("input", "tangent") else i for i in base.program.inputs
        ), call=(text,), baked=((text, text),)))
    return found


def outcomes(rank: int, files: list[bytes]) -> list[str]:
    """Load every file and try a step; what became of it."""
    result = []
    for data in files:
        try:
            loaded = load(data, model())
        except FxparError as error:
            result.append(f"{type(error).__name__}: {error}")
            continue
        try:
            loaded.step(inputs())
            result.append("ran")
        except (FxparError, RuntimeError, TypeError, ValueError) as error:
            result.append(f"at the step {type(error).__name__}: {error}")
    return result


def calls_that_do_not_fit(mark: str) -> list[Plan]:
    base = plan()
    ref = next(a for a in base.program.nodes[0].args if isinstance(a, Ref))
    plans = [with_node(0, args=args) for args in [(), (ref,) * 2, (ref,) * 9, (1,), ("x",), ((ref,),),
             (Dtype("float32"),), (None,), (float("inf"),), (attack(mark),)]]
    plans += [with_node(0, outputs=(base.program.nodes[0].outputs[0], -1)), with_node(0, outputs=())]
    for kind in ("parameter", "input"):
        item = next(i for i in base.program.inputs if i.kind == kind)
        types = list(base.program.types)
        types[item.value] = TensorType(types[item.value].shape, "bool")
        plans.append(with_program(types=tuple(types)))
    return plans


def string_arguments(mark: str) -> list[Plan]:
    at, node = next((i, n) for i, n in enumerate(plan().program.nodes) if n.phase == "forward" and "relu" in n.op)
    return [
        with_node(at, op="aten.div.Tensor_mode", args=(node.args[0], node.args[0], text))
        for text in ["floor", *texts(mark)]
    ]


CHOICES = ["f99", "p7", "f0+9", "f-1", "x", "", "F0", "f0 ", "f\u0660", "f0+", "f+", "..", "f1e3"]


def unknown_choices() -> list[Plan]:
    base = plan()
    return [
        replace(base, decisions=replace(base.decisions, choices=((name,), *base.decisions.choices[1:])))
        for name in CHOICES
    ]


def other_outputs() -> list[Plan]:
    base = plan()
    rng = random.Random(0)
    plans = []
    for _ in range(20):
        outputs = list(base.program.outputs)
        at = rng.randrange(len(outputs))
        outputs[at] = replace(outputs[at], value=rng.randrange(len(base.program.types)))
        plans.append(with_program(outputs=tuple(outputs)))
    return plans


def parameters_of_other_names(mark: str) -> list[Plan]:
    base = plan()
    item = next(i for i in base.program.inputs if i.kind == "parameter")
    plans = []
    for text in texts(mark):
        plans.append(with_program(
            inputs=tuple(replace(i, name=text) if i is item else i for i in base.program.inputs),
            outputs=tuple(
                replace(o, name=text) if o.kind == "gradient" and o.name == item.name else o
                for o in base.program.outputs
            ),
        ))
    return plans


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What became of every plan, by kind; all are loaded one after the other on one rank."""
    mark = str(tmp_path_factory.mktemp("hostile") / "mark")
    plans = {
        "labels": [plan(), *labels(mark)],
        "ops": [with_node(0, op=op) for op in ops(mark)],
        "calls": calls_that_do_not_fit(mark),
        "strings": string_arguments(mark),
        "choices": unknown_choices(),
        "outputs": other_outputs(),
        "names": parameters_of_other_names(mark),
    }
    (texts_of,) = values(run_ranks(outcomes, 1, [encode(p) for row in plans.values() for p in row]))
    rest = iter(texts_of)
    return {"mark": mark, **{kind: [next(rest) for _ in row] for kind, row in plans.items()}}


def test_nothing_of_them_ran(found):
    assert not Path(found["mark"]).exists()


def test_labels_are_inert(found):
    assert found["labels"][0] == "ran"
    assert [t for t in found["labels"] if not re.match(r"ran$|(at the step )?FxparError: ", t)] == []
    assert found["labels"].count("ran") > len(texts(""))


OPS = ["os.system.default", "aten.__class__.__init__", "aten.mm.__call__", "builtins.eval.default", "aten.mm", "",
       "a.b.c.d", "aten.no_such_op.default", "aten.from_file.default", "aten.set_.source_Tensor", "aten.save.default",
       "loaded_libraries.add.x", "load_library.__self__.__class__", "aten.mm.default\n", "prim.Print.default",
       "fxpar.nothing.default", "_c10d_functional.all_reduce.default", "c10d.barrier.default", "_dir.x.y"]


def ops(mark: str) -> list[str]:
    return [*OPS, *texts(mark), f"aten.mm.{attack(mark)}", f"{attack(mark)}.mm.default"]


def test_ops_that_have_no_rule_are_refused_by_name(found):
    for op, text in zip(ops(found["mark"]), found["ops"], strict=True):
        assert text.startswith("PlanFileError: "), (op, text)
        assert op.strip().partition("\n")[0] in text, (op, text)


def test_calls_that_do_not_fit_their_schema_are_refused(found):
    """Types of arguments are torch's to judge, at the step."""
    calls = found["calls"]
    assert [t for t in calls if not re.match(r"(PlanFileError|PlanMismatch|at the step \w+): ", t)] == []
    assert [t for t in calls[:3] + calls[10:12] if not t.startswith("PlanFileError: ")] == []


def test_string_arguments_stay_strings(found):
    """An op that takes a string gets it quoted, whatever is in it."""
    assert found["strings"][0] == "ran"
    assert [t for t in found["strings"][1:] if not re.match("PlanFileError|at the step RuntimeError", t)] == []


def test_choices_that_do_not_exist_are_refused(found):
    for name, text in zip(CHOICES, found["choices"], strict=True):
        assert text.startswith("PlanFileError: ") and repr(name) in text, (name, text)


def test_another_loss_or_gradient_is_refused(found):
    assert [t for t in found["outputs"] if not re.match("ran$|PlanFileError|(at the step )?FxparError", t)] == []


def test_names_of_parameters_are_looked_up_never_run(found):
    assert [t for t in found["names"] if not t.startswith("PlanMismatch: ")] == []


def test_verify_refuses_them_too():
    base = mlp_plan("2")
    source = mlp_source()
    for op in ("aten.from_file.default", "os.system.default"):
        nodes = (replace(base.program.nodes[0], op=op), *base.program.nodes[1:])
        with pytest.raises(PlanFileError, match=re.escape(op)):
            verify_plan(replace(base, program=replace(base.program, nodes=nodes)), source)
