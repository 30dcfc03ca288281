"""`fxpar simulate PLAN`: what a step of a plan takes, also on another cluster, and a trace of it."""

import argparse
import json
from pathlib import Path

from fxpar.cli import options as option
from fxpar.cli.terminal import make_progress
from fxpar.plans.codec import read_plan
from fxpar.plans.errors import FxparError

EXAMPLE = """
fxpar simulate plan.msgpack
fxpar simulate plan.msgpack --cluster 4x8:a100
fxpar simulate plan.msgpack --trace step.json      # opens in ui.perfetto.dev
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The options of `fxpar simulate`."""
    parser = option.add_command(
        subparsers, "simulate", summary="simulate a step of a plan, also on another cluster", example=EXAMPLE
    )
    parser.add_argument("plan", metavar="PLAN", help="a file that fxpar compile wrote")
    parser.add_argument("--cluster", help="another cluster of as many devices, as for fxpar compile")
    parser.add_argument("--trace", metavar="FILE", help="write what runs when, for ui.perfetto.dev or chrome://tracing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate and print."""
    plan = read_plan(options.plan)

    from fxpar.cost.cluster import parse_cluster
    from fxpar.priced_problem import plan_cluster
    from fxpar.simulate_plan import chrome_trace, simulate_plan

    cluster = plan_cluster(plan) if options.cluster is None else parse_cluster(options.cluster)
    with make_progress(as_json=options.json)("simulating"):
        found = simulate_plan(plan, cluster)
    if options.trace:
        try:
            Path(options.trace).write_text(json.dumps(chrome_trace(plan, found)))
        except OSError as error:
            raise FxparError(f"the trace cannot be written: {error.strerror}", where=f"--trace {options.trace}",
                             way_out="a file in a folder that exists and can be written to") from error
    print(json.dumps(found.as_dict()) if options.json else found.text(plan.prediction.step_ns))
    return 0
