"""Options that several subcommands share, and how their values are read.

A value that cannot be read is a usage error (exit code 2), said by argparse with the name of the option.
"""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fxpar.plans.errors import FxparError, UnsupportedError, collect_errors

if TYPE_CHECKING:
    from fxpar.model_source import ModelSource
    from fxpar.plans.mesh import Mesh

BYTES_PER_UNIT = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def add_command(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    *,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """A subcommand with what each has: --json, --traceback, and an example under --help."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="example:\n" + "".join(f"  {line}\n" for line in example.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="answer with one JSON object on stdout, without progress")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    return parser


def add_model_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """MODEL and what completes it when it is a transformers configuration."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="model.py with build() and example_inputs(), or hf:DIR with a transformers config.json in DIR",
    )
    add_model_details(parser)


def add_model_details(parser: argparse.ArgumentParser) -> None:
    """What completes a MODEL that is a transformers configuration."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--task", help="for hf:DIR: causal-lm, masked-lm, seq-cls, seq2seq-lm or image-classification"
    )
    group.add_argument("--seq", type=positive, metavar="N", help="for hf:DIR: tokens per sample (512)")
    group.add_argument("--batch", type=positive, metavar="N", help="for hf:DIR: samples in the global batch (8)")
    group.add_argument(
        "--optimizer", help="adamw (unless model.py says), adam, sgd (momentum 0.9), rmsprop or adagrad"
    )


def model_source(options: argparse.Namespace) -> "ModelSource":
    """The ModelSource that MODEL and its options describe."""
    from fxpar.model_source import load_model_source

    return load_model_source(
        options.model, task=options.task, seq=options.seq, batch=options.batch, optimizer=options.optimizer
    )


def refuse_unsupported(requests: dict[str, str]) -> None:
    """Refuse options that were given and that this version does not carry out: option -> what happens without it.

    Raises:
        UnsupportedError: names the option; FxparErrors when there are several.
    """
    with collect_errors() as errors:
        for request, instead in requests.items():
            what = f"{request} is not supported by this version"
            errors.add(UnsupportedError(what, way_out=f"leave it out: {instead}"))


def positive(text: str) -> int:
    """A whole number from 1."""
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1")
    return int(text)


def memory(text: str) -> int:
    """Bytes: `72GiB`, `80GB`, `512MiB`, or a plain number."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)", text.strip())
    unit = BYTES_PER_UNIT.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not an amount of memory: write 72GiB, 80GB or bytes")
    return int(float(match[1]) * unit)


def memory_or_none(text: str) -> int:
    """:func:`memory`, or `0`."""
    return 0 if re.fullmatch(r"0+", text.strip()) else memory(text)


def fraction(text: str) -> float:
    """A number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to below 1")
    return value


def mesh(text: str) -> "Mesh":
    """`4`, `2x2` or `dp=2,tp=2`."""
    from fxpar.plans.mesh import parse_mesh

    try:
        return parse_mesh(text)
    except FxparError as error:
        raise argparse.ArgumentTypeError("; ".join((error.what, *error.numbers, error.way_out))) from error


def pin(text: str) -> str:
    """`PATTERN=AXIS:PLACEMENT`, as it is: only its form is looked at here."""
    from fxpar.pins import parse_pin

    try:
        parse_pin(text)
    except FxparError as error:
        raise argparse.ArgumentTypeError("; ".join((error.what, *error.numbers, error.way_out))) from error
    return text


def hint(text: str) -> str:
    """A plan file that is there, or a pin."""
    return text if Path(text).is_file() or "=" not in text else pin(text)


def names(text: str) -> tuple[str, ...]:
    """`loss,logits`."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of different names: write loss or loss,logits")
    return parts
