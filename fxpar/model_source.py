"""Where a model comes from: `model.py` or `hf:DIR`, as one `ModelSource`.

In goes what the user types (`load_model_source("model.py")`); out come the functions that the compiler and `verify`
call: build the module, make inputs of the GLOBAL batch, reduce an output to the loss, make the optimizer. Nothing is
built here, so a source of an 80-layer model costs nothing. Whatever the user's own code raises becomes a FxparError
that names the user's line.
"""

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpar.plans.errors import FxparError, UnsupportedError, collect_errors

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
OptimizerFactory = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "f32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "f64": torch.float64,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

MODEL_PY = (
    "a model.py defines build() -> nn.Module and example_inputs() -> (args, kwargs); "
    "loss(output, inputs), optimizer(params) and hints are optional"
)


@dataclass(frozen=True)
class ModelSource:
    """A model to compile, as functions.

    Attributes:
        name: short, for reports and file names.
        build: the module in training mode; may be called under `torch.device("meta")`. Deterministic after
            `torch.manual_seed(source.seed)`.
        example_inputs: `(args, kwargs)` of the global batch, equal on every call.
        loss: `(output, (args, kwargs)) -> scalar tensor` to call backward() on.
        optimizer: from parameters to an optimizer; AdamW unless the user says otherwise.
        hints: placements the user asks for, `PATTERN=AXIS:PLACEMENT`.
        batch_dim: the dim of every input tensor that counts samples; None when there is no one such dim or the user
            does not say.
        meta: further facts: the file's META, or task, seq and batch of a transformers model.
        path: the file or folder, absolute.
    """

    name: str
    build: Callable[[], nn.Module]
    example_inputs: Callable[[], Inputs]
    loss: Callable[[Any, Inputs], torch.Tensor]
    optimizer: OptimizerFactory
    hints: tuple[str, ...] = ()
    batch_dim: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    path: str = ""

    @property
    def seed(self) -> int:
        """What to seed torch with right before `build`."""
        return int(self.meta.get("seed", 0))


def load_model_source(
    model: str,
    *,
    task: str | None = None,
    seq: int | None = None,
    batch: int | None = None,
    optimizer: str | OptimizerFactory | None = None,
    dtype: str | torch.dtype | None = None,
) -> ModelSource:
    """Read what to compile.

    Args:
        model: path of a model.py, or `hf:DIR` where DIR holds a transformers config.json.
        task: which head of a transformers model: causal-lm, masked-lm, seq-cls, seq2seq-lm or image-classification.
        seq: tokens per sample (transformers only; default: 512, or fewer if the model takes fewer).
        batch: samples in the global batch (transformers only; default 8).
        optimizer: a name in `OPTIMIZERS` or a function of the parameters; wins over the file's `optimizer`.
        dtype: floating-point parameters, buffers and inputs are made of this type (default: as the file makes
            them; float32 for transformers).

    Raises:
        FxparError: no such file, the file does not run, or it lacks what the model.py form asks for (all of it at
            once).
    """
    torch_dtype = dtype_of(dtype)
    chosen_optimizer = optimizer_of(optimizer)
    if model.startswith("hf:"):
        # transformers takes seconds to import and a model.py may not need it.
        from fxpar.hf_model import load_hf_model

        return load_hf_model(
            model.removeprefix("hf:"),
            task=task,
            seq=seq,
            batch=batch,
            optimizer=chosen_optimizer or OPTIMIZERS["adamw"],
            dtype=torch_dtype,
        )
    given = [f"--{name} {value}" for name, value in (("task", task), ("seq", seq), ("batch", batch)) if value]
    if given:
        raise FxparError(
            f"{', '.join(given)} cannot be applied to {model}",
            way_out="these describe hf:DIR; a model.py says its sizes in example_inputs()",
        )
    return load_model_file(model, optimizer=chosen_optimizer, dtype=torch_dtype)


def load_model_file(
    path: str, *, optimizer: OptimizerFactory | None = None, dtype: torch.dtype | None = None
) -> ModelSource:
    """Read a model.py; arguments and errors as for `load_model_source`."""
    file = Path(path).resolve()
    module = run_model_file(file, path)
    with collect_errors() as errors:
        for name in ("build", "example_inputs"):
            if not callable(getattr(module, name, None)):
                errors.add(FxparError(f"{path} has no function {name}()", way_out=MODEL_PY))
        for name, parameters in (("loss", 2), ("optimizer", 1)):
            with errors.catching():
                check_callable(module, name, parameters, path)
        hints = getattr(module, "hints", ())
        if not isinstance(hints, list | tuple) or not all(isinstance(hint, str) for hint in hints):
            errors.add(FxparError(f"hints of {path} is {hints!r}", way_out='write hints = ["PATTERN=AXIS:PLACEMENT"]'))
        meta = getattr(module, "META", {})
        if not isinstance(meta, dict):
            errors.add(FxparError(f"META of {path} is a {type(meta).__name__}", way_out="META is a dict, or absent"))
            meta = {}
        batch_dim = meta.get("batch_dim", getattr(module, "batch_dim", None))
        if batch_dim is not None and (not isinstance(batch_dim, int) or batch_dim < 0):
            errors.add(FxparError(f"batch_dim of {path} is {batch_dim!r}", way_out="it is a dim such as 0, or None"))
        if getattr(module, "dynamic", None):
            errors.add(
                UnsupportedError(
                    f"{path} asks for dynamic sizes: dynamic = {module.dynamic!r}",
                    numbers="a plan is for the sizes that example_inputs() returns",
                    way_out="remove `dynamic` and compile once for each size",
                )
            )

    def build() -> nn.Module:
        model = call_user(module.build, "build", file)
        if not isinstance(model, nn.Module):
            raise FxparError(f"build() of {path} returned a {type(model).__name__}", way_out="return an nn.Module")
        return model if dtype is None else model.to(dtype)

    def example_inputs() -> Inputs:
        return cast_inputs(check_inputs(call_user(module.example_inputs, "example_inputs", file), path), dtype)

    return ModelSource(
        name=file.stem,
        build=build,
        example_inputs=example_inputs,
        loss=getattr(module, "loss", None) or default_loss,
        optimizer=optimizer or getattr(module, "optimizer", None) or OPTIMIZERS["adamw"],
        hints=tuple(hints),
        batch_dim=batch_dim,
        meta=dict(meta),
        path=str(file),
    )


