#!/usr/bin/env python3
"""Run a folder of test programs (case_*.py, run_single.py, refs/) through compile and ranks, against their records.

    tools/cases.py ../shared/cases                          the solver's plan and the forced one, on virtual ranks
    tools/cases.py ../shared/cases --ranks gloo --free      real ranks: step, training loop, further inputs
    tools/cases.py ../shared/cases --random 5 --only 03
    tools/cases.py ../shared/cases --free --forced --random 5 --ranks gloo --fork      all of it, several times faster

A mode is a kind of plan: `free` (an anonymous mesh of the case's sizes), `forced` (the axes of META["force"]),
`random SEED` (any feasible choices). A case passes when all of its modes pass. Every case runs in a process of its own
under a time limit. Exit code 0 when all passed.
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
import json  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from functools import cache  # noqa: E402
from typing import Any  # noqa: E402

from fxpar.ranks import stop_session  # noqa: E402

SECONDS_PER_MODE = {"virtual": 240.0, "gloo": 420.0}
SECONDS_OF_RANKS = 300.0
SHOWN_DIFFERENCES = 4


@dataclass(frozen=True)
class Verdict:
    """What one mode of one case came to. ``lines``: differences, or the message."""

    case: str
    mode: str
    ok: bool
    seconds: float
    lines: tuple[str, ...] = ()

    def text(self, full: bool) -> str:
        """One line for people, all of it when ``full``."""
        shown = self.lines if full else self.lines[:1]
        tail = (": " if shown else "") + " | ".join(shown)
        return f"{'ok  ' if self.ok else 'FAIL'} {self.case:<34} {self.mode:<10} {self.seconds:6.1f} s{tail}"


def main() -> int:
    """Parse, run every case, print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--free", action="store_true", help="an anonymous mesh (default, with --forced)")
    parser.add_argument("--forced", action="store_true", help="the axes of META['force']")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N plans of random choices")
    parser.add_argument("--ranks", choices=("virtual", "gloo"), default="virtual")
    parser.add_argument("--fork", action="store_true", help="start gloo ranks by fork instead of torchrun")
    parser.add_argument("--only", action="append", default=[], metavar="NN", help="cases whose name has NN; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once (1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--full", action="store_true", help="every difference, not only the first")
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        run_case(options.case, options.mode, options.ranks, options.results, options.fork)
        return 0
    modes = [*(["free"] if options.free else []), *(["forced"] if options.forced else []),
             *(f"random {seed}" for seed in range(options.random))] or ["free", "forced"]
    paths = sorted(options.folder.glob("case_*.py"))
    paths = [p for p in paths if not options.only or any(part in p.stem for part in options.only)]
    if not paths:
        print(f"no case in {options.folder}", file=sys.stderr)
        return 2
    passed = failed = 0
    found: list[Verdict] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdicts in pool.map(lambda path: start_case(path, modes, options.ranks, options.fork), paths):
            found += verdicts
            good = all(v.ok for v in verdicts)
            passed, failed = passed + good, failed + (not good)
            for verdict in verdicts:
                if not options.json:
                    print(verdict.text(options.full), flush=True)
    if options.json:
        print(json.dumps({"passed": passed, "failed": failed, "cases": [asdict(v) for v in found]}))
    else:
        print(f"{passed} passed, {failed} failed")
    return 0 if not failed else 1


