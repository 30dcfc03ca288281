"""`hf:DIR`: a transformers model from its config.json, with inputs and labels to train it on.

In goes a folder with a config.json and a task; out comes a ModelSource whose model computes its own loss. Only the
configuration is read: weights are initialised, nothing is ever downloaded.
"""

import os

# Read when huggingface_hub is imported: whatever a configuration refers to, it is on this disk or it is an error.
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpar.model_source import Inputs, ModelSource, OptimizerFactory, default_loss
from fxpar.plans.errors import FxparError

DEFAULT_SEQ = 512
DEFAULT_BATCH = 8
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Task:
    """One head: the transformers class that builds it and the inputs it trains on."""

    auto_class: str
    make_inputs: Callable[[Any, int, int], dict[str, torch.Tensor]]
    takes_tokens: bool = True


def load_hf_model(
    folder: str,
    *,
    task: str | None,
    seq: int | None,
    batch: int | None,
    optimizer: OptimizerFactory,
    dtype: torch.dtype | None,
) -> ModelSource:
    """The model of FOLDER/config.json with the head of `task`; parameters are `dtype`, float32 by default.

    Raises:
        FxparError: transformers is not installed, there is no readable config.json, or the task does not fit it.
    """
    if task is None or task not in TASKS:
        raise FxparError(
            f"hf:{folder} needs --task" if task is None else f"no task is called '{task}'",
            way_out=f"--task is one of {', '.join(TASKS)}",
        )
    head = TASKS[task]
    for name, size in (("--seq", seq), ("--batch", batch)):
        if size is not None and size < 1:
            raise FxparError(f"{name} {size} is not a size", way_out="give a positive number")
    if seq is not None and not head.takes_tokens:
        raise FxparError(f"--seq {seq} has no meaning for --task {task}", way_out="leave --seq out")
    configuration = read_configuration(folder)
    configuration.use_cache = False
    auto_class = getattr(import_transformers(), head.auto_class)
    check_head(configuration, auto_class, task, folder)
    if task in ("seq-cls", "image-classification"):
        # Otherwise transformers decides this from the labels inside the first forward, and writes it down there.
        configuration.problem_type = "single_label_classification"
    if task == "seq-cls" and text_part(configuration).pad_token_id is None:
        # Decoders pool the last token that is not padding; without padding any id will do.
        text_part(configuration).pad_token_id = 0
    samples = batch or DEFAULT_BATCH
    tokens = seq or min(DEFAULT_SEQ, getattr(text_part(configuration), "max_position_embeddings", None) or DEFAULT_SEQ)
    parameter_dtype = dtype or torch.float32

    def build() -> nn.Module:
        try:
            model: nn.Module = auto_class.from_config(configuration, dtype=parameter_dtype)
        except Exception as error:
            raise FxparError(
                f"transformers cannot build the model of hf:{folder}",
                where=str(Path(folder) / "config.json"),
                numbers=f"{type(error).__name__}: {error}",
            ) from error
        return model.train()

    def example_inputs() -> Inputs:
        inputs = head.make_inputs(configuration, samples, tokens)
        return (), {name: x.to(parameter_dtype) if x.is_floating_point() else x for name, x in inputs.items()}

    sizes = {"task": task, "batch": samples, **({"seq": tokens} if head.takes_tokens else {})}
    return ModelSource(
        name=Path(folder).resolve().name,
        build=build,
        example_inputs=example_inputs,
        loss=default_loss,
        optimizer=optimizer,
        batch_dim=0,
        meta=sizes,
        path=str(Path(folder).resolve()),
    )


