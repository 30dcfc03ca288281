#!/usr/bin/env python3
"""Compile tiny models of many transformers architectures and compare every plan with the eager model.

    tools/zoo.py                                     all of tests/zoo_models.py on mesh 2x2
    tools/zoo.py --only bert llama --random 3        some of them, 3 random plans each
    tools/zoo.py --random 5 --no-search              random plans alone: no search, much faster
    tools/zoo.py --markdown zoo.md --json zoo.json
    tools/zoo.py --json zoo.json --continue          what zoo.json does not hold yet

Each architecture is captured, compiled (random plans, and the best one without recomputation) and verified: virtual
ranks, float64, loss, every gradient and every buffer against the eager model within 1e-10. Prints a line per
architecture and a last line `N passed, M failed`; exit code 0 when all passed. Each runs in a process of its own,
stopped when it takes too long.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
if __name__ == "__main__" and PYTHON.exists() and Path(sys.prefix).resolve() != PYTHON.parent.parent.resolve():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(ROOT))

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Iterable, Sequence  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402

from fxpar.captured import capture_program  # noqa: E402
from fxpar.compile import compile_model  # noqa: E402
from fxpar.plans.errors import FxparError  # noqa: E402
from fxpar.progress import silent  # noqa: E402
from fxpar.verify import verify_plan  # noqa: E402
from tests.zoo_models import ARCHITECTURES, BY_NAME, Architecture, source_of  # noqa: E402

STAGES = ("captured", "compiled", "verified")
SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far an architecture came.

    Attributes:
        reached: the stages it passed, a prefix of ``STAGES``.
        reason: why not further: a refusal, an error, or the tensors that differ. Empty when all stages are passed.
        nodes: of the captured program.
        solver_seconds: of this process, compiling the best plan: formulating, solving, writing. 0 without one.
        worst: largest relative difference of any tensor of any plan.
    """

    name: str
    family: str
    reached: tuple[str, ...]
    reason: str
    seconds: float
    nodes: int = 0
    worst: float = 0.0
    solver_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.reached == STAGES and not self.reason

    def line(self) -> str:
        stages = " ".join(s if s in self.reached else "-" * len(s) for s in STAGES)
        first = self.reason.strip().replace("\n", " | ")
        solver = f", solver's plan {self.solver_seconds:.1f} s" if self.solver_seconds else ""
        tail = f"worst {self.worst:.0e}{solver}" if self.ok else first[:400]
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name:<30} {stages} {self.seconds:6.1f} s  {tail}"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The plans of every architecture: on which mesh, how many random ones, and whether the best one too."""

    mesh: str
    randoms: int
    search: bool

    def text(self) -> str:
        random = f"{self.randoms} random plan{'s' if self.randoms != 1 else ''}"
        return f"the best plan and {random}" if self.search else random

    def seeds(self) -> tuple[int | None, ...]:
        """None: the best plan. It comes last, because it takes longest."""
        return (*range(self.randoms), *((None,) if self.search else ()))


def judge(architecture: Architecture, wanted: Wanted) -> Verdict:
    """Capture, compile and verify one architecture in this process."""
    start = time.monotonic()
    reached: list[str] = []
    nodes, worst, reason, solver_seconds = 0, 0.0, "", 0.0
    try:
        source = source_of(architecture)
        captured = capture_program(source, outputs=("loss",), precision="fp32", progress=silent)
        reached.append("captured")
        nodes = len(captured[0].nodes)
        compiled = []
        for seed in wanted.seeds():
            began = time.process_time()
            plan = compile_model(
                source, mesh=wanted.mesh, random_choices=seed, recompute="off", captured=captured
            ).plan
            solver_seconds = time.process_time() - began if seed is None else 0.0
            compiled.append((f"random plan {seed}" if seed is not None else "the best plan", plan))
        reached.append("compiled")
        for kind, plan in compiled:
            report = verify_plan(plan, source, ranks="virtual", dtype="f64")
            worst = max([worst, *(row.relative for row in report.rows)])
            if not report.ok:
                reason = f"WRONG, {kind}: {report.text()}"
                break
        else:
            reached.append("verified")
    except FxparError as error:
        reason = str(error)
    except Exception as error:  # any other error is a finding of this run: it is the reason shown
        reason = f"CRASH {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    return Verdict(architecture.name, architecture.family, tuple(reached), reason, time.monotonic() - start, nodes,
                   worst, solver_seconds)