def default_loss(output: Any, inputs: Inputs) -> torch.Tensor:
    """The loss a model computes by itself: `output.loss`, `output["loss"]`, or an output that is one number.

    Raises:
        FxparError: the output is none of these.
    """
    loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    if isinstance(loss, torch.Tensor):
        found = f"a tensor of shape {tuple(loss.shape)}"
    elif isinstance(output, dict):
        found = f"a dict with {', '.join(map(str, output))}"
    else:
        found = f"a {type(loss).__name__}"
    raise FxparError(
        "the model's output has no loss",
        numbers=f"the output is {found}",
        way_out="define loss(output, inputs) in model.py, or let the model return a scalar, .loss or ['loss']",
    )


def run_model_file(file: Path, shown: str) -> ModuleType:
    """Execute the file as a module; `shown` is the path as the user wrote it."""
    if not file.is_file():
        found = "it is a folder" if file.is_dir() else "there is no such file"
        raise FxparError(
            f"cannot read the model {shown}", numbers=found, way_out="give the path of a model.py, or hf:DIR"
        )
    # A name of its own: the user's types.py or plans.py must not replace anything that is imported by name.
    name = "fxpar_model_" + re.sub(r"\W", "_", file.stem)
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise FxparError(f"{shown} is not a Python file", way_out="give the path of a model.py, or hf:DIR")
    loader = module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    # As for a script: files beside it can be imported, now and when forward runs.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        call_user(lambda: loader.exec_module(module), "", file)
    except FxparError:
        del sys.modules[name]
        raise
    return module


def call_user(function: Callable[[], Any], name: str, file: Path) -> Any:
    """Call the user's code; what it raises becomes a FxparError that shows the user's line."""
    try:
        return function()
    except FxparError:
        raise
    except (Exception, SystemExit) as error:
        meta = torch.get_default_device().type == "meta"
        raise FxparError(
            f"{name + '() of ' if name else ''}{file.name} raised {type(error).__name__}: {error}",
            where=user_line(error, file),
            numbers="it ran with parameters that have no memory (device meta)" if meta else (),
        ) from error


def user_line(error: BaseException, file: Path) -> str:
    """`model.py:12, in build: self.a = nn.Linear(3)`: the innermost line of the user's file that `error` went through.

    Files beside the model's count as the user's too.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(file.parent) and "site-packages" not in frame.filename
    ]
    if not frames:
        return str(file)
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {(frames[-1].line or '').strip()}"


def check_callable(module: ModuleType, name: str, parameters: int, path: str) -> None:
    """Refuse `name` of the file unless it is absent or a function of that many positional arguments."""
    function = getattr(module, name, None)
    if function is None:
        return
    want = {"loss": "loss(output, inputs)", "optimizer": "optimizer(params)"}[name]
    if not callable(function):
        raise FxparError(f"{name} of {path} is {function!r}, not a function", way_out=f"define {want}")
    try:
        inspect.signature(function).bind(*range(parameters))
    except TypeError as error:
        raise FxparError(
            f"{name}{inspect.signature(function)} of {path} does not take {parameters} arguments",
            numbers=str(error),
            way_out=f"define {want}",
        ) from error


def check_inputs(inputs: Any, path: str) -> Inputs:
    """`(args, kwargs)` with args as a tuple; anything else is refused with what was found."""
    good = (
        isinstance(inputs, tuple | list)
        and len(inputs) == 2
        and isinstance(inputs[0], tuple | list)
        and isinstance(inputs[1], dict)
        and all(isinstance(name, str) for name in inputs[1])
    )
    if not good:
        shape = f" of shape {tuple(inputs.shape)}" if isinstance(inputs, torch.Tensor) else ""
        parts = f" of {', '.join(type(part).__name__ for part in inputs)}" if isinstance(inputs, tuple | list) else ""
        raise FxparError(
            f"example_inputs() of {path} returned a {type(inputs).__name__}{shape}{parts}",
            way_out="return (args, kwargs): for model(x, mask=m) that is ((x,), {'mask': m})",
        )
    args, kwargs = tuple(inputs[0]), dict(inputs[1])
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise FxparError(f"example_inputs() of {path} holds no tensor", way_out="the global batch is made of tensors")
    return args, kwargs


def cast_inputs(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Floating-point tensors of the inputs in `dtype`; whatever else is in them as it is."""
    if dtype is None:
        return inputs

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, inputs)


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by one of its usual names."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise FxparError(f"no dtype is called '{dtype}'", way_out=f"one of {', '.join(sorted(DTYPES))}")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype


def optimizer_of(optimizer: str | OptimizerFactory | None) -> OptimizerFactory | None:
    """An optimizer by name."""
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise FxparError(
            f"no optimizer is called '{optimizer}'",
            way_out=f"one of {', '.join(OPTIMIZERS)}; or define optimizer(params) in model.py",
        )
    return OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