def start_case(path: Path, modes: list[str], ranks: str, fork: bool) -> list[Verdict]:
    """All modes of a case in one process under a time limit."""
    limit = SECONDS_PER_MODE[ranks] * len(modes)
    with tempfile.TemporaryDirectory(prefix="fxpar-case-") as folder:
        results = Path(folder) / "results"
        command = [sys.executable, __file__, str(path.parent), "--case", str(path), "--results", str(results),
                   "--ranks", ranks, *(["--fork"] if fork else []),
                   *(part for mode in modes for part in ("--mode", mode))]
        start = time.monotonic()
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                       start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            try:
                process.wait(limit)
                end = f"the process ended with exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                end = f"stopped after {limit:.0f} s"
            finally:
                stop_session(process)
            log.seek(0)
            last = log.read().strip().splitlines()[-1:]
        done = [Verdict(**json.loads(row)) for row in results.read_text().splitlines()] if results.exists() else []
        done = [Verdict(v.case, v.mode, v.ok, v.seconds, tuple(v.lines)) for v in done]
        missing = [m for m in modes if m not in {v.mode for v in done}]
        elapsed = time.monotonic() - start
        return [*done, *(Verdict(path.stem, m, False, elapsed, (end, *last)) for m in missing)]


# ------------------------------------------------------------------ in the case's own process


def run_case(path: Path, modes: list[str], ranks: str, results: Path, fork: bool) -> None:
    """Run all modes one after the other; a line of ``results`` for each as soon as it is known."""
    import torch

    torch.set_num_threads(1)
    captured = cache(lambda: capture_case(path))
    for mode in modes:
        start = time.monotonic()
        try:
            ok, lines = run_mode(path, mode, ranks, fork, captured)
        except Exception as error:
            ok, lines = False, [f"{type(error).__name__}: {error}", *traceback.format_exc().splitlines()[-6:]]
        verdict = Verdict(path.stem, mode, ok, time.monotonic() - start, tuple(lines))
        with results.open("a") as stream:
            stream.write(json.dumps(asdict(verdict)) + "\n")


def capture_case(path: Path) -> tuple[Any, Any]:
    """(the case as a model to compile, its program): the same for every mode."""
    from fxpar.captured import capture_program
    from fxpar.model_source import load_model_source
    from fxpar.progress import silent

    source = load_model_source(str(path))
    return source, capture_program(source, outputs=("all",), precision="fp32", progress=silent)


def run_mode(
    path: Path, mode: str, ranks: str, fork: bool, captured: Callable[[], tuple[Any, Any]]
) -> tuple[bool, list[str]]:
    """(passed, differences or message) of one mode."""
    from fxpar.compile import compile_model
    from fxpar.plans.errors import FxparError

    single, case = case_modules(path)
    meta = case.META
    mesh = mesh_of(meta, mode)
    if mesh is None:
        return True, ["not asked for by this case"]
    refusal = meta["expects"] == "clear_error"
    try:
        source, program = captured()
        seed = int(mode.split()[1]) if " " in mode else None
        plan = compile_model(source, mesh=mesh, outputs=("all",), random_choices=seed, captured=program).plan
    except FxparError as error:
        if refusal:
            return judge_refusal(meta, str(error))
        return False, [f"refused: {line}" if not i else line.strip() for i, line in enumerate(str(error).splitlines())]
    if refusal and "parallel" not in meta.get("also_ok", ()):
        return False, [f"a plan was made on mesh {mesh}; an error should name {', '.join(meta['mention'])}"]
    reference = read_reference(path)
    if ranks == "virtual":
        got, faults = virtual_record(plan, source, case, single)
        faults += single.compare(reference, got, meta)
        return not faults, faults
    return on_gloo(plan, path, fork)


