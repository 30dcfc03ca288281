"""`fxpar rules check OP...`: judge fxpar's own rules on drawn calls, in one process or several."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

import torch

from fxpar import rule_examples  # noqa: F401  declares the generators
from fxpar.judge_calls import ANY, Shards, judge_calls
from fxpar.plans.errors import FxparError
from fxpar.plans.mesh import Mesh
from fxpar.progress import Progress, silent
from fxpar.rule_coverage import rule_name
from fxpar.rule_examples.draw import GENERATORS
from fxpar.rule_examples.drawn import drawn_call
from fxpar.rule_report import Judged, RuleCheck
from fxpar.rules.registry import all_rules, full_name, rule_for, rules_changed

OPS_PER_PHASE = 40


def chosen_ops(patterns: Sequence[str]) -> tuple[str, ...]:
    """Short names (``"mm"``, ``"add.Tensor"``) of the fxpar ops that the patterns name; all when there are none.

    Raises:
        FxparError: a pattern names no op that has a rule and example calls.
    """
    known = {rule.op: short for rule in all_rules() if (short := short_name(rule.op)) in GENERATORS}
    if not patterns:
        return tuple(known.values())
    chosen: dict[str, None] = {}
    for pattern in patterns:
        names = {pattern, full_name(pattern)} if pattern.count(".") < 2 else {pattern}
        found = [
            short for op, short in known.items() if any(fnmatch.fnmatchcase(n, p) for n in (op, short) for p in names)
        ]
        if not found:
            why = "it has a rule but no example calls" if any(map(rule_for, names)) else "no such op has a rule"
            raise FxparError(
                f"cannot check '{pattern}'", numbers=why,
                way_out="fxpar rules list shows names; your own ops are checked on the calls of a model: "
                        "fxpar rules check model.py",
            )
        chosen.update(dict.fromkeys(found))
    return tuple(chosen)


def short_name(op: str) -> str:
    """``"aten.add.Tensor"`` -> ``"add.Tensor"``, ``"mylib.f.default"`` -> ``"mylib::f"``."""
    return rule_name(op).removeprefix("aten::")


def check_ops(
    ops: Sequence[str], meshes: Sequence[Mesh], *, examples: int = 50, shards: Shards = ANY, jobs: int = 1,
    progress: Progress = silent,
) -> RuleCheck:
    """Judge fxpar's rules on drawn calls; the result does not depend on ``jobs``.

    Args:
        ops: short names, see :func:`chosen_ops`.
        examples: judged of every op at least.
        jobs: processes; rules declared or changed in this one are seen by one job only.

    Raises:
        FxparError: a process ended, as when a kernel crashes.
    """
    judge = partial(check_op, meshes=tuple(meshes), examples=examples, shards=shards)
    if jobs == 1:
        return RuleCheck(collected(map(judge, ops), ops, progress), tuple(map(str, meshes)), examples)
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        try:
            judged = collected(pool.map(judge, ops), ops, progress)
        except BrokenProcessPool as error:
            raise FxparError(
                "a process that ran ops ended before it answered", numbers=f"{jobs} processes for {len(ops)} ops",
                way_out="run fewer ops at a time with --jobs 1: the one whose kernel crashes ends the command",
            ) from error
    return RuleCheck(judged, tuple(map(str, meshes)), examples)


def collected(results: Iterator[Judged], ops: Sequence[str], progress: Progress) -> tuple[Judged, ...]:
    """All results in order, a phase for every few ops."""
    judged: list[Judged] = []
    for start in range(0, len(ops), OPS_PER_PHASE):
        part = ops[start : start + OPS_PER_PHASE]
        with progress(f"ops {start + 1} to {start + len(part)} of {len(ops)}: {part[0]} to {part[-1]}"):
            judged += [next(results) for _ in part]
    return tuple(judged)


def check_op(op: str, meshes: Sequence[Mesh], examples: int, shards: Shards = ANY) -> Judged:
    """Judge one op (short name) on drawn calls; the draws depend on its name only."""
    judged = judge_calls(
        full_name(op), partial(drawn_call, op), meshes, examples, shards=shards, least=len(GENERATORS[op])
    )
    rules_changed()  # no other op has these calls: let go of what was computed for them
    return judged
