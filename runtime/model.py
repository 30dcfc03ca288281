"""``fxpar.load``: a plan and the user's model become a model that trains on the plan's ranks.

The model stays the same object with the same module tree, names, ties and class (plus :class:`ParallelModule`); its
parameters become DTensors. Nothing is traced and nothing is solved here.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar.plans.codec import decode, encode, read_plan
from fxpar.plans.errors import FxparError, PlanFileError, PlanMismatch
from fxpar.plans.layout import layout_text, replicated
from fxpar.plans.plan import Decisions, Plan
from fxpar.plans.program import Program
from fxpar.rules.fingerprint import user_rules_digest
from fxpar.rules.registry import rule_for
from fxpar.runtime.binding import bind, structured
from fxpar.runtime.execute import build
from fxpar.runtime.groups import MeshGroups, connect
from fxpar.runtime.interpret import operator_of
from fxpar.runtime.local import LocalProgram
from fxpar.runtime.microbatches import MicrobatchRunner, build_pieces
from fxpar.runtime.parameters import differences, same_everywhere, shard, stored_tensors
from fxpar.runtime.rewrite.legality import collective_signature
from fxpar.runtime.rewrite.microbatches import Pieces, pieces, signature
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.runtime.step import Forward, PlanFunction, Runner, StepRunner

M = TypeVar("M", bound=nn.Module)
_NUMBERS = re.compile(r"((Optional|List)\[)*(Tensor|number|int|float|bool|complex)\]*$")


def load(plan: Plan | bytes | str | Path, model: M, *, group: dist.ProcessGroup | None = None, seed: int = 0) -> M:
    """Run ``model`` as the plan says.

    Args:
        plan: a plan, the bytes of a plan file, or its path.
        model: the model the plan was compiled for, with its values, the same on every rank (what differs is taken
            from rank 0). It is changed in place: its parameters become DTensors on the plan's mesh.
        group: the ranks to run on; all processes by default.
        seed: start of the random streams of dropout and the like, equal on all ranks.

    Returns:
        ``model``, now also a :class:`ParallelModule`.

    Raises:
        PlanFileError: the plan cannot be read or does not hold together.
        PlanMismatch: another model, another number of ranks, or another plan on another rank.
        FxparError: torch.distributed is not running and cannot be started.
    """
    if isinstance(model, ParallelModule):
        raise FxparError("the model is loaded already", way_out="call load on a freshly built model")
    decoded = plan if isinstance(plan, Plan) else decode(plan) if isinstance(plan, bytes) else read_plan(plan)
    if decoded.decisions.pipeline is not None:
        from fxpar.runtime.load_stages import load_stages  # it needs the checks below

        stages = load_stages(decoded, model, group)
        return cast(M, _become_parallel(model, _State(decoded.program, decoded.decisions, stages.groups, stages, seed)))
    groups = connect(decoded.decisions.mesh, group)
    problem: FxparError | None = None
    mark = ""
    try:
        check_ops(decoded.program)
        check_rules(decoded)
        check_surface(decoded.program, decoded.decisions)
        check_model(decoded, model)
        code, sequence = prepared(decoded, groups)
        mark = hashlib.sha256(encode(decoded)).hexdigest() + sequence
    except FxparError as error:
        problem = error
    agree(mark, problem, groups)
    same_everywhere(model, groups)
    parameters = shard(model, decoded.program, decoded.decisions.inputs, groups)
    runner = code(parameters)
    return cast(M, _become_parallel(model, _State(decoded.program, decoded.decisions, groups, runner, seed)))


def prepared(plan: Plan, groups: MeshGroups) -> tuple[Callable[[Mapping[int, nn.Parameter]], StepRunner], str]:
    """What makes this rank's runner of its parameters, and the hash of its sequence of collectives.

    Raises:
        PlanFileError: as :func:`rewritten`.
    """
    program, layouts = plan.program, plan.decisions.inputs
    local = rewritten(plan, groups.coords)
    if isinstance(local, Pieces):
        parts = local
        return (
            lambda parameters: MicrobatchRunner(program, layouts, build_pieces(parts, groups), groups, parameters),
            signature(parts),
        )
    whole = local
    return (
        lambda parameters: Runner(program, layouts, build(program, whole, groups), groups, parameters),
        collective_signature(whole),
    )


def rewritten(plan: Plan, coords: tuple[int, ...]) -> LocalProgram | Pieces:
    """The local program of the rank at ``coords``, in pieces where it repeats in time.

    Raises:
        PlanFileError: a node's arguments, or a decision, are not what its op takes.
    """
    try:
        if plan.program.time is not None:
            return pieces(plan.program, plan.decisions, coords)
        return rewrite(plan.program, plan.decisions, coords)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # rules trust the types of arguments: the compiler made them, a damaged or hostile file may not have
        raise PlanFileError(
            "the plan's program does not fit the rules of its ops", numbers=f"{type(error).__name__}: {error}",
            way_out="compile the plan again with `fxpar compile`",
        ) from error


def agree(
    mark: str, problem: FxparError | None, groups: MeshGroups, sequence: str = "", place: int = 0
) -> None:
    """Tell every rank whether all are fine and run the same plan.

    Args:
        mark: of the plan, the same on every rank.
        sequence: of this rank's collectives, the same on every rank at the same ``place`` of a pipeline.

    Raises:
        FxparError: this rank's problem, or that of the first rank that has one.
        PlanMismatch: two ranks have different plans.
    """
    told: list[Any] = [None] * groups.mesh.world_size
    mine = ((mark, place, sequence), None if problem is None else str(problem))
    dist.all_gather_object(told, mine, group=groups.everyone)
    if problem is not None:
        raise problem
    for rank, (_, text) in enumerate(told):
        if text is not None:
            raise PlanMismatch(f"rank {rank} cannot load the plan", numbers=text)
    first: dict[int, Any] = {}  # by place, what its first rank runs
    for (_mark, where, what), _text in told:
        first.setdefault(where, (told[0][0][0], what))
    others = [rank for rank, ((other, where, what), _) in enumerate(told) if (other, what) != first[where]]
    if others:
        raise PlanMismatch(
            f"ranks {', '.join(map(str, others))} have another plan than rank 0",
            way_out="give every rank the same plan file and the same versions of fxpar and torch",
        )


def check_ops(program: Program) -> None:
    """Refuse ops that a plan may not call: unknown ones, and undeclared ones that are no functions of tensors.

    Raises:
        PlanFileError: names the op.
    """
    for op in sorted({node.op for node in program.nodes}):
        try:
            schema = operator_of(op)._schema
        except (AttributeError, ValueError, RuntimeError) as error:
            raise PlanFileError(
                f"the plan uses the op {op}, which this torch does not have",
                way_out="import the module that registers it before loading, or compile again",
            ) from error
        takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
        # torch's own ops of tensors are harmless; another library's might open a file that a string names
        harmless = op.startswith("aten.") or all(_NUMBERS.match(str(a.type)) for a in schema.arguments)
        if rule_for(op) is None and (not harmless or not takes_tensors or schema.is_mutable):
            raise PlanFileError(
                f"the plan uses the op {op}, which has no rule here",
                way_out="register its rule (fxpar.rule) before loading, or compile again",
            )
    for node in program.nodes:
        schema = operator_of(node.op)._schema
        several = len(schema.returns) != 1 or str(schema.returns[0].type).startswith("List")
        if len(node.args) != len(schema.arguments) or not node.outputs or (len(node.outputs) > 1 and not several):
            raise PlanFileError(
                f"the plan calls {node.op} with {len(node.args)} arguments for {len(node.outputs)} results",
                where=node.module, numbers=f"its schema is {schema}",
                way_out="load it with the torch it was compiled with, or compile again",
            )


def check_rules(plan: Plan) -> None:
    """Refuse to run under other rules of the user's than the plan was made with: choices would mean other things.

    Raises:
        PlanMismatch: names the ops.
    """
    ops = sorted({node.op for node in plan.program.nodes})
    if plan.fingerprint.rules.partition("+")[2] != user_rules_digest(ops):
        foreign = [op for op in ops if not op.startswith(("aten.", "fxpar."))] or ops
        raise PlanMismatch(
            f"the rules declared here for {', '.join(foreign[:4])} are not those the plan was made with",
            way_out="declare the same rules (fxpar.rule) before loading, or compile again",
        )


def check_surface(program: Program, decisions: Decisions) -> None:
    """Refuse layouts that the surface cannot hold.

    Raises:
        PlanFileError: the loss or a buffer is left sharded, or a gradient not in its parameter's layout.
    """
    stored = {e.name: lay for e, lay in zip(program.inputs, decisions.inputs, strict=True) if e.kind == "parameter"}
    for output, layout in zip(program.outputs, decisions.outputs, strict=True):
        want = stored.get(output.name) if output.kind == "gradient" else replicated(decisions.mesh)
        if output.kind != "output" and layout != want:
            expected = "a parameter's layout" if want is None else layout_text(want)
            raise PlanFileError(
                f"the plan leaves the {output.kind} {output.name} as {layout_text(layout)}, not {expected}"
            )


def check_model(plan: Plan, model: nn.Module) -> None:
    """Refuse a model that is not the plan's.

    Raises:
        PlanMismatch: with every difference.
        FxparError: a parameter has no values (device meta).
    """
    found = differences(plan, model)
    if found:
        raise PlanMismatch(
            f"the plan is for another model: {found[0]}",
            numbers=found[1:],
            way_out="build the model as when the plan was compiled, or compile again",
        )
    empty = [s.names[0] for s in stored_tensors(model) if s.tensor.device.type == "meta"]
    if empty:
        raise FxparError(
            f"{empty[0]} and {len(empty) - 1} more parameters and buffers have no values (device meta)",
            way_out="build the model with values on every rank, outside torch.device('meta')",
        )


class _State:
    """What a parallel module carries besides its modules."""

    def __init__(
        self, program: Program, decisions: Decisions, groups: MeshGroups, runner: StepRunner, seed: int
    ) -> None:
        self.program, self.decisions, self.groups, self.runner = program, decisions, groups, runner
        self.seed, self.steps = seed, 0
        self.buffers = [(e.value, e.name, e.ties) for e in program.inputs if e.kind == "buffer"]
        rules = {op: rule_for(op) for op in {node.op for node in program.nodes}}
        self.draws = any(e.kind == "seed" for e in program.inputs) or any(r and r.random for r in rules.values())
        self.writes_buffers = any(o.kind == "buffer" for o in program.outputs)

    def next_seed(self) -> int:
        """The seed of the next forward."""
        self.steps += 1
        return step_seed(self.seed, self.steps - 1)


def step_seed(seed: int, step: int) -> int:
    """The seed that forward number ``step`` (from 0) draws from: 63 bits of a hash of (seed, step)."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


