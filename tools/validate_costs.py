#!/usr/bin/env python3
"""Predicted beside published step times: every row of a file of measured training runs, built, placed as the row says,
and simulated on the row's machine.

    tools/validate_costs.py training.csv                       the whole file (about half an hour on one core)
    tools/validate_costs.py training.csv --source vTrain --every 10
    tools/validate_costs.py training.csv --json costs.json

A row names a model by its sizes, a batch, a machine and a configuration: data, tensor and pipeline parallel ranks,
microbatch, ZeRO stage, recomputation, schedule, precision. The same model is captured from a configuration of these
sizes, its placements are those people use (batch over dp, weights over tp, stages of equal time), and one step is
simulated. Nothing is fitted to these rows. Rows that cannot be expressed are listed with the reason.

Groups share source, model, sequence, GPU, number of GPUs and global batch: inside one, only the configuration differs.
"tau": Kendall's rank correlation of predicted and measured times; "regret": how much slower, as measured, the
configuration is that is predicted to be the fastest.
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
import csv  # noqa: E402
import dataclasses  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Iterable, Mapping, Sequence  # noqa: E402
from functools import lru_cache  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from fxpar.candidates import Request  # noqa: E402
from fxpar.captured import Captured, capture_program, in_microbatches  # noqa: E402
from fxpar.choose import Examination, Model  # noqa: E402
from fxpar.cli.short_lived import short_lived  # noqa: E402
from fxpar.cost.cluster import Cluster, parse_cluster  # noqa: E402
from fxpar.model_source import ModelSource, load_model_source  # noqa: E402
from fxpar.optimizer_state import optimizer_bytes_of  # noqa: E402
from fxpar.outer import Estimate, Shape  # noqa: E402
from fxpar.plans.errors import FxparError  # noqa: E402
from fxpar.plans.program import Program  # noqa: E402
from fxpar.prices import Prices  # noqa: E402
from fxpar.progress import silent  # noqa: E402

Row = Mapping[str, str]

PRESETS = {"A100-SXM4-80GB": "a100-80", "A100-SXM4-40GB": "a100-40", "H100-SXM5-80GB": "h100"}
"""GPU of a row -> the preset of its machine."""
PRECISIONS = {
    # (precision of fxpar, dtype of parameters and optimizer)
    "fp16": ("bf16", "float32"), "amp_bf16/DEFAULT": ("bf16", "float32"), "bf16/PURE": ("fp32", "bfloat16"),
    "bf16": ("bf16", "float32"),
}  # fmt: skip
"""float16 has the rates and sizes of bfloat16 on these machines."""
ANY_MEMORY = 2**45
"""Bytes per device that placements are made within: the rows ran, and time is what is compared."""


class Inexpressible(Exception):
    """A row that cannot be built or placed; the text says why."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """A row: seconds measured and predicted, GiB predicted on the fullest device."""

    name: str
    group: tuple[str, ...]
    source: str
    gpu: str
    shape: str
    measured: float
    predicted: float
    memory: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1


def configuration_of(row: Row) -> tuple[dict[str, Any], str]:
    """(configuration of a transformers model of these sizes, its task)."""
    hidden, layers, heads, seq = (int(row[key]) for key in ("hidden", "layers", "heads", "seq"))
    vocabulary, inner = int(row["vocab"]), int(row["ffn"])
    if row["model"].startswith(("GPT", "MPT")):
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": hidden, "n_layer": layers,
                "n_head": heads, "n_inner": inner, "n_positions": seq, "vocab_size": vocabulary, "attn_pdrop": 0.0,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "causal-lm"  # fmt: skip
    if row["model"].startswith("Llama"):
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": int(row["kv_heads"]),
                "intermediate_size": inner, "vocab_size": vocabulary, "max_position_embeddings": seq,
                "tie_word_embeddings": False}, "causal-lm"  # fmt: skip
    if row["model"].startswith("BERT"):
        return {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": hidden,
                "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
                "vocab_size": vocabulary, "max_position_embeddings": seq, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0}, "masked-lm"  # fmt: skip
    raise Inexpressible(f"no configuration is known for {row['model']}")


def number(row: Row, key: str, otherwise: int) -> int:
    """A column that may be empty."""
    return int(row[key] or otherwise)


def shape_of(row: Row) -> Shape:
    """Ranks and microbatches; refuses what fxpar has no form for."""
    for key in ("cp", "ep", "vpp"):
        if number(row, key, 1) != 1:
            raise Inexpressible(f"{key} = {row[key]}")
    pp, dp, tp = (number(row, key, 1) for key in ("pp", "dp", "tp"))
    if pp * dp * tp != int(row["gpus"]):
        raise Inexpressible(f"{pp} x {dp} x {tp} ranks on {row['gpus']} GPUs")
    batch = int(row["global_batch"])
    count, left = divmod(batch, dp * number(row, "micro_batch", batch // dp))
    if left:
        raise Inexpressible(f"a batch of {batch} in microbatches of {row['micro_batch']} on {dp} ranks")
    return Shape(pp, dp, tp, count)


def cluster_of(row: Row) -> Cluster:
    """The machine of a row."""
    if row["gpu"] not in PRESETS:
        raise Inexpressible(f"no preset is that of {row['gpu']}")
    per_node = number(row, "gpus_per_node", int(row["gpus"]))
    return parse_cluster(f"{int(row['gpus']) // per_node}x{per_node}:{PRESETS[row['gpu']]}")


@lru_cache(maxsize=4)
def captured_of(configuration: str, task: str, batch: int, seq: int, precision: str) -> tuple[ModelSource, Captured]:
    """A model taken up once for the rows that share it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(configuration)
        source = load_model_source(f"hf:{folder}", task=task, batch=batch, seq=seq)
        computed, stored = PRECISIONS[precision]
        if stored != "float32":
            build = source.build
            source = dataclasses.replace(source, build=lambda: build().to(getattr(torch, stored)))
        return source, capture_program(source, outputs=("loss",), precision=computed, progress=silent)


