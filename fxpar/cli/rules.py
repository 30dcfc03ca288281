"""`fxpar rules list`: the declared rule of every op."""

import argparse
import fnmatch
import json

from fxpar.cli import options as option
from fxpar.plans.errors import FxparError

EXAMPLE = """
fxpar rules list
fxpar rules list 'aten.*norm*'
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`fxpar rules` and its own subcommands."""
    parser = subparsers.add_parser("rules", help="the rules of ops", description="The rules of ops.")
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    one = option.add_command(
        actions, "list", summary="list ops that have a rule; others are computed whole", example=EXAMPLE
    )
    one.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="op names, with * and ? ('aten.mm.*')")
    one.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