def case_modules(path: Path) -> tuple[Any, Any]:
    """(run_single.py beside the case, the case)."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("run_single", path.parent / "run_single.py")
    assert spec is not None and spec.loader is not None
    single = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(single)
    return single, single.load_case(str(path))


def mesh_of(meta: dict[str, Any], mode: str) -> str | None:
    """The mesh of a mode; None when the case has no such mode."""
    force = meta.get("force")
    if mode == "forced":
        return ",".join(f"{axis}={size}" for axis, size in force.items()) if force else None
    if meta["expects"] == "clear_error" and force:
        return None  # it is the forced request that cannot be met
    return "x".join(map(str, meta["mesh"]))


def judge_refusal(meta: dict[str, Any], message: str) -> tuple[bool, list[str]]:
    """A refusal is good when it says some of what it should."""
    said = [word for word in meta["mention"] if word.lower() in message.lower()]
    first = message.splitlines()[0]
    if said:
        return True, [f"refused as it should be ({first})"]
    return False, [f"refused, but without {' or '.join(meta['mention'])}: {first}"]


def read_reference(path: Path) -> dict[str, Any]:
    """The stored record of one process."""
    import torch

    return torch.load(path.parent / "refs" / f"{path.stem}.pt", weights_only=True)


def fresh_model(path: Path, source: Any) -> Any:
    """The case's model with the record's weights."""
    import torch

    from fxpar.reference import built

    return built(source, torch.float32, read_reference(path)["init_state"])


def virtual_record(plan: Any, source: Any, case: Any, single: Any) -> tuple[dict[str, Any], list[str]]:
    """(record of one step on virtual ranks, what replicas disagree about)."""
    from fxpar.verify import run_virtual_ranks

    path = Path(source.path)
    step, faults = run_virtual_ranks(plan, source, "f32", read_reference(path)["init_state"])
    got = record_of(step.loss, step.gradients, step.buffers, list(step.outputs))
    return with_check(got, case, single, fresh_model(path, source), plan.program), faults


def record_of(loss: Any, gradients: Any, buffers: Any, outputs: Any) -> dict[str, Any]:
    """A record in the form of run_single.py."""
    return {"loss": loss, "grads": gradients, "buffers_after": buffers, "outputs": outputs}


def with_check(got: dict[str, Any], case: Any, single: Any, model: Any, program: Any) -> dict[str, Any]:
    """The record with the numbers of the case's check(), if it has one."""
    if hasattr(case, "check"):
        from fxpar.runtime.binding import structured

        tensors = iter(got["outputs"])
        known: dict[int, Any] = {}

        def value(index: int) -> Any:
            if index not in known:
                known[index] = next(tensors)
            return known[index]

        output = structured(program.structure, value)
        inputs = single.clone_inputs(case.example_inputs())
        got["check"] = case.check(model, got["loss"], got["grads"], output, inputs)
    return got


# ------------------------------------------------------------------ real ranks


def on_gloo(plan: Any, path: Path, fork: bool) -> tuple[bool, list[str]]:
    """The full record on real ranks, compared on every rank."""
    from fxpar.plans.codec import encode
    from fxpar.ranks import run_ranks
    from tools.forked_ranks import forked_ranks

    with tempfile.TemporaryDirectory(prefix="fxpar-case-") as folder:
        (Path(folder) / "plan.msgpack").write_bytes(encode(plan))
        count = plan.decisions.mesh.world_size
        if fork:
            end = forked_ranks(count, lambda: rank_main(Path(folder), path), Path(folder), timeout=SECONDS_OF_RANKS)
        else:
            end = run_ranks(count, [__file__, "--rank", folder, str(path)], timeout=SECONDS_OF_RANKS)
        lines = [line for failure in end.failures for line in failure.splitlines()]
        for rank in range(count):
            report = Path(folder) / f"report{rank}.json"
            if not report.exists():
                lines.append(f"rank {rank} left no record")
                continue
            lines += [f"rank {rank}: {line}" for line in json.loads(report.read_text())]
    return not lines, lines


