#!/usr/bin/env python3
"""Is the plan that fxpar chooses, with nothing asked, faster than every plan of a grid that people would try?

    tools/megatron_grid.py                         three models on their clusters
    tools/megatron_grid.py --model t5-11b --json grid.json

The grid: tensor parallel ranks x pipeline ranks x samples of a microbatch x how parameters are stored (ZeRO stage 1;
0 and 3 where there is one stage) x layers run again in backward (all of them, or what memory asks for) x schedule
(1F1B, interleaved 1F1B). Each is placed as Megatron-LM and its users place it: batch over data parallel ranks, weights
of attention and feed-forward over tensor parallel ones, stages of equal time. Every configuration that exists (a whole
number of microbatches, a schedule for it) is rewritten and simulated like the chosen plan, on the same rates; what does
not fit with every layer run again is not tried with fewer. Exit code 1 when one that fits is faster. All figures are
simulated.
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
import dataclasses  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from fxpar.candidates import Request  # noqa: E402
from fxpar.captured import Captured, capture_program  # noqa: E402
from fxpar.choose import Examination, Model  # noqa: E402
from fxpar.cli.short_lived import short_lived  # noqa: E402
from fxpar.compile import budget_of, compile_model  # noqa: E402
from fxpar.cost.cluster import Cluster, parse_cluster  # noqa: E402
from fxpar.model_source import ModelSource, load_model_source  # noqa: E402
from fxpar.open_model import open_model  # noqa: E402
from fxpar.optimizer_state import optimizer_bytes_of  # noqa: E402
from fxpar.outer import Estimate, Shape  # noqa: E402
from fxpar.plans.plan import Plan  # noqa: E402
from fxpar.prices import Prices  # noqa: E402
from fxpar.progress import silent  # noqa: E402
from tools.bench_compile import CONFIGURATIONS  # noqa: E402

TENSOR, STAGES, SAMPLES = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4)
SCHEDULES = ("1f1b", "interleaved")
AGAIN = ("on", "auto")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's published sizes, its call and its cluster; the precision is bfloat16 over float32 parameters."""

    configuration: dict[str, Any]
    task: str
    batch: int
    seq: int
    cluster: str