def compare(row: Row) -> Compared:
    """Build, place and simulate a row.

    Raises:
        Inexpressible: see its text.
    """
    if not row["step_s"]:
        raise Inexpressible("no step time")
    if row["precision"] not in PRECISIONS:
        raise Inexpressible(f"precision {row['precision']}")
    recompute = {"full": "on", "full (per block)": "on", "none": "off", "": "off"}.get(row["recompute"])
    if recompute is None:
        raise Inexpressible(f"recomputation {row['recompute']!r}")
    configuration, task = configuration_of(row)
    shape, cluster = shape_of(row), cluster_of(row)
    source, captured = captured_of(json.dumps(configuration), task, int(row["global_batch"]), int(row["seq"]),
                                   row["precision"])
    precision = PRECISIONS[row["precision"]][0]
    optimizer_bytes = optimizer_bytes_of(source, list(captured[1].named_parameters()))

    def split(count: int) -> Program:
        return in_microbatches(source, captured, count, "exact", ("loss",), precision, silent)[0]

    def unmeasured(count: int) -> Any:
        raise RuntimeError("no shape is estimated here")

    model = Model(split, unmeasured, int(row["global_batch"]), source.batch_dim, 1.0, optimizer_bytes)
    request = Request(captured[0], lambda mesh: Prices(cluster, mesh), ANY_MEMORY, optimizer_bytes, source.batch_dim,
                      0.01, silent, recompute)
    estimate = Estimate(shape, 0.0, 0.0, number(row, "zero_stage", 0) if shape.dp > 1 else 0, 0.0, True)
    try:
        found = Examination(model, cluster, request, estimate, ("1f1b",)).sketched()
    except FxparError as error:
        raise Inexpressible(error.what) from error
    if found.prediction is None:
        raise Inexpressible(found.note)
    group = tuple(row[key] for key in ("source", "model", "seq", "gpu", "gpus", "global_batch", "precision"))
    return Compared(row["id"], group, row["source"], row["gpu"], f"{shape}, recompute {recompute}",
                    float(row["step_s"]), found.prediction.step_ns / 1e9, found.prediction.peak_bytes / 2**30)


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Tau-a of (predicted, measured): agreeing less disagreeing pairs over all pairs that differ as measured."""
    agreed = counted = 0
    for (p, m), (q, n) in itertools.combinations(pairs, 2):
        if m != n:
            counted += 1
            agreed += (p > q) - (p < q) == (m > n) - (m < n)
            agreed -= (p > q) - (p < q) == (m < n) - (m > n)
    return agreed / counted if counted else 1.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all is at or below (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def summary(compared: Sequence[Compared]) -> dict[str, Any]:
    """Errors by source and GPU, and how well configurations are ranked inside groups."""
    by: dict[str, list[Compared]] = defaultdict(list)
    for row in compared:
        by["all"].append(row)
        by[f"{row.source}, {row.gpu}"].append(row)
    errors = {
        name: {"rows": len(rows), "median": statistics.median(abs(r.error) for r in rows),
               "p90": quantile([abs(r.error) for r in rows], 0.9), "bias": statistics.median(r.error for r in rows)}
        for name, rows in by.items()
    }  # fmt: skip
    groups: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
    for row in compared:
        groups[row.group].append(row)
    several = [rows for rows in groups.values() if len(rows) > 1]
    if not several:
        return {"errors": errors, "groups": 0}
    draw = random.Random(0)

    def regret(rows: Sequence[Compared], chosen: Compared) -> float:
        return chosen.measured / min(r.measured for r in rows) - 1

    ours = [regret(rows, min(rows, key=lambda r: r.predicted)) for rows in several]
    anyone = [regret(rows, draw.choice(rows)) for rows in several]
    return {
        "errors": errors, "groups": len(several),
        "tau": statistics.mean(kendall([(r.predicted, r.measured) for r in rows]) for rows in several),
        "regret_median": statistics.median(ours), "regret_p95": quantile(ours, 0.95),
        "random_regret_median": statistics.median(anyone), "random_regret_p95": quantile(anyone, 0.95),
    }  # fmt: skip


def report(compared: Sequence[Compared], left: Sequence[tuple[str, str]]) -> str:
    """For people."""
    lines = []
    if compared:
        found = summary(compared)
        for name, e in found["errors"].items():
            lines.append(f"{name:60} {e['rows']:4} rows  median {e['median']:6.1%}  p90 {e['p90']:6.1%}  "
                         f"bias {e['bias']:+7.1%}")
        if found["groups"]:
            lines.append(f"{found['groups']} groups: tau {found['tau']:.3f}, regret median "
                         f"{found['regret_median']:.1%} p95 {found['regret_p95']:.1%} (at random "
                         f"{found['random_regret_median']:.1%}, {found['random_regret_p95']:.1%})")
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, why in left:
        reasons[why].append(name)
    lines += [f"not expressed, {len(names)} rows: {why} ({', '.join(names[:4])}{' ...' if len(names) > 4 else ''})"
              for why, names in reasons.items()]
    return "\n".join(lines)


def chosen_rows(rows: Iterable[Row], source: str, every: int) -> list[Row]:
    """Rows of a source, every so many, those that share a capture together."""
    some = [row for row in rows if source.lower() in row["source"].lower()][::every]
    return sorted(some, key=lambda r: tuple(r[key] for key in ("model", "seq", "global_batch", "precision", "id")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE.csv", help="measured training runs")
    parser.add_argument("--source", default="", help="only rows whose source has this text")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth row")
    parser.add_argument("--json", metavar="FILE", help="write rows and summary there, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if arguments is None:
        short_lived()
    with open(options.file, newline="") as file:
        rows = chosen_rows(csv.DictReader(file), options.source, max(options.every, 1))
    compared: list[Compared] = []
    left: list[tuple[str, str]] = []
    for row in rows:
        try:
            compared.append(compare(row))
        except Inexpressible as why:
            left.append((row["id"], str(why)))
            continue
        r = compared[-1]
        print(f"{r.name:10} {row['model']:14} {r.gpu:16} {r.shape:60} measured {r.measured:8.3f} s  predicted "
              f"{r.predicted:8.3f} s  {r.error:+7.1%}", file=sys.stderr, flush=True)
    print(report(compared, left))
    if options.json:
        Path(options.json).write_text(json.dumps({
            "rows": [dataclasses.asdict(r) for r in compared], "not_expressed": left,
            "summary": summary(compared) if compared else {},
        }, indent=1))  # fmt: skip
    return 0 if compared else 1


if __name__ == "__main__":
    sys.exit(main())
