#!/usr/bin/env python3
"""Damage plan files at random and see that nothing but words comes of it.

    tools/fuzz_plan.py --seconds 600                      a built-in small plan
    tools/fuzz_plan.py --seconds 600 plan.msgpack ...     these
    tools/fuzz_plan.py --seconds 60 --seed 7 --keep found/

Each turn damages a file: bytes (cut, flipped, repeated), or one part of what it holds, with the checksum made right
again. Reading it must give a plan or a PlanFileError. A plan that is read must encode to itself, print, and be
rewritten for its first rank or be refused as a FxparError. Everything else is a finding: it is printed, the file is
kept, and the exit code is 1. The same seed damages the same way.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
if __name__ == "__main__" and PYTHON.exists() and Path(sys.prefix).resolve() != PYTHON.parent.parent.resolve():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path.insert(0, str(ROOT))

import argparse  # noqa: E402
import copy  # noqa: E402
import hashlib  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import msgpack  # noqa: E402
import msgspec  # noqa: E402

from fxpar.plans.codec import MAGIC, decode, encode, to_wire  # noqa: E402
from fxpar.plans.errors import FxparError, PlanFileError  # noqa: E402
from fxpar.plans.plan import FORMAT_VERSION, Plan  # noqa: E402
from fxpar.plans.text import canonical_text  # noqa: E402

NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 7, 64, 2**20, 2**31, 2**62, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "f0", "f9", "f0+9", "p0", ".", "x" * 5000, "v0", "float32", "aten.mm.default", "aten.nothing.default",
         "__import__('os').abort()", "\0", "\ud7ff", "forward", "0")


def small_plan() -> Plan:
    """A plan of two linear layers on 2x2 ranks."""
    import torch
    from torch import nn

    from fxpar.compile import compile_model
    from fxpar.model_source import ModelSource

    source = ModelSource(
        "fuzz", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), lambda: ((torch.ones(4, 6),), {}),
        lambda output, _: output.square().mean(), torch.optim.AdamW, batch_dim=0,
    )
    return compile_model(source, mesh="dp=2,tp=2").plan


def parts(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every part of nested lists and maps."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from parts(node[key])


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """A file cut, flipped, repeated or joined with itself somewhere."""
    low, high = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    match draw.randrange(4):
        case 0:
            return data[:low]
        case 1:
            found = bytearray(data)
            for _ in range(draw.choice((1, 1, 2, 8))):
                found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
            return bytes(found)
        case 2:
            return data[:low] + data[high:]
        case _:
            return data[:high] + data[low:]


def damaged_parts(payload: Any, draw: random.Random) -> Any:
    """What a file holds, with one to three parts replaced, removed, repeated or exchanged."""
    payload = copy.deepcopy(payload)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(parts(payload))
        container, key = draw.choice(places)
        other, at = draw.choice(places)
        match draw.randrange(6):
            case 0:
                del container[key]
            case 1 if isinstance(container, list):
                container.insert(draw.randrange(len(container) + 1), copy.deepcopy(container[key]))
            case 2:
                container[key] = copy.deepcopy(other[at])
            case 3 if isinstance(container[key], int):
                container[key] = container[key] + draw.choice((-2, -1, 1, 2))
            case 4:
                container[key] = draw.choice((None, True, 0.5, float("inf"), [], {}, [[]], b"", draw.choice(TEXTS)))
            case _:
                container[key] = draw.choice(TEXTS if isinstance(container[key], str) else NUMBERS)
    return payload


def sealed(payload: bytes) -> bytes:
    """A file with a right checksum."""
    return bytes(msgpack.packb([MAGIC, FORMAT_VERSION, hashlib.sha256(payload).digest(), payload]))


def outcome(data: bytes) -> str:
    """What became of a file, in a word; anything unforeseen is raised."""
    from fxpar.runtime.model import check_ops, check_surface, rewritten
    from fxpar.show import plan_text

    try:
        plan = decode(data, where="fuzz")
    except PlanFileError as error:
        str(error)
        return "refused"
    if encode(decode(encode(plan))) != encode(plan):
        raise AssertionError("the plan does not encode to itself")
    canonical_text(plan)
    plan_text(plan)
    try:
        check_ops(plan.program)
        check_surface(plan.program, plan.decisions)
        rewritten(plan, (0,) * len(plan.decisions.mesh.axes))
    except FxparError:
        return "refused when loading"
    return "taken"


def fuzz(plans: list[Plan], seconds: float, seed: int, keep: Path) -> int:
    """Damage and read until the time is over; how many findings."""
    draw = random.Random(seed)
    files = [encode(plan) for plan in plans]
    payloads = [
        msgpack.unpackb(msgpack.packb(msgspec.to_builtins(to_wire(plan), builtin_types=(bytes,)))) for plan in plans
    ]
    met: Counter[str] = Counter()
    known: set[str] = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        index = draw.randrange(len(files))
        kind = draw.randrange(8)
        if kind == 0:
            data = damaged_bytes(files[index], draw)
        elif kind == 1:
            data = sealed(damaged_bytes(msgpack.packb(payloads[index]), draw))
        else:
            data = sealed(msgpack.packb(damaged_parts(payloads[index], draw)))
        try:
            word = outcome(data)
        except Exception:
            word = "finding"
            text = traceback.format_exc()
            place = "".join(text.splitlines()[-3:])
            if place not in known:
                known.add(place)
                keep.mkdir(parents=True, exist_ok=True)
                path = keep / f"{hashlib.sha256(data).hexdigest()[:16]}.msgpack"
                path.write_bytes(data)
                print(f"{path}\n{text}", flush=True)
        met[word] += 1
    print(f"{sum(met.values())} files: " + ", ".join(f"{n} {word}" for word, n in sorted(met.items())))
    return len(known)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plans", nargs="*", type=Path, metavar="PLAN", help="plan files (default: a small one)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder for files that are findings")
    options = parser.parse_args(arguments)
    plans = [decode(path.read_bytes(), where=str(path)) for path in options.plans] or [small_plan()]
    return 1 if fuzz(plans, options.seconds, options.seed, options.keep) else 0


if __name__ == "__main__":
    sys.exit(main())