CASES = {
    # two million tokens a step, as at first in "The Llama 3 Herd of Models" (2024), here of shorter sequences
    "llama-70b": Case(CONFIGURATIONS["llama-70b"], "causal-lm", 512, 4096, "64x8:h100"),
    # sizes and batch: table 2.1 of "Language Models are Few-Shot Learners" (2020), table 1 of "Efficient Large-Scale
    # Language Model Training on GPU Clusters" (2021)
    "gpt3-175b": Case({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 12288, "n_layer": 96,
                       "n_head": 96, "n_positions": 2048, "vocab_size": 50257, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                       "embd_pdrop": 0.0}, "causal-lm", 1536, 2048, "128x8:a100"),
    # sizes: table 14 of "Exploring the Limits of Transfer Learning" (2020)
    "t5-11b": Case({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 1024,
                    "d_ff": 65536, "d_kv": 128, "num_heads": 128, "num_layers": 24, "num_decoder_layers": 24,
                    "vocab_size": 32128, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
                   "seq2seq-lm", 64, 512, "4x8:a100"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Placed:
    """Configurations of the grid that differ in their schedule alone."""

    shape: Shape
    zero: int
    again: str

    @property
    def schedules(self) -> int:
        """How many configurations they are."""
        return len(SCHEDULES) if self.shape.pp > 1 else 1

    def __str__(self) -> str:
        return f"{self.shape}, ZeRO-{self.zero}, recompute {self.again}"


@dataclasses.dataclass(frozen=True)
class Result:
    """ns of a step and bytes of the fullest rank with the faster schedule; None and why where nothing fits."""

    placed: Placed
    step_ns: int | None
    peak_bytes: int | None
    note: str


def grid(world: int, batch: int) -> Iterator[Placed]:
    """All that exist on so many ranks for so many samples."""
    for tensor in TENSOR:
        for stages in STAGES:
            data, left = divmod(world, tensor * stages)
            if left or not data or batch % data:
                continue
            for samples in SAMPLES:
                microbatches, left = divmod(batch // data, samples)
                if left or (stages > 1 and microbatches < 2):
                    continue
                zeros = (1,) if stages > 1 else (0, 1, 3)
                for zero in zeros if data > 1 else (0,):
                    for again in AGAIN:
                        yield Placed(Shape(stages, data, tensor, microbatches), zero, again)


@dataclasses.dataclass(frozen=True, eq=False)
class Opened:
    """What evaluating configurations of a model on a cluster takes."""

    model: Model
    cluster: Cluster
    request: Request
    parameters: int

    def least_bytes(self, placed: Placed) -> int:
        """What the average rank holds at least: float32 parameters and two moments, their gradients, and the bfloat16
        copies that are computed with (of ZeRO-3 they come and go)."""
        shape, zero = placed.shape, placed.zero
        # ZeRO-1 keeps the sums of several microbatches whole, what a single one leaves is cut at once
        cut = zero == 3 or (zero == 1 and shape.microbatches == 1)
        each = 12 / (shape.dp if zero else 1) + 4 / (shape.dp if cut else 1) + (0 if zero == 3 else 2)
        return int(each * self.parameters / (shape.pp * shape.tp))

    def evaluate(self, placed: Placed) -> Result:
        """Place and simulate."""
        least = self.least_bytes(placed)
        if least > self.request.budget_bytes:
            return Result(placed, None, None, f"parameters and gradients alone take {least / 2**30:.0f} GiB")
        estimate = Estimate(placed.shape, 0.0, 0.0, placed.zero, 0.0, True)
        request = dataclasses.replace(self.request, recompute=placed.again)
        found = Examination(self.model, self.cluster, request, estimate, SCHEDULES).sketched()
        if found.prediction is None:
            return Result(placed, None, None, found.note)
        return Result(placed, found.prediction.step_ns, found.prediction.peak_bytes, found.note)


def opened(source: ModelSource, captured: Captured, cluster: Cluster, precision: str) -> Opened:
    """Ready a model for its cluster."""
    program, module = captured
    optimizer_bytes = optimizer_bytes_of(source, list(module.named_parameters()))
    model = open_model(source, captured, ("loss",), precision, optimizer_bytes, silent)
    if model is None:
        raise SystemExit(f"megatron_grid: {source.name} cannot be cut in microbatches")
    budget, _ = budget_of(cluster, None, None)
    request = Request(program, lambda mesh: Prices(cluster, mesh), budget, optimizer_bytes, source.batch_dim, 0.01,
                      silent, "auto")
    return Opened(model, cluster, request, sum(p.numel() for p in module.parameters()))


def compared(source: ModelSource, cluster: str, precision: str) -> tuple[Plan, float, list[Result]]:
    """The chosen plan, the seconds it took with the capture, and the grid."""
    start = time.monotonic()
    captured = capture_program(source, outputs=("loss",), precision=precision, progress=silent)
    plan = compile_model(source, cluster=cluster, precision=precision, captured=captured).plan
    seconds = time.monotonic() - start
    machine = parse_cluster(cluster)
    ready = opened(source, captured, machine, precision)
    results: list[Result] = []
    full: set[tuple[Shape, int]] = set()  # what does not fit although every layer runs again
    for placed in grid(machine.world_size, ready.model.batch):
        if (placed.shape, placed.zero) in full:
            results.append(Result(placed, None, None, "does not fit, not even with every layer run again"))
        else:
            results.append(ready.evaluate(placed))
        if placed.again == "on" and results[-1].step_ns is None:
            full.add((placed.shape, placed.zero))
        print(line(results[-1], plan), file=sys.stderr, flush=True)
    return plan, seconds, results


def line(result: Result, plan: Plan) -> str:
    """A configuration beside the chosen plan."""
    if result.step_ns is None or result.peak_bytes is None:
        return f"{str(result.placed):60} {result.note}"
    slower = result.step_ns / plan.prediction.step_ns - 1
    return (f"{str(result.placed):60} {result.step_ns / 1e9:8.3f} s {result.peak_bytes / 2**30:6.1f} GiB "
            f"{slower:+8.2%}  {result.note}")


def faster(plan: Plan, results: Sequence[Result]) -> list[Result]:
    """Configurations that fit and are faster than the plan."""
    return [r for r in results if r.step_ns is not None and r.step_ns < plan.prediction.step_ns]


def source_of(case: Case, folder: Path) -> ModelSource:
    """The model by its configuration alone."""
    (folder / "config.json").write_text(json.dumps(case.configuration))
    return load_model_source(f"hf:{folder}", task=case.task, batch=case.batch, seq=case.seq)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", action="append", choices=sorted(CASES), help="only this model (any number)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too: ns, bytes, seconds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if arguments is None:
        short_lived()
    said, lost = {}, 0
    for name in options.model or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            plan, seconds, results = compared(source_of(case, Path(folder)), case.cluster, "bf16")
        better = faster(plan, results)
        lost += len(better)
        fitting = [r for r in results if r.step_ns is not None]
        print(f"{name} on {case.cluster}: {plan.prediction.step_ns / 1e9:.3f} s chosen in {seconds:.0f} s; "
              f"{sum(r.placed.schedules for r in results)} configurations, of {len(results)} placements "
              f"{len(fitting)} fit, {len(better)} faster")
        for result in sorted(fitting, key=lambda r: r.step_ns or 0)[:3]:
            print(f"  {line(result, plan)}")
        said[name] = {
            "step_ns": plan.prediction.step_ns, "seconds": seconds, "configurations":
            [{"placed": str(r.placed), "step_ns": r.step_ns, "peak_bytes": r.peak_bytes, "note": r.note}
             for r in results],
        }  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps(said, indent=1))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