def _become_parallel(model: nn.Module, state: _State) -> nn.Module:
    cls = type(model)
    parallel = type(f"Parallel{cls.__name__}", (ParallelModule, cls), {"__module__": cls.__module__})
    # tools that look at forward's arguments (transformers' Trainer) must see the user's
    parallel.forward = functools.wraps(cls.forward)(_forward)  # type: ignore[attr-defined]
    model.__class__ = parallel
    object.__setattr__(model, "_fxpar", state)
    return model


class ParallelModule(nn.Module):
    """A model that runs as its plan says; made by :func:`load`, never directly.

    Calling it takes the GLOBAL batch (equal tensors on every rank, sliced here) and returns the model's output; only
    its loss can be differentiated. Gradients arrive in ``parameter.grad`` as DTensors and add up as autograd's do.
    """

    _fxpar: _State

    def step(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> torch.Tensor:
        """Forward and backward.

        Args:
            scale: the gradients are those of ``scale * loss`` (1 / number of calls, to accumulate a mean).

        Returns:
            The loss, detached, the same on every rank.

        Raises:
            FxparError: the inputs are not those the plan was compiled for.
        """
        with torch.enable_grad():
            loss, _ = _run(self, args, kwargs)
            if loss is None or not loss.requires_grad:
                raise FxparError("the plan has no backward", way_out="compile a training plan, and call model.train()")
            (loss * scale if scale != 1.0 else loss).backward()
        return loss.detach()

    def seed(self, seed: int) -> None:
        """Start the random streams of dropout and the like again; the same number on every rank."""
        self._fxpar.seed, self._fxpar.steps = seed, 0

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``; returns the norm before, on all ranks.

        The formula is that of ``torch.nn.utils.clip_grad_norm_``.
        """
        state = self._fxpar
        gradients = [p.grad for p in self.parameters() if isinstance(p.grad, DTensor)]
        total = _norm(gradients, float(norm_type), state.groups)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.to_local().mul_(factor.to(gradient.dtype))
        return total


def _norm(gradients: Iterable[DTensor], norm_type: float, groups: MeshGroups) -> torch.Tensor:
    """Joint norm of all gradients. Every element counts once: a rank's part is divided by its number of copies."""
    total = torch.zeros((), dtype=torch.float64, device=groups.device)
    for gradient in gradients:
        local = gradient.to_local()
        if not local.numel():
            continue
        norm = torch.linalg.vector_norm(local, norm_type, dtype=_norm_dtype(local)).double()
        if norm_type == float("inf"):
            total = torch.maximum(total, norm)
            continue
        copies = 1
        for placement, ranks in zip(gradient.placements, groups.mesh.sizes, strict=True):
            copies *= ranks if placement.is_replicate() else 1
        total += norm**norm_type / copies
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=groups.everyone)
        return total
    dist.all_reduce(total, group=groups.everyone)
    return total ** (1.0 / norm_type)


