#!/usr/bin/env python3
"""How long `fxpar compile` takes, how much memory, and how large the plan is.

    tools/bench_compile.py                                  all rows
    tools/bench_compile.py --model llama-8b                 rows of one model
    tools/bench_compile.py --model llama-70b --mesh 4x8x8 --memory 72GiB --memory 24GiB
    tools/bench_compile.py --json bench.json                also as data

Every row is the real command in a process of its own, from a configuration of the model's published sizes (nothing is
downloaded, no parameter is allocated). Columns: seconds of wall time to capture, to search (formulate, solve, simulate
all candidates), of that in the solver, and of the whole command; the process's peak resident memory; the plan file; the
simulated step and the proven gap. Exit code 1 when a row failed. Run it on a machine that does nothing else.
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
import functools  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from typing import Any  # noqa: E402

TIMED = {
    "capture": ("fxpar.compile", "capture_whole"),
    "search": ("fxpar.compile", "run_search"),
    "solver": ("fxpar.search", "solve"),
}
"""Column -> (module, function) whose time it is; of calls within each other the outer one counts."""

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
          "max_position_embeddings": 8192, "tie_word_embeddings": False, "num_key_value_heads": 8}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-8b": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "intermediate_size": 14336},
    "llama-70b": {**_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                  "intermediate_size": 28672},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One command: sequences of 4096 tokens, bfloat16 over float32 parameters, AdamW."""

    model: str
    cluster: str
    batch: int
    mesh: str | None = None
    memory: str | None = None

    def arguments(self, folder: Path) -> list[str]:
        """`fxpar` arguments; the configuration and the plan are in ``folder``."""
        result = ["compile", f"hf:{folder}", "--task", "causal-lm", "--seq", "4096", "--batch", str(self.batch),
                  "--precision", "bf16", "--cluster", self.cluster, "--json", "-o", str(folder / "plan")]  # fmt: skip
        result += ["--mesh", self.mesh] if self.mesh else []
        return result + (["--memory", self.memory] if self.memory else [])


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row's figures: seconds, bytes, ns; ``error`` is what the command said instead."""

    row: Row
    layers: int
    capture: float = 0.0
    search: float = 0.0
    solver: float = 0.0
    whole: float = 0.0
    peak_rss: int = 0
    plan_bytes: int = 0
    step_ns: int = 0
    gap: float = 0.0
    mesh: str = ""
    error: str = ""


def rows(models: Sequence[str], meshes: Sequence[str], memories: Sequence[str]) -> Iterator[Row]:
    """Llama-8B on 64 devices, 8x8 and as the search likes it; Llama-70B's sizes on 256 devices, on every mesh within
    every budget."""
    if "llama-8b" in models:
        yield Row("llama-8b", "8x8:h100", 64, "8x8")
        yield Row("llama-8b", "8x8:h100", 64)
    if "llama-70b" in models:
        for mesh in meshes:
            for memory in memories:
                yield Row("llama-70b", "32x8:h100", 256, mesh, memory)


def measure(row: Row, timeout: float) -> Measured:
    """Run the command in a fresh process."""
    layers = CONFIGURATIONS[row.model]["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[row.model]))
        command = [sys.executable, __file__, "--run", str(folder / "times"), *row.arguments(folder)]
        start = time.monotonic()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return Measured(row, layers, whole=timeout, error=f"not done after {timeout:.0f} s")
        whole = time.monotonic() - start
        if ended.returncode:
            said = ended.stderr.strip().splitlines()
            return Measured(row, layers, whole=whole, error=said[0] if said else f"exit code {ended.returncode}")
        times = json.loads((folder / "times").read_text())
        facts = json.loads(ended.stdout)
        return Measured(
            row, layers, times["capture"], times["search"], times["solver"], whole, times["peak_rss"],
            (folder / "plan").stat().st_size, facts["prediction"]["step_ns"], facts["certificate"]["gap"],
            "x".join(map(str, facts["mesh"].values())),
        )  # fmt: skip


def run_timed(output: str, arguments: Sequence[str]) -> int:
    """`fxpar ARGUMENTS` in this process; the seconds of its phases and its peak memory are written to ``output``."""
    spent: Counter[str] = Counter()
    for column, (module_name, name) in TIMED.items():
        module = importlib.import_module(module_name)
        setattr(module, name, timed(getattr(module, name), column, spent))
    from fxpar.cli.main import main as fxpar_main
    from fxpar.cli.short_lived import short_lived

    short_lived()  # as where the command line starts the process
    code = fxpar_main(arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    Path(output).write_text(json.dumps({**{c: spent[c] for c in TIMED}, "peak_rss": peak * unit}))
    return code


def timed(function: Callable[..., Any], column: str, spent: Counter[str]) -> Callable[..., Any]:
    """The function, its seconds added to ``spent[column]``."""
    depth = 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        start = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                spent[column] += time.monotonic() - start  # type: ignore[assignment]

    return run


HEADER = ("model", "layers", "cluster", "mesh", "budget", "capture s", "search s", "solver s", "whole s", "RSS GiB",
          "plan MB", "step", "gap")  # fmt: skip


def cells(m: Measured) -> tuple[str, ...]:
    """A row of the table."""
    start = (m.row.model, str(m.layers), m.row.cluster, m.mesh or m.row.mesh or "", m.row.memory or "all")
    if m.error:
        return (*start, "", "", "", f"{m.whole:.1f}", "", "", m.error, "")
    return (
        *start, f"{m.capture:.1f}", f"{m.search:.1f}", f"{m.solver:.1f}", f"{m.whole:.1f}", f"{m.peak_rss / 2**30:.2f}",
        f"{m.plan_bytes / 1e6:.2f}", f"{m.step_ns / 1e9:.3f} s", f"{m.gap:.2%}",
    )  # fmt: skip


def table(measured: Sequence[Measured]) -> str:
    """Markdown, columns aligned."""
    lines = [HEADER, *map(cells, measured)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", action="append", choices=sorted(CONFIGURATIONS), help="only this model's rows")
    parser.add_argument("--mesh", action="append", metavar="32x8", help="meshes of llama-70b (32x8 and 4x8x8)")
    parser.add_argument("--memory", action="append", metavar="72GiB", help="budgets of llama-70b (72GiB and 24GiB)")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for one row (1800)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too: seconds, bytes, ns")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the rows asked for."""
    options = parse(arguments)
    asked = rows(
        options.model or sorted(CONFIGURATIONS), options.mesh or ["32x8", "4x8x8"], options.memory or ["72GiB", "24GiB"]
    )
    measured = []
    for row in asked:
        measured.append(measure(row, options.timeout))
        print("  ".join(cell for cell in cells(measured[-1]) if cell), file=sys.stderr, flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps([dataclasses.asdict(m) for m in measured], indent=1) + "\n")
    print(table(measured))
    return int(any(m.error for m in measured))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(run_timed(sys.argv[2], sys.argv[3:]))
    sys.exit(main())
