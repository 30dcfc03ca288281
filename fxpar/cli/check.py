"""`fxpar check PLAN [MODEL]`: is the file sound, and does it belong to this model?"""

import argparse

from fxpar.cli import options as option
from fxpar.cli.terminal import make_progress, show_report
from fxpar.plans.codec import read_plan

EXAMPLE = """
fxpar check plan.msgpack
fxpar check plan.msgpack model.py --certificate
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The options of `fxpar check`."""
    parser = option.add_command(
        subparsers,
        "check",
        summary="check a plan file, and that it still belongs to a model",
        example=EXAMPLE,
    )
    parser.add_argument("plan", metavar="PLAN", help="a file that fxpar compile wrote")
    option.add_model_options(parser, optional=True)
    group = parser.add_argument_group("further checks")
    group.add_argument("--certificate", action="store_true", help="check the proven bound, without the solver")
    group.add_argument("--policy", metavar="FILE", help="rules of your own that a plan must obey")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Check; exit code 0 only when nothing is wrong."""
    given = [name for name in ("task", "seq", "batch", "optimizer") if getattr(options, name) is not None]
    if given and options.model is None:
        options.parser.error(f"--{given[0]} describes a MODEL: give one after PLAN")
    if options.policy is not None:
        option.refuse_unsupported({f"--policy {options.policy}": "every other check is made"})
    plan = read_plan(options.plan)
    source = option.model_source(options) if options.model is not None else None

    from fxpar.check import check_plan_with_model

    report = check_plan_with_model(
        plan, source, certificate=options.certificate, progress=make_progress(as_json=options.json)
    )
    return show_report(report, as_json=options.json)
