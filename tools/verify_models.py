#!/usr/bin/env python3
"""Compile model files on many meshes and compare every plan with one process.

    tools/verify_models.py                              every tests/models/*.py on every mesh, gloo ranks, f32
    tools/verify_models.py --dtype f64 --models bert t5
    tools/verify_models.py --random 30 --models llama bert resnet --meshes 2x2     random plans, virtual ranks, f64
    tools/verify_models.py --random 5 --meshes 2x2 2x2x2                            ten random plans of every model

Prints a line per plan and a last line `N passed, M failed`; exit code 0 when all passed. On gloo a plan's loss, every
gradient and buffer, and the parameters after 3 AdamW steps with clipping are compared. `--fork` starts the ranks by
forking this process, which has everything imported, instead of torchrun: the same ranks, several times faster.
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
import time  # noqa: E402
import warnings  # noqa: E402

import torch  # noqa: E402

from fxpar import verify, verify_worker  # noqa: E402
from fxpar.captured import capture_program  # noqa: E402
from fxpar.compile import compile_model  # noqa: E402
from fxpar.model_source import load_model_source  # noqa: E402
from fxpar.plans.errors import FxparError  # noqa: E402
from fxpar.progress import silent  # noqa: E402
from fxpar.ranks import RanksEnd  # noqa: E402
from tools.forked_ranks import forked_ranks  # noqa: E402

MESHES = ("2", "4", "2x2", "dp=2", "tp=2", "dp=2,tp=2")


def forked_workers(count: int, arguments: list[str], *, timeout: float) -> RanksEnd:
    """`fxpar.ranks.run_ranks` of the verify worker, by fork."""
    folder = Path(arguments[-1])
    return forked_ranks(count, lambda: verify_worker.main(folder), folder, timeout=timeout)


def main() -> int:
    """Run the table of models and meshes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="names in tests/models, or paths (all)")
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--dtype", choices=("f32", "f64"), default="f32")
    parser.add_argument("--ranks", choices=("gloo", "virtual"), default="gloo")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random plans per mesh, virtual, f64")
    parser.add_argument("--fork", action="store_true", help="start ranks by fork instead of torchrun")
    options = parser.parse_args()
    if options.fork:
        verify.run_ranks = forked_workers
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = ROOT / "tests" / "models"
    paths = [Path(m) if m.endswith(".py") else folder / f"{m}.py" for m in options.models or []]
    passed = failed = 0
    for path in paths or sorted(folder.glob("*.py")):
        source = load_model_source(str(path))
        captured = capture_program(source, outputs=("loss",), precision="fp32", progress=silent)
        for mesh in options.meshes:
            for seed in range(options.random) if options.random else [None]:
                start = time.monotonic()
                ranks, dtype = ("virtual", "f64") if options.random else (options.ranks, options.dtype)
                try:
                    plan = compile_model(source, mesh=mesh, random_choices=seed, captured=captured).plan
                    report = verify.verify_plan(plan, source, ranks=ranks, dtype=dtype)
                    ok, text = report.ok, report.text()
                except FxparError as error:
                    ok, text = False, str(error)
                passed, failed = passed + ok, failed + (not ok)
                mode = "" if seed is None else f" random {seed}"
                head = f"{'ok  ' if ok else 'FAIL'} {source.name} {mesh}{mode} {ranks} {dtype}"
                print(f"{head} {time.monotonic() - start:.1f} s{'' if ok else chr(10) + text}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 0 if not failed else 1


if __name__ == "__main__":
    raise SystemExit(main())
