"""`fxpar rules list`, `coverage` and `check`: which ops have a rule, which of a model's do not, and are rules right."""

import argparse
import fnmatch
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fxpar.cli import options as option
from fxpar.cli.terminal import make_progress, show_report
from fxpar.plans.errors import FxparError

if TYPE_CHECKING:
    from fxpar.captured import Captured
    from fxpar.model_source import ModelSource

LIST_EXAMPLE = """
fxpar rules list
fxpar rules list 'aten.*norm*'
"""
COVERAGE_EXAMPLE = """
fxpar rules coverage model.py
fxpar rules coverage hf:llama/ --task causal-lm --seq 128 --json
fxpar rules coverage op-histogram.md
"""
CHECK_EXAMPLE = """
fxpar rules check model.py
fxpar rules check mm 'aten.*norm*' --mesh 2 --mesh 2x2
fxpar rules check --all --mesh 3 --uneven --empty --examples 200 --jobs 4
"""
MESHES = ("2", "3", "2x2")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`fxpar rules` and its own subcommands."""
    parser = subparsers.add_parser("rules", help="the rules of ops", description="The rules of ops.")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    one = option.add_command(
        actions, "list", summary="list ops that have a rule; others are computed whole", example=LIST_EXAMPLE
    )
    one.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="op names, with * and ? ('aten.mm.*')")
    one.set_defaults(run=run_list)

    one = option.add_command(
        actions, "coverage", summary="count the calls and ops of a model that have a rule, and price the others",
        example=COVERAGE_EXAMPLE,
    )
    option.add_model_options(one)
    one.add_argument(
        "--cluster", metavar="NODESxDEVICES:KIND|FILE.toml", default="2", help="where times are of (2 CPU ranks)"
    )
    one.set_defaults(run=run_coverage)

    one = option.add_command(
        actions, "check", summary="run ops shard by shard and compare with the whole op; 1 when a rule is wrong",
        example=CHECK_EXAMPLE,
    )
    one.add_argument(
        "targets", metavar="MODEL|OP", nargs="*",
        help="model.py or hf:DIR: every call that the model makes, your own ops too; or names of fxpar's ops, with *",
    )
    one.add_argument("--all", action="store_true", help="every op that fxpar has a rule for")
    option.add_model_details(one)
    group = one.add_argument_group("judgement")
    group.add_argument(
        "--mesh", type=option.mesh, action="append", metavar="2|2x2", help=f"may be repeated ({', '.join(MESHES)})"
    )
    group.add_argument(
        "--uneven", action="store_true",
        help="go on until a quarter of the examples left ranks pieces of unequal size, where the op has such choices",
    )
    group.add_argument("--empty", action="store_true", help="as --uneven, for examples that left some rank nothing")
    group.add_argument(
        "--examples", type=option.positive, metavar="N",
        help="judge at least N examples of every op (50), or of every distinct call of MODEL (24); "
             "an example is a call on a mesh under one joint choice, even pieces and others",
    )
    group.add_argument(
        "--jobs", type=option.positive, metavar="N", default=1,
        help="processes for OPs and --all (1); the answer is the same with any number",
    )
    one.set_defaults(run=run_check, parser=one)


def run_list(options: argparse.Namespace) -> int:
    """Print one op a line: its full name and its rule."""
    from fxpar.rules.registry import all_rules

    rules = [rule for rule in all_rules() if fnmatch.fnmatchcase(rule.op, options.pattern)]
    if not rules and options.pattern != "*":
        raise FxparError(
            f"no op with a rule matches '{options.pattern}'",
            numbers=f"{len(all_rules())} ops have a rule",
            way_out="fxpar rules list shows them all; names are such as aten.mm.default",
        )
    if options.json:
        print(json.dumps({"rules": [{"op": rule.op, "rule": rule.text, "random": rule.random} for rule in rules]}))
    else:
        width = max((len(rule.op) for rule in rules), default=0)
        for rule in rules:
            print(f"{rule.op:{width}}  {rule.text}".rstrip())
    return 0


def run_coverage(options: argparse.Namespace) -> int:
    """Print how much of a model, or of a table of op counts, has a rule."""
    from fxpar.rule_coverage import histogram_coverage, program_coverage

    if options.model.endswith(".md"):
        coverage = histogram_coverage(read_text(options.model))
        if not coverage.ops:
            raise FxparError(
                f"{options.model} holds no table of op counts",
                way_out="rows are such as | `aten.mm.default` | 3 | 40 |: op, models, count",
            )
    else:
        from fxpar.cost.cluster import parse_cluster
        from fxpar.plans.mesh import parse_mesh
        from fxpar.prices import Prices

        machine = parse_cluster(options.cluster)
        (program, _), _ = captured_model(options)
        coverage = program_coverage(program, Prices(machine, parse_mesh(str(machine.world_size))))
    print(json.dumps(coverage.as_dict()) if options.json else coverage.text())
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Judge rules; exit code 1 when one is unsound."""
    models = [name for name in options.targets if is_model(name)]
    if bool(options.targets) == options.all or (models and len(options.targets) > 1):
        options.parser.error("give one MODEL, or OPs, or --all")
    if models and options.jobs > 1:
        options.parser.error("--jobs is for OPs and --all: a MODEL is run in one process")
    if options.mesh is None:
        options.mesh = [option.mesh(text) for text in MESHES]

    from fxpar.judge_calls import Shards

    shards = Shards(options.uneven, options.empty)
    progress = make_progress(as_json=options.json)
    if models:
        from fxpar.rule_check import check_model

        options.model = models[0]
        (program, _), source = captured_model(options)
        checked = check_model(
            source, program, options.mesh, examples=options.examples or 24, shards=shards, progress=progress
        )
    else:
        from fxpar.op_check import check_ops, chosen_ops

        checked = check_ops(
            chosen_ops(options.targets), options.mesh, examples=options.examples or 50, shards=shards,
            jobs=options.jobs, progress=progress,
        )
    return show_report(checked, as_json=options.json)


def is_model(name: str) -> bool:
    """True for model.py and hf:DIR."""
    return name.startswith("hf:") or name.endswith(".py") or "/" in name


def captured_model(options: argparse.Namespace) -> "tuple[Captured, ModelSource]":
    """The program that MODEL and its options describe, and their source."""
    source = option.model_source(options)

    from fxpar.captured import capture_program

    progress = make_progress(as_json=options.json)
    return capture_program(source, outputs=("loss",), precision="fp32", progress=progress), source


def read_text(path: str) -> str:
    """The text of a file; FxparError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FxparError(f"cannot read {path}", numbers=reason, way_out="give a model, or a Markdown file") from error