def judge_apart(architecture: Architecture, wanted: Wanted, seconds: float) -> Verdict:
    """:func:`judge` in a process of its own; one that takes longer than ``seconds``, or dies, is a verdict too."""
    # A fork: torch and transformers are imported once, and nothing has been run in the parent.
    processes = multiprocessing.get_context("fork")
    mine, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=send_verdict, args=(theirs, architecture, wanted))
    start = time.monotonic()
    child.start()
    theirs.close()
    try:
        if mine.poll(seconds):
            verdict: Verdict = mine.recv()
            return verdict
        reason = f"stopped after {seconds:.0f} s"
    except EOFError:
        child.join(5)
        reason = f"CRASH the process ended with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()
        mine.close()
    return Verdict(architecture.name, architecture.family, (), reason, time.monotonic() - start)


def send_verdict(pipe: Connection, architecture: Architecture, wanted: Wanted) -> None:
    """What the process of one architecture does."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    pipe.send(judge(architecture, wanted))
    pipe.close()


def markdown(verdicts: Sequence[Verdict], wanted: Wanted) -> str:
    """The verdicts as two tables: the names of each family that passed all stages, and how far the others came."""
    passed, others = [v for v in verdicts if v.ok], [v for v in verdicts if not v.ok]
    lines = [
        f"{len(passed)} of {len(verdicts)} transformers {transformers.__version__} architectures captured, "
        f"compiled and verified on mesh {wanted.mesh}: {wanted.text()}, virtual ranks, float64, within 1e-10 of eager.",
        "",
        "| family | captured, compiled, verified |",
        "| --- | --- |",
    ]
    for family in dict.fromkeys(v.family for v in passed):
        names = [v.name for v in passed if v.family == family]
        lines.append(f"| {family} ({len(names)}) | {', '.join(names)} |")
    if others:
        lines += ["", "| architecture | captured | compiled | verified | reason |", "| --- | --- | --- | --- | --- |"]
    for v in others:
        stages = " | ".join("yes" if s in v.reached else "no" for s in STAGES)
        lines.append(f"| {v.name} | {stages} | {short_reason(v.reason)} |")
    return "\n".join(lines) + "\n"


def short_reason(reason: str) -> str:
    """What, where and which line, without the way out."""
    what, *more = reason.strip().removeprefix("fxpar: ").splitlines()
    told = "; ".join([what.partition(": ")[0], *(line.strip() for line in more[:2])])
    return told.replace("|", "\\|")[:160]


def kept_verdicts(path: str | None) -> list[Verdict]:
    """What an earlier run wrote; nothing when there was none."""
    if path is None or not Path(path).exists():
        return []
    return [Verdict(**{**row, "reached": tuple(row["reached"])}) for row in json.loads(Path(path).read_text())]


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the zoo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures (default: all)")
    parser.add_argument("--mesh", default="2x2", help="as for fxpar compile (default: 2x2)")
    parser.add_argument("--random", type=int, default=1, metavar="N", help="random plans each (default: 1)")
    parser.add_argument("--no-search", action="store_true", help="random plans only")
    parser.add_argument("--timeout", type=float, default=SECONDS, metavar="S", help="seconds each (default: 120)")
    parser.add_argument("--json", metavar="OUT", help="write the verdicts as JSON")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="keep the verdicts that OUT has")
    parser.add_argument("--markdown", metavar="FILE", help="write the verdicts as a table")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.list:
        print("\n".join(BY_NAME))
        return 0
    unknown = sorted(set(options.only or ()) - set(BY_NAME))
    if unknown:
        parser.error(f"no architecture is called {', '.join(unknown)}; --list prints their names")
    chosen = [BY_NAME[name] for name in options.only] if options.only else ARCHITECTURES
    wanted = Wanted(options.mesh, options.random, not options.no_search)
    if not wanted.seeds():
        parser.error("--no-search --random 0 leaves no plan to verify")
    verdicts = kept_verdicts(options.json) if options.go_on else []
    known = {verdict.name for verdict in verdicts}
    for architecture in [a for a in chosen if a.name not in known]:
        verdicts.append(judge_apart(architecture, wanted, options.timeout))
        print(verdicts[-1].line(), flush=True)
        # after each one: a run that is stopped leaves what it found
        if options.json:
            Path(options.json).write_text(json.dumps([dataclasses.asdict(v) for v in verdicts], indent=1) + "\n")
        if options.markdown:
            Path(options.markdown).write_text(markdown(verdicts, wanted))
    passed = sum(v.ok for v in verdicts)
    print(f"{passed} passed, {len(verdicts) - passed} failed")
    return 0 if passed == len(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
