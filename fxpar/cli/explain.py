"""`fxpar explain PLAN NODE|PARAM`: what else an op or parameter could do, and what that would cost."""

import argparse
import json

from fxpar.cli import options as option
from fxpar.cli.terminal import make_progress
from fxpar.plans.codec import read_plan

EXAMPLE = """
fxpar explain plan.msgpack layers.0.mlp.up
fxpar explain plan.msgpack 'layers.*.up.weight' --json
fxpar explain plan.msgpack 217 --alternatives 12
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The options of `fxpar explain`."""
    parser = option.add_command(
        subparsers,
        "explain",
        summary="show what else an op or parameter could do, and what that would cost",
        example=EXAMPLE,
    )
    parser.add_argument("plan", metavar="PLAN", help="a file that fxpar compile wrote")
    parser.add_argument(
        "name", metavar="NODE|PARAM", help="a module path or parameter name (* for any part), an op, or an op's index"
    )
    parser.add_argument(
        "--alternatives", type=option.positive, default=6, metavar="N",
        help="how many to solve the whole plan again for (6)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the alternatives."""
    plan = read_plan(options.plan)

    from fxpar.explain import explain

    progress = make_progress(as_json=options.json)
    found = explain(plan, options.name, shown=options.alternatives, progress=progress)
    print(json.dumps(found.as_dict()) if options.json else found.text())
    return 0
