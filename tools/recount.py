#!/usr/bin/env python3
"""Is the cost that plans are chosen by the cost of the program that runs? Counted again, op by op and collective by
collective, for eight models on five clusters; beside it, how much slower every plan people make by hand would be.

    tools/recount.py                                    the whole table
    tools/recount.py --model bert-base --cluster 1x8:h100
    tools/recount.py --json recount.json --markdown recount.md

The certificate's cost is a sum of table entries that the solver chose. The recount never sees those tables: the plan's
decisions are rewritten into what rank 0 runs, and every local op is timed by the shapes of its local tensors, every
collective by its bytes and its group. Program and cost are compared before bucketing and prefetching, which change when
collectives travel and not what is sent: a small reduction of a gradient and a small gathering of a parameter count as
their share of a full bucket, as the solver counts them. Exit code 1 when a difference is above 0.1 % or a fitting plan
by hand is faster than the chosen one.
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
import warnings  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from fxpar.captured import Captured, capture_program  # noqa: E402
from fxpar.compile import compile_model  # noqa: E402
from fxpar.cost.cluster import Cluster, parse_cluster  # noqa: E402
from fxpar.cost.collectives import CollectiveKind, collective_ns  # noqa: E402
from fxpar.cost.compute import Work, compute_ns  # noqa: E402
from fxpar.cost.op_work import TensorShape, tensor_bytes, work_of  # noqa: E402
from fxpar.model_source import ModelSource, load_model_source  # noqa: E402
from fxpar.plans.errors import FxparError  # noqa: E402
from fxpar.plans.plan import Decisions, Plan  # noqa: E402
from fxpar.plans.program import Arg, Program, Ref  # noqa: E402
from fxpar.progress import silent  # noqa: E402
from fxpar.rules.factor_rule import argument_names  # noqa: E402
from fxpar.runtime.local import AnyStep, CollectiveStep, LocalProgram, LocalStep  # noqa: E402
from fxpar.runtime.rewrite.bucket import BUCKET_BYTES  # noqa: E402
from fxpar.runtime.rewrite.dead import remove_dead_steps  # noqa: E402
from fxpar.runtime.rewrite.localise import localise  # noqa: E402

LIMIT = 0.001
"""The most that recount and certificate may differ by, relative."""

@dataclasses.dataclass(frozen=True)
class Model:
    """A model by its configuration (nothing is downloaded) and the global batch it trains on."""

    task: str
    batch: int
    seq: int | None
    precision: str
    sizes: dict[str, Any]


_ROPE = {"max_position_embeddings": 4096, "tie_word_embeddings": False, "num_key_value_heads": 8}
MODELS: dict[str, Model] = {
    "bert-base": Model("masked-lm", 64, 512, "fp32", {
        "model_type": "bert", "architectures": ["BertForMaskedLM"]}),
    "bert-large": Model("masked-lm", 64, 512, "bf16", {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 16, "intermediate_size": 4096}),
    "gpt2-medium": Model("causal-lm", 32, 1024, "bf16", {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "t5-base": Model("seq2seq-lm", 64, 512, "fp32", {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_ff": 3072, "d_kv": 64,
        "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}),
    "vit-large": Model("image-classification", 256, None, "bf16", {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}),
    "resnet-50": Model("image-classification", 256, None, "fp32", {
        "model_type": "resnet", "architectures": ["ResNetForImageClassification"]}),
    "llama-1b": Model("causal-lm", 16, 2048, "bf16", {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192, **_ROPE}),
    "mixtral-small": Model("causal-lm", 16, 2048, "bf16", {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 1024,
        "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 3584, "num_local_experts": 8,
        "num_experts_per_tok": 2, **_ROPE}),
}
"""Published sizes, but for Mixtral: a quarter of the width of Mixtral-8x7B, 12 of its 32 layers."""

CLUSTERS = ("1x8:h100", "2x8:h100", "1x4:a100", "2x4:l40s", "1x8:4090")
"""One node, two on a fast network, a small node, two nodes of PCIe cards on 100 Gb/s (the slow network), and consumer
cards with 24 GiB."""


def recount(program: Program, decisions: Decisions, cluster: Cluster, *, as_written: bool = False) -> int:
    """ns of one step of rank 0 if nothing overlaps: all its ops and collectives, one after the other.

    ``as_written``: before equal reshards of one value are made once and what nobody reads is dropped.
    """
    local = localise(program, decisions, (0,) * len(decisions.mesh.axes), shared=not as_written)
    local = local if as_written else remove_dead_steps(local)
    buckets = bucketed(program, local)
    return sum(step_ns(step, local, cluster, in_bucket=index in buckets) for index, step in enumerate(local.steps))


def bucketed(program: Program, local: LocalProgram) -> set[int]:
    """Positions of the collectives that the rewrite joins into buckets, if they are small.

    These are gatherings of program inputs (where a parameter has a hub: at the hub), and reductions whose results
    nothing but gradients and buffers that leave the program, or other such reductions, read.
    """
    entering = {i.value for i in program.inputs}
    wanted = {v for v, o in zip(local.outputs, program.outputs, strict=True) if o.kind in ("gradient", "buffer")}
    other = {v for v, o in zip(local.outputs, program.outputs, strict=True) if o.kind not in ("gradient", "buffer")}
    found: set[int] = set()
    for index in range(len(local.steps) - 1, -1, -1):
        step = local.steps[index]
        if isinstance(step, CollectiveStep) and step.kind in ("all_reduce", "reduce_scatter"):
            if wanted.issuperset(step.outputs) and other.isdisjoint(step.outputs):
                found.add(index)
                wanted.update(step.values)
                continue
        if isinstance(step, CollectiveStep) and step.kind == "all_gather" and step.values[0] in local.inputs:
            if local.origins[step.outputs[0]][0] in entering:
                found.add(index)
        other.update(step.reads)
    return found


def step_ns(step: AnyStep, local: LocalProgram, cluster: Cluster, *, in_bucket: bool) -> int:
    """ns of one step; ``in_bucket``: a collective smaller than a bucket takes its share of the bucket's time."""
    if isinstance(step, CollectiveStep):
        kind: CollectiveKind = "send" if step.kind in ("halo", "halo_sum") else step.kind  # type: ignore[assignment]
        if in_bucket and step.bytes < BUCKET_BYTES:
            whole = collective_ns(cluster, local.mesh.sizes, step.axis, kind, BUCKET_BYTES)
            return -(-whole * step.bytes // BUCKET_BYTES)
        return collective_ns(cluster, local.mesh.sizes, step.axis, kind, step.bytes)
    if isinstance(step, LocalStep):
        kept = shape_of(local, step.output)
        return compute_ns(cluster.device, Work("memory", 0, 2 * tensor_bytes(kept), kept.dtype))
    operands = [shape_of(local, v) for v in step.operands]
    outputs = [None if v < 0 else shape_of(local, v) for v in step.outputs]
    names = argument_names(step.op)
    arguments = {name: arg for name, arg in zip(names, step.args, strict=True) if not refers(arg)}
    return compute_ns(cluster.device, work_of(step.op, operands, outputs, arguments))


def shape_of(local: LocalProgram, value: int) -> TensorShape:
    """Local shape and dtype of a local value."""
    return TensorShape(local.types[value].shape, local.types[value].dtype)


def refers(arg: Arg) -> bool:
    """True for an argument that is a tensor or holds one."""
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(map(refers, arg)))


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled plan; times in ns, ``seconds`` of the compilation. ``manual``: per plan made by hand (its fastest
    mesh) its step over the chosen plan's, and the bytes it needs if that is more than there is."""

    model: str
    cluster: str
    mesh: str = ""
    chosen: str = ""
    step_ns: int = 0
    cost_ns: int = 0
    recount_ns: int = 0
    gap: float = 0.0
    manual: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def difference(self) -> float:
        """Recount beside the certificate's cost, relative."""
        return (self.recount_ns - self.cost_ns) / max(self.cost_ns, 1)

    @property
    def wrong(self) -> bool:
        """True when the recount differs, or a plan by hand that fits is faster."""
        slower = any(ratio < 1 and not needs for ratio, needs in self.manual.values())
        return bool(self.error) or abs(self.difference) > LIMIT or slower


