"""`fxpar show PLAN`: what a plan decides and what it predicts."""

import argparse
import json

from fxpar.cli import options as option
from fxpar.plans.codec import read_plan

EXAMPLE = """
fxpar show plan.msgpack
fxpar show plan.msgpack --full
fxpar show plan.msgpack --search
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The options of `fxpar show`."""
    parser = option.add_command(subparsers, "show", summary="show what a plan decides and predicts", example=EXAMPLE)
    parser.add_argument("plan", metavar="PLAN", help="a file that fxpar compile wrote")
    parser.add_argument("--full", action="store_true", help="every parameter and every op, not only the summary")
    parser.add_argument(
        "--search", action="store_true",
        help="the meshes, stages and microbatches that were weighed, and why each was not chosen",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    plan = read_plan(options.plan)

    from fxpar.show import plan_facts, plan_text
    from fxpar.show_search import search_text

    if options.search and not options.json:
        print(search_text(plan))
        return 0
    print(json.dumps(plan_facts(plan)) if options.json else plan_text(plan, full=options.full))
    return 0
