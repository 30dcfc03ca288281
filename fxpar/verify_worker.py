"""One rank of ``fxpar verify --ranks gloo``: started by torchrun with the folder that holds plan and request.

Runs one step, gathers everything, makes sure that all ranks gathered the same, trains a few steps more; rank 0 writes
the result.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fxpar.live_bytes import LiveBytes
from fxpar.model_source import OptimizerFactory, load_model_source
from fxpar.plans.codec import read_plan
from fxpar.plans.errors import FxparError
from fxpar.plans.plan import Plan
from fxpar.ranks import end_as_rank
from fxpar.reference import CLIP_NORM, DTYPES, buffers_of, built, train, widen
from fxpar.runtime.binding import bind
from fxpar.runtime.model import ParallelModule, load
from fxpar.runtime.pieces import input_of_microbatch
from fxpar.runtime.whole import whole, whole_gradients, whole_parameters
from fxpar.step_values import output_tensors_of_call, returns_outputs

COLLECTIVE_SECONDS = 120
REPEATS = 3
"""Steps whose memory is measured."""


def main(folder: Path) -> None:
    """The whole life of a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    request = json.loads((folder / "request.json").read_text())
    dtype = DTYPES[request["dtype"]]
    source = load_model_source(
        request["model"], task=request["task"], seq=request["seq"], batch=request["batch"],
        optimizer=request["optimizer"],
    )
    state = folder / "state.pt"
    plan = read_plan(folder / "plan.msgpack")
    model = built(source, dtype, torch.load(state, weights_only=True) if state.exists() else None)
    module: Any = load(plan, model, seed=request["seed"])
    args, kwargs = widen(source.example_inputs(), dtype)
    before = buffers_of(module)
    if request["memory"]:
        peak = peak_of_step(module, plan, source.optimizer, args, kwargs)
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        module.zero_grad(set_to_none=True)
        restore(module, before)
        module.seed(request["seed"])
    loss = module.step(*args, **kwargs)
    found: dict[str, Any] = {
        "loss": loss, "gradients": whole_gradients(module), "buffers": buffers_of(module), "outputs": [],
    }
    if request["memory"]:
        found["peak_bytes"] = peaks
    if returns_outputs(plan.program):
        restore(module, before)
        module.seed(request["seed"])
        with torch.no_grad():
            found["outputs"] = [whole(t) for t in output_tensors_of_call(module(*args, **kwargs))]
        restore(module, found["buffers"])
    if request["train"]:
        # parameters are gathered below: under stages a rank does not have them all
        training = train(
            module, loss, lambda: module.step(*args, **kwargs), lambda _: module.clip_grad_norm_(CLIP_NORM), local
        )
        found["training"] = {**vars(training), "parameters": whole_parameters(module)}
    check_same_everywhere(found)
    if dist.get_rank() == 0:
        part = folder / "result.part"
        torch.save(found, part)
        part.rename(folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


def peak_of_step(module: Any, plan: Plan, optimizer: OptimizerFactory, args: Any, kwargs: Any) -> int:
    """Peak of live bytes of one step on this rank, after a step of the optimizer: stored parameters and buffers, the
    optimizer's state, this rank's part of the batch, and all that forward and backward make. Parameters are left as
    they were.

    The least of :data:`REPEATS` steps: a thread of gloo may hold what it has sent a moment longer than it must.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    stored = [local(p.detach()) for p in module.parameters()]
    before = [t.clone() for t in stored]
    made = optimizer(trained)
    module.step(*args, **kwargs)
    made.step()
    module.zero_grad(set_to_none=True)
    state = [local(t) for entry in made.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    for tensor, value in zip(stored, before, strict=True):
        tensor.copy_(value)
    del before
    batch = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    parts = batch_bytes(module, plan, args, kwargs)
    peaks = []
    for _ in range(REPEATS):
        with LiveBytes(counted=[*stored, *module.buffers(), *state], known=batch) as live:
            module.step(*args, **kwargs)
        peaks.append(live.peak + parts)
        module.zero_grad(set_to_none=True)
    return min(peaks)


def batch_bytes(module: Any, plan: Plan, args: Any, kwargs: Any) -> int:
    """Bytes of this rank's parts of the batch, of those that are views of it: what is copied is counted as it is
    made."""
    tensors = bind(plan.program, args, kwargs)
    parts = ((module._fxpar.runner.piece(input_of_microbatch(plan.program, i, tensors, 0), i), tensors[e.value])
             for i, e in enumerate(plan.program.inputs) if e.kind == "input")
    return sum(
        part.numel() * part.element_size() for part, of in parts
        if part.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def restore(module: ParallelModule | nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Set all buffers."""
    for name, buffer in module.named_buffers(remove_duplicate=False):
        buffer.copy_(buffers[name])


def check_same_everywhere(found: dict[str, Any]) -> None:
    """Compare what this rank gathered with rank 0's, to the bit.

    Raises:
        FxparError: names what differs.
    """
    mine = dict(digests("", found))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    wrong = [name for name, digest in told[0].items() if mine.get(name) != digest]
    if wrong or set(mine) != set(told[0]):
        raise FxparError(
            f"rank {dist.get_rank()} gathered other values than rank 0", numbers=f"in {', '.join(wrong[:8])}"
        )


def digests(path: str, tree: Any) -> Iterator[tuple[str, str]]:
    """(path, digest) of every leaf of nested dicts and lists."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from digests(f"{path}.{key}" if path else str(key), child)
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from digests(f"{path}[{index}]", child)
    elif isinstance(tree, torch.Tensor):
        flat = tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield path, hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    else:
        yield path, repr(tree)


if __name__ == "__main__":
    end_as_rank(lambda: main(Path(sys.argv[1])))