def rank_main(folder: Path, path: Path) -> None:
    """One rank: step, outputs, training loop, further inputs; writes the differences it finds."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from fxpar.model_source import load_model_source
    from fxpar.plans.codec import read_plan
    from fxpar.reference import buffers_of
    from fxpar.runtime.model import load
    from fxpar.step_values import output_tensors_of_call
    from fxpar.verify_worker import check_same_everywhere, restore, whole, whole_gradients

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    single, case = case_modules(path)
    source = load_model_source(str(path))
    plan = read_plan(folder / "plan.msgpack")
    reference = read_reference(path)

    def loaded() -> Any:
        return load(plan, fresh_model(path, source), seed=0)

    module = loaded()
    args, kwargs = single.clone_inputs(case.example_inputs())
    before = buffers_of(module)
    loss = module.step(*args, **kwargs)
    got = record_of(loss, whole_gradients(module), buffers_of(module), [])
    restore(module, before)
    module.seed(0)
    with torch.no_grad():
        got["outputs"] = [whole(t) for t in output_tensors_of_call(module(*args, **kwargs))]
    got = with_check(got, case, single, fresh_model(path, source), plan.program)
    got["state_dict_keys"] = list(module.state_dict())
    if case.META.get("train"):
        got["train"] = train(loaded(), case, single, whole)
    check_same_everywhere(got)
    faults = single.compare(reference, got, case.META)
    if hasattr(case, "extra_inputs"):
        for index, inputs in enumerate(case.extra_inputs()):
            faults += further(loaded(), inputs, reference["extra"][index], single, index)
    part = folder / f"report{dist.get_rank()}.part"
    part.write_text(json.dumps(faults))
    part.rename(part.with_suffix(".json"))
    dist.barrier()
    dist.destroy_process_group()


def train(module: Any, case: Any, single: Any, whole: Callable[[Any], Any]) -> dict[str, Any]:
    """The loop that META["train"] describes, as run_single.py has it."""
    import torch

    t = dict(steps=3, accum=1, optimizer="adamw", lr=1e-2, clip=None, clip_norm_type=2.0, weight_decay=0.01, eps=1e-3)
    t.update(case.META["train"])
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = (
        torch.optim.AdamW(trained, lr=t["lr"], eps=t["eps"], weight_decay=t["weight_decay"])
        if t["optimizer"] == "adamw" else torch.optim.SGD(trained, lr=t["lr"], momentum=0.9)
    )
    micro, scale_of = getattr(case, "micro_inputs", None), getattr(case, "micro_scale", None)
    losses, norms = [], []
    for step in range(t["steps"]):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for k in range(t["accum"]):
            args, kwargs = single.clone_inputs(micro(step * t["accum"] + k) if micro else case.example_inputs())
            scale = float(scale_of(step, k)) if scale_of else 1 / t["accum"]
            total += float(module.step(*args, scale=scale, **kwargs)) * scale
        if t["clip"] is not None:
            norms.append(float(module.clip_grad_norm_(t["clip"], norm_type=t["clip_norm_type"])))
        optimizer.step()
        losses.append(total)
    named = module.named_parameters(remove_duplicate=False)
    return {"losses": losses, "grad_norms": norms, "params_after": {n: whole(p.detach()).clone() for n, p in named}}


def further(module: Any, inputs: Any, reference: dict[str, Any], single: Any, index: int) -> list[str]:
    """Further inputs for the same plan: right, or refused on every rank by an error that says why."""
    import torch.distributed as dist

    from fxpar.plans.errors import FxparError
    from fxpar.verify_worker import whole_gradients

    args, kwargs = single.clone_inputs(inputs)
    refusal, faults = "", []
    try:
        loss = module.step(*args, **kwargs)
        got = {"loss": loss, "grads": whole_gradients(module)}
        faults = [f"extra[{index}].{line}" for line in single.compare({**reference, "meta": {}}, got, {})]
    except FxparError as error:
        refusal = str(error)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, refusal)
    if len(set(told)) > 1:
        faults.append(f"extra[{index}]: refused on some ranks only: {sorted(set(told))}")
    return faults


def ranks_arguments() -> Iterator[tuple[Path, Path]]:
    """The folder and the case when this process is a rank."""
    if len(sys.argv) == 4 and sys.argv[1] == "--rank":
        yield Path(sys.argv[2]), Path(sys.argv[3])


if __name__ == "__main__":
    for folder, path in ranks_arguments():
        from fxpar.ranks import end_as_rank

        end_as_rank(lambda folder=folder, path=path: rank_main(folder, path))
    sys.exit(main())