def import_transformers() -> Any:
    """The transformers package; a FxparError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise FxparError(
            "hf:DIR needs transformers", numbers=str(error), way_out="pip install 'fxpar[hf]', or write a model.py"
        ) from error
    return transformers


def read_configuration(folder: str) -> Any:
    """The configuration in FOLDER/config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FxparError(
            f"cannot read the model hf:{folder}",
            numbers=f"there is no file {path}",
            way_out="give a folder on this disk that holds a config.json; models are not downloaded by name",
        )
    transformers = import_transformers()
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise FxparError(
            "transformers cannot read the configuration",
            where=str(path),
            numbers=f"{type(error).__name__}: {error}",
            way_out="a model with code of its own is compiled from a model.py",
        ) from error


def check_head(configuration: Any, auto_class: Any, task: str, folder: str) -> None:
    """Refuse a task that transformers has no head for, naming those it has."""
    if type(configuration) in auto_class._model_mapping:
        return
    transformers = import_transformers()
    fitting = [
        name for name, one in TASKS.items()
        if type(configuration) in getattr(transformers, one.auto_class)._model_mapping
    ]
    raise FxparError(
        f"a {configuration.model_type} model has no head for --task {task}",
        where=str(Path(folder) / "config.json"),
        way_out=f"--task {' or '.join(fitting)}" if fitting else "write a model.py for it",
    )


def text_part(configuration: Any) -> Any:
    """Where the sizes of the language model are: the configuration itself, or its text part."""
    return configuration.get_text_config()


def integers(high: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same numbers in [0, high) on every call and every machine; only a shape when the default device is meta."""
    if torch.get_default_device().type == "meta":
        return torch.empty(shape, dtype=torch.int64, device="meta")
    return torch.randint(high, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def tokens_of(configuration: Any, batch: int, seq: int) -> torch.Tensor:
    """input_ids [batch, seq]; no id that the model takes for padding."""
    ids = integers(text_part(configuration).vocab_size, (batch, seq), 1)
    pad = getattr(text_part(configuration), "pad_token_id", None)
    if pad is not None and 0 <= pad < text_part(configuration).vocab_size and text_part(configuration).vocab_size > 1:
        ids = torch.where(ids == pad, pad - 1 if pad > 0 else 1, ids)
    return ids


def causal_lm_inputs(configuration: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Next-token labels [batch, seq]; the first quarter of sample 0 is a prompt without a loss."""
    ids = tokens_of(configuration, batch, seq)
    labels = ids.clone()
    labels[0, : seq // 4] = IGNORED_LABEL
    return {"input_ids": ids, "labels": labels}


def masked_lm_inputs(configuration: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """About one token of seven has a label, at least one in every sample."""
    ids = tokens_of(configuration, batch, seq)
    labels = torch.where(integers(7, (batch, seq), 2) == 0, ids, IGNORED_LABEL)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "labels": labels}


def sequence_class_inputs(configuration: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens_of(configuration, batch, seq), "labels": class_labels(configuration, batch)}


def sequence_to_sequence_inputs(configuration: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Source and target of the same length; the model shifts the labels into decoder inputs itself."""
    ids = tokens_of(configuration, batch, seq)
    return {"input_ids": ids, "labels": ids.flip(-1)}


def image_class_inputs(configuration: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """pixel_values [batch, channels, height, width], 224 by 224 where the model does not say."""
    size = getattr(configuration, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    pixels = integers(256, (batch, getattr(configuration, "num_channels", 3), height, width), 3)
    return {"pixel_values": pixels.float() / 128 - 1, "labels": class_labels(configuration, batch)}


def class_labels(configuration: Any, batch: int) -> torch.Tensor:
    return integers(max(configuration.num_labels, 1), (batch,), 4)


TASKS: Mapping[str, Task] = {
    "causal-lm": Task("AutoModelForCausalLM", causal_lm_inputs),
    "masked-lm": Task("AutoModelForMaskedLM", masked_lm_inputs),
    "seq-cls": Task("AutoModelForSequenceClassification", sequence_class_inputs),
    "seq2seq-lm": Task("AutoModelForSeq2SeqLM", sequence_to_sequence_inputs),
    "image-classification": Task("AutoModelForImageClassification", image_class_inputs, takes_tokens=False),
}
