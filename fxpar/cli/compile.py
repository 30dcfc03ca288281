"""`fxpar compile MODEL -o PLAN`: choose a plan and write it."""

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

from fxpar.cli import options as option
from fxpar.cli.terminal import make_progress
from fxpar.plans.codec import encode, read_plan
from fxpar.plans.errors import FxparError

EXAMPLE = """
fxpar compile model.py -o plan.msgpack --cluster 2x8:h100
fxpar compile model.py -o plan.msgpack --cluster 1x4:a100-80 --mesh dp=2,tp=2 --memory 72GiB
fxpar compile model.py -o plan.msgpack --cluster 2x8:h100 --zero 3 --pin 'embed*.weight=Replicate'
fxpar compile model.py -o plan.msgpack --mesh 2x4 --pin 'layers.*.mlp.up=a1:ffn' --pin 'attention=a1:heads'
fxpar compile model.py -o plan.msgpack --mesh pp=2,dp=2 --schedule 1f1b --microbatches 4
fxpar compile hf:llama/ -o plan.msgpack --task causal-lm --seq 4096 --batch 256 --precision bf16 --cluster 2x8:h100
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The options of `fxpar compile`."""
    parser = option.add_command(
        subparsers, "compile", summary="choose how to run a model on a cluster and write the plan", example=EXAMPLE
    )
    option.add_model_options(parser)
    parser.add_argument("-o", "--output", metavar="PLAN", required=True, help="the plan file to write")
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--cluster", metavar="NODESxDEVICES:KIND|FILE.toml", help="the machines, such as 2x8:h100, or a file"
    )
    group.add_argument(
        "--mesh",
        type=option.mesh,
        metavar="4|2x2|dp=2,tp=2",
        help="axes of ranks; anonymous ones leave the solver free, dp splits only the batch, tp the weights",
    )
    group.add_argument(
        "--memory", type=option.memory, metavar="72GiB", help="memory per device (default: what the cluster has)"
    )
    group.add_argument(
        "--reserve", type=option.memory_or_none, metavar="SIZE",
        help="of it, left alone by the plan: context, communicator buffers, fragmentation (default: what the cluster "
             "says, 2 or 2.5 GiB of a GPU; nothing of a --memory that is given)",
    )
    group = parser.add_argument_group("decisions")
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="compute dtype (fp32); parameters stay in the dtype they are built in",
    )
    group.add_argument("--microbatches", type=option.positive, metavar="M", help="parts of the batch in time (1)")
    group.add_argument(
        "--microbatch-semantics", choices=("exact", "accumulate"), default="exact",
        help="loss and gradients are those of the whole batch, else refused (exact); or each microbatch is a batch of "
        "its own, and loss and gradients are averaged (accumulate)",
    )
    group.add_argument(
        "--schedule", metavar="NAME",
        help="what the stages of a mesh with an axis pp run when: gpipe, 1f1b (the default), interleaved, zero-bubble, "
        "zbv, dualpipev",
    )
    group.add_argument(
        "--stages-per-rank", type=option.positive, metavar="V",
        help="stages of each rank on pp, for interleaved and zero-bubble (2)",
    )
    group.add_argument(
        "--zero", type=int, choices=range(4),
        help="how parameters, with gradients and optimizer state, are stored on every axis but those called tp: whole "
        "(0), or cut wherever they can be, with copies gathered for forward kept for backward (1, 2) or gathered again "
        "(3)",
    )
    group.add_argument(
        "--recompute", choices=("auto", "on", "off"),
        help="run forward ops again in backward instead of storing results: as memory asks (auto), on, off",
    )
    group.add_argument(
        "--pin",
        type=option.pin,
        action="append",
        default=[],
        metavar="PATTERN=AXIS:PLACEMENT",
        help="what mesh axes do to the parameters, inputs, modules or ops of a name, such as "
        "'layers.*.fc.weight=tp:Shard(0)', 'embed*.weight=Replicate', 'layers.*.mlp.up=a1:ffn'; PLACEMENT: Replicate, "
        "Shard(DIM), Partial, whole, or a logical dim (ffn, heads, batch ...) to split; without AXIS: for every axis. "
        "May be repeated, adds to hints of model.py",
    )
    group.add_argument(
        "--hint",
        type=option.hint,
        action="append",
        default=[],
        metavar="PLAN",
        help="an earlier plan of the same model, sizes and mesh to begin the search with (a PATTERN=... is a --pin)",
    )
    group.add_argument("--outputs", type=option.names, default=("loss",), help="outputs to keep: loss or all (loss)")
    group = parser.add_argument_group("search")
    group.add_argument(
        "--gap", type=option.fraction, default=0.01, help="stop when proven within this fraction of the best (0.01)"
    )
    group.add_argument(
        "--random-choices", type=int, metavar="SEED", help="any feasible plan instead of the best, for soundness tests"
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Compile and write the plan; prints what `fxpar show` prints."""
    if options.cluster is None and options.mesh is None:
        options.parser.error("give --cluster, such as --cluster 2x8:h100, or --mesh, such as --mesh 2x2")
    pins = (*options.pin, *(text for text in options.hint if not is_plan_file(text)))
    check_writable(options.output)
    hints = [read_plan(text) for text in options.hint if is_plan_file(text)]
    source = option.model_source(options)

    from fxpar.compile import compile_model
    from fxpar.rule_coverage import MissingRuleWarning
    from fxpar.show import notes, plan_facts, plan_text

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingRuleWarning)  # shown below, as lines of ours
        result = compile_model(
            source,
            cluster=options.cluster,
            mesh=options.mesh,
            memory=options.memory,
            reserve=options.reserve,
            precision=options.precision,
            pins=pins,
            hints=hints,
            gap=options.gap,
            random_choices=options.random_choices,
            zero=options.zero,
            recompute=options.recompute,
            microbatches=options.microbatches,
            schedule=options.schedule,
            per_rank=options.stages_per_rank,
            semantics=options.microbatch_semantics,
            outputs=options.outputs,
            progress=make_progress(as_json=options.json),
        )
    for note in notes(result.plan):
        print(f"fxpar: note: {note}", file=sys.stderr)
    write_file(options.output, encode(result.plan))
    if options.json:
        print(json.dumps({"plan": options.output, **plan_facts(result.plan)}))
    else:
        print(plan_text(result.plan))
        print(f"wrote {options.output}")
    return 0


def is_plan_file(hint: str) -> bool:
    """False for a hint that is a pin: it has a = and is not the path of a file."""
    return Path(hint).is_file() or "=" not in hint


def check_writable(output: str) -> None:
    """Refuse a place that cannot be written to before any long work."""
    path = Path(output)
    if path.is_dir():
        raise FxparError(f"cannot write the plan to {output}", numbers="it is a folder", way_out="name a file in it")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise FxparError(
            f"cannot write the plan to {output}",
            numbers=f"{path.absolute().parent} is not a folder that can be written to",
            way_out="make the folder, or name another with -o",
        )


def write_file(output: str, data: bytes) -> None:
    """Write all or nothing: a reader never sees half a plan."""
    path = Path(output).absolute()
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name + ".", delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.chmod(file.name, 0o666 & ~current_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise FxparError(f"cannot write the plan to {output}", numbers=error.strerror or str(error)) from error


def current_umask() -> int:
    """The process's file mode mask (a temporary file is made private whatever it is)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