MANUAL = {"data parallel": "data parallel", "ZeRO-3": "ZeRO-3", "Megatron tensor parallel": "tensor parallel",
          "data + Megatron tensor parallel": "data + tensor parallel"}
"""Name of a candidate -> its column."""


def row_of(plan: Plan, cluster_text: str, seconds: float) -> Row:
    """The figures of one plan."""
    cluster = parse_cluster(cluster_text)
    manual: dict[str, tuple[float, int]] = {}
    for candidate in plan.candidates:
        p, name = candidate.prediction, MANUAL.get(candidate.name.removeprefix("other than "))
        if p is None or name is None:
            continue
        entry = (p.step_ns / plan.prediction.step_ns, 0 if candidate.fits else p.peak_bytes)
        known = manual.get(name)
        if known is None or (bool(entry[1]), entry[0]) < (bool(known[1]), known[0]):
            manual[name] = entry
    return Row(
        dict(plan.provenance)["model"], cluster_text, "x".join(map(str, plan.decisions.mesh.sizes)),
        plan.candidates[0].name, plan.prediction.step_ns, plan.certificate.cost_ns,
        recount(plan.program, plan.decisions, cluster), plan.certificate.gap, manual, seconds,
    )


def source_of(name: str, folder: Path) -> ModelSource:
    """The model's source, from a configuration written into ``folder``."""
    model = MODELS[name]
    where = folder / name
    where.mkdir()
    (where / "config.json").write_text(json.dumps(model.sizes))
    return load_model_source(f"hf:{where}", task=model.task, seq=model.seq, batch=model.batch)


