"""`fxpar`: parse the command line, run one subcommand, turn what it raises into a message and an exit code.

Exit codes: 0 done, 1 cannot (or the answer is no), 2 usage. Messages and progress go to stderr, answers to stdout.
With --json the answer is one JSON object, `{"error": ...}` when there is none.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence

from fxpar.cli import check, compile, explain, rules, show, simulate, verify
from fxpar.cli.short_lived import short_lived
from fxpar.plans.errors import FxparError
from fxpar.rare_collections import rare_collections
from fxpar.version import VERSION

COMMANDS = (compile, verify, check, show, simulate, explain, rules)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="fxpar",
        description="Decide ahead of time how a cluster runs a PyTorch training step, and run that plan.",
        epilog="fxpar COMMAND --help shows the options of a command, with an example.",
    )
    parser.add_argument("--version", action="version", version=f"fxpar {VERSION}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; usage errors leave through SystemExit(2), as argparse does.

    arguments: None: `sys.argv[1:]`, and the process ends with this command.
    """
    if arguments is None:
        short_lived()
    options = make_parser().parse_args(arguments)
    show_traceback = getattr(options, "traceback", False) or os.environ.get("FXPAR_TRACEBACK", "0") not in ("", "0")
    as_json = getattr(options, "json", False)
    try:
        with rare_collections():
            code = options.run(options)
        sys.stdout.flush()
        return int(code)
    except FxparError as error:
        if show_traceback:
            traceback.print_exc()
        if as_json:
            print(json.dumps({"error": error.as_dict()}))
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fxpar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our answer went away (`fxpar show PLAN | head`). Python would complain once more when it
        # closes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        unexpected = unexpected_error(error)
        if as_json:
            print(json.dumps({"error": unexpected.as_dict()}))
        print(unexpected, file=sys.stderr)
        return 1


def unexpected_error(error: Exception) -> FxparError:
    """What to say about an exception that nothing foresaw."""
    frames = traceback.extract_tb(error.__traceback__)
    first_line = str(error).strip().partition("\n")[0][:500]
    return FxparError(
        f"unexpected {type(error).__name__}: {first_line}",
        where=f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else "",
        way_out="this is a fault of fxpar, not of your input; --traceback or FXPAR_TRACEBACK=1 shows all of it",
    )