def _norm_dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32


def _forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
    """The model's output for the global batch."""
    loss, run = _run(self, args, kwargs)
    state = self._fxpar

    def value(index: int) -> torch.Tensor:
        if state.program.outputs[index].kind == "loss" and loss is not None:
            return loss
        return state.runner.output(run, index, state.decisions.outputs[index])

    return structured(state.program.structure, value)


def _run(model: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, Forward]:
    state = model._fxpar
    if not model.training and (state.draws or state.writes_buffers):
        what = "draws random numbers (dropout)" if state.draws else "updates buffers (batch norm)"
        raise FxparError(
            f"the model is in eval mode, and the plan's only program {what}",
            way_out="call model.train(), or evaluate the saved weights on one device",
        )
    tensors = bind(state.program, args, kwargs)
    for value, name, _ in state.buffers:
        tensors[value] = model.get_buffer(name)
    run = state.runner.forward(tensors, state.next_seed(), gradients=torch.is_grad_enabled())
    loss: torch.Tensor | None = None
    for index, result in run.results.items():
        output = state.program.outputs[index]
        if output.kind == "loss":
            loss = result
        elif output.kind == "buffer":
            with torch.no_grad():
                model.get_buffer(output.name).copy_(result)
    if loss is not None and torch.is_grad_enabled() and state.runner.gradients:
        loss = PlanFunction.apply(
            state.runner, run, loss, *(state.runner.parameters[v] for v in state.runner.trained)
        )
    return loss, run
