"""The numeric problem that a plan answered, made again from the plan alone.

In: a plan (program, mesh, cluster, certificate's question). Out: prices and the Formulation, the same numbers as when
the plan was made, or an error that says why not.
"""

from __future__ import annotations

import msgspec

from fxpar.constraints import apply, filters, read_constraints
from fxpar.cost.cluster import Cluster, parse_cluster, preset_names
from fxpar.formulate import Formulation, formulate, with_temporaries
from fxpar.names import batch_class, classes_of
from fxpar.often import InTime
from fxpar.plans.errors import PlanFileError
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Plan, Question
from fxpar.plans.program import Program
from fxpar.prices import Prices
from fxpar.restrict import Restriction, weight_operands, weight_values
from fxpar.splits import named_dims


def plan_cluster(plan: Plan) -> Cluster:
    """The machine that a plan was priced for: the rates in it, or (older plans) those its cluster's name has here.

    Raises:
        FxparError: the name is not known here. PlanFileError: the rates in the plan are not a cluster.
    """
    question = plan.certificate.question
    if question is None:
        return named_cluster(plan)
    try:
        return msgspec.json.decode(question.rates, type=Cluster)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PlanFileError("the plan's cluster rates cannot be read", numbers=str(error),
                            way_out="compile the plan again with `fxpar compile`") from error


def named_cluster(plan: Plan) -> Cluster:
    """What the plan's cluster name stands for here.

    Raises:
        FxparError: the name is not known here.
    """
    # a plan made without --cluster names the machine alone
    alone = plan.cluster in preset_names()
    return parse_cluster(f"{plan.decisions.mesh.world_size}:{plan.cluster}" if alone else plan.cluster)


def formulate_question(
    program: Program, mesh: Mesh, prices: Prices, question: Question, recompute: tuple[int, ...]
) -> Formulation:
    """The Formulation that a certificate's question describes.

    Args:
        recompute: the forward nodes that run again, where the question does not leave them free.

    Raises:
        Infeasible: the roles or constraints leave some node or input without any choice.
        FxparError: the constraints do not fit the program.
    """
    sizes = {item.name: size for item, size in zip(program.inputs, question.optimizer_bytes, strict=True)
             if item.kind == "parameter"}
    restriction = role_restriction(program, question) if any(question.roles) else None
    constraints = read_constraints(question.zero, question.pins)
    applied = apply(constraints, program, mesh, named_dims(program, question.batch_dim)) if constraints else None
    node_filter, input_filter = filters(restriction, applied)
    made = formulate(
        program, mesh, prices,
        budget_bytes=None if question.budget_units is None else question.budget_units * question.memory_unit,
        optimizer_bytes=lambda dtype, name: sizes[name],
        recompute=None if question.recompute_free else recompute, reuse=question.reuse,
        node_filter=node_filter, input_filter=input_filter, unit=question.memory_unit,
        in_time=InTime(question.reduce_each, question.hold),
    )
    return with_temporaries(made, prices, question.temporaries) if question.temporaries else made


def role_restriction(program: Program, question: Question) -> Restriction:
    """Filters for mesh axes in the question's roles."""
    classes = classes_of(program)
    batch = frozenset(batch_class(program, question.batch_dim))
    weights = weight_operands(program)
    return Restriction(
        program, question.roles,
        lambda node, factor: classes.of_factor[node][factor] in batch,
        lambda item, dim, atom: classes.of_atom[program.inputs[item].value][dim][atom] in batch,
        weights, weight_values(program, weights), question.parameters_cut,
    )


def formulate_again(plan: Plan) -> tuple[Formulation, Prices] | None:
    """The problem of a plan's certificate with the prices it was made with; None when the plan does not say which.

    Raises:
        FxparError: the rates cannot be read, or roles and constraints do not fit the program or leave no choice.
    """
    question = plan.certificate.question
    if question is None:
        return None
    prices = Prices(plan_cluster(plan), plan.decisions.mesh)
    formulation = formulate_question(plan.program, plan.decisions.mesh, prices, question, plan.decisions.recompute)
    return formulation, prices
