"""`fxpar verify PLAN MODEL`: run the plan's program on ranks and compare it with one device."""

import argparse

from fxpar.cli import options as option
from fxpar.cli.terminal import make_progress, show_report
from fxpar.plans.codec import read_plan

EXAMPLE = """
fxpar verify plan.msgpack model.py
fxpar verify plan.msgpack model.py --ranks gloo --dtype f32
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The options of `fxpar verify`."""
    parser = option.add_command(
        subparsers,
        "verify",
        summary="run a plan and compare loss, gradients and buffers with one device",
        example=EXAMPLE,
    )
    parser.add_argument("plan", metavar="PLAN", help="a file that fxpar compile wrote")
    option.add_model_options(parser)
    group = parser.add_argument_group("comparison")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--virtual", action="store_const", const="virtual", dest="ranks", help="all ranks in this process (default)"
    )
    how.add_argument("--ranks", choices=("virtual", "gloo"), help="gloo: one process per rank on this machine")
    group.add_argument(
        "--dtype", choices=("f64", "f32"), default="f64", help="f64: everything in double (default); f32: as it is"
    )
    group.add_argument(
        "--reference", metavar="REF.pt", help="compare with this record of a one-device run, from its weights"
    )
    group.add_argument(
        "--memory", action="store_true", help="also compare the peak of live bytes with the plan's prediction"
    )
    parser.set_defaults(run=run, ranks="virtual")


def run(options: argparse.Namespace) -> int:
    """Verify; exit code 0 only when everything is equal."""
    plan = read_plan(options.plan)
    source = option.model_source(options)

    from fxpar.verify import verify_plan

    report = verify_plan(
        plan,
        source,
        ranks=options.ranks,
        dtype=options.dtype,
        reference=options.reference,
        memory=options.memory,
        progress=make_progress(as_json=options.json),
    )
    return show_report(report, as_json=options.json)