def compiled(source: ModelSource, captured: Captured, precision: str, cluster: str) -> Row:
    """Compile for one cluster and count again; what stops the compiler is in the row."""
    start = time.monotonic()
    try:
        plan = compile_model(source, cluster=cluster, captured=captured, precision=precision, microbatches=1).plan
    except FxparError as error:
        return Row(source.name, cluster, seconds=time.monotonic() - start, error=str(error).splitlines()[0])
    return row_of(plan, cluster, time.monotonic() - start)


HEADER = ("model", "cluster", "mesh", "step", "serial cost", "recount", "gap", *MANUAL.values())


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    if row.error:
        return (row.model, row.cluster, "", row.error, *("",) * (len(HEADER) - 4))
    return (
        row.model, row.cluster, row.mesh, f"{row.step_ns / 1e6:.1f} ms", f"{row.cost_ns / 1e6:.1f} ms",
        f"{row.difference:+.3%}", f"{row.gap:.1%}", *(ratio_text(row.manual.get(name)) for name in MANUAL.values()),
    )


def ratio_text(entry: tuple[float, int] | None) -> str:
    """How much longer a plan by hand takes, or what it needs."""
    if entry is None:
        return "-"
    ratio, needs = entry
    return f"needs {needs / 2**30:.1f} GiB" if needs else f"{ratio:.3f}"


def markdown(rows: Sequence[Row]) -> str:
    """The table for a README."""
    lines = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(rows: Sequence[Row]) -> None:
    """The table for a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADER, title="step simulated; by hand: step over the chosen plan's", title_justify="left")
    for row in rows:
        table.add_row(*cells(row), style="red" if row.wrong else None)
    Console(width=max(Console().width, 150)).print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="only this model (repeatable)")
    parser.add_argument("--cluster", action="append", metavar="1x8:h100", help="only this cluster (repeatable)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too: ns, bytes, ratios")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there, too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, count again and print the rows asked for."""
    options = parse(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for model in options.model or MODELS:
            source, precision = source_of(model, Path(name)), MODELS[model].precision
            captured = capture_program(source, outputs=("loss",), precision=precision, progress=silent)
            for cluster in options.cluster or CLUSTERS:
                rows.append(compiled(source, captured, precision, cluster))
                print(*(c for c in cells(rows[-1]) if c), f"{rows[-1].seconds:.1f} s", sep="  ", file=sys.stderr,
                      flush=True)
                if options.json:
                    Path(options.json).write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
                if options.markdown:
                    Path(options.markdown).write_text(markdown(rows) + "\n")
    show(rows)
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
