from pathlib import Path

import pytest
import torch

from fxpar.model_source import default_loss, load_model_source
from fxpar.plans.errors import FxparError, FxparErrors, UnsupportedError

GOOD = """
import torch
from torch import nn
import torch.nn.functional as F
META = dict(batch_dim=0, seed=7)
hints = ["fc=tp:Shard(0)"]
def build():
    return nn.Linear(5, 3)
def example_inputs():
    return (torch.ones(4, 5),), {}
def loss(output, inputs):
    return output.square().mean() + 0 * inputs[0][0].sum()
def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""


def test_a_model_file_becomes_functions(model_file):
    path = model_file(GOOD, "my-model.py")
    source = load_model_source(path)
    assert (source.name, source.path, source.batch_dim, source.seed) == ("my-model", path, 0, 7)
    assert source.hints == ("fc=tp:Shard(0)",)
    with torch.device("meta"):
        assert source.build().weight.is_meta
    inputs = source.example_inputs()
    model = source.build()
    source.loss(model(*inputs[0], **inputs[1]), inputs).backward()
    assert type(source.optimizer(model.parameters())) is torch.optim.SGD


def test_dtype_and_optimizer_can_be_given(model_file):
    source = load_model_source(model_file(GOOD), dtype="f64", optimizer="adamw")
    assert source.build().weight.dtype == torch.float64
    assert source.example_inputs()[0][0].dtype == torch.float64
    assert type(source.optimizer(source.build().parameters())) is torch.optim.AdamW


def test_only_build_and_example_inputs_are_needed(model_file):
    source = load_model_source(
        model_file("import torch\nbuild = lambda: torch.nn.ReLU()\nexample_inputs = lambda: [[torch.ones(1)], {}]")
    )
    assert source.loss is default_loss and source.hints == () and source.batch_dim is None
    assert source.example_inputs()[0] == (torch.ones(1),)


def test_files_beside_the_model_can_be_imported(model_file, tmp_path):
    (tmp_path / "my_layers_beside.py").write_text("import torch\nclass Mine(torch.nn.Linear): ...\n")
    source = load_model_source(
        model_file("import my_layers_beside as m\nbuild = lambda: m.Mine(1, 1)\ndef example_inputs(): ...")
    )
    assert type(source.build()).__name__ == "Mine"


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(FxparError, match="cannot read the model nowhere.py\n.*no such file"):
        load_model_source("nowhere.py")
    with pytest.raises(FxparError, match="it is a folder"):
        load_model_source(str(tmp_path))


def test_all_that_is_missing_is_said_at_once(model_file):
    with pytest.raises(FxparErrors) as caught:
        load_model_source(model_file("loss = 3\nhints = 'x'\nMETA = 4\nbatch_dim = -1\noptimizer = lambda: 1\n"))
    text = str(caught.value)
    for word in ("build()", "example_inputs()", "loss of", "hints of", "META of", "batch_dim of", "optimizer() of"):
        assert word in text, word


def test_dynamic_sizes_are_refused_not_ignored(model_file):
    with pytest.raises(UnsupportedError, match="dynamic"):
        load_model_source(model_file(GOOD + "dynamic = {'x': {0: (1, 8)}}\n"))


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("import torch\nx = 1 +\n", "model.py:2: x = 1 +"),
        ("import torch\nx = [][0]\n", "model.py:2, in <module>: x = [][0]"),
        ("import nothing_of_this_name\n", "model.py:1, in <module>: import nothing_of_this_name"),
        ("raise SystemExit(3)\n", "model.py:1, in <module>: raise SystemExit(3)"),
    ],
)
def test_a_file_that_does_not_run_shows_its_line(model_file, source, where):
    with pytest.raises(FxparError) as caught:
        load_model_source(model_file(source))
    assert where in caught.value.where and "raised" in caught.value.what


def test_what_build_raises_shows_the_innermost_line_of_the_user(model_file):
    source = load_model_source(
        model_file(
            "import torch\n"
            "class Net(torch.nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.a = torch.nn.Linear(-1, 3)\n"
            "def build():\n"
            "    return Net()\n"
            "def example_inputs(): ...\n"
        )
    )
    with pytest.raises(FxparError) as caught:
        source.build()
    assert "model.py:5, in __init__: self.a = torch.nn.Linear(-1, 3)" in caught.value.where
    with torch.device("meta"), pytest.raises(FxparError, match="device meta"):
        source.build()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("torch.ones(4, 5)", "a Tensor of shape \\(4, 5\\)"),
        ("(torch.ones(4), torch.ones(4))", "a tuple of Tensor, Tensor"),
        ("{'x': torch.ones(4)}", "a dict"),
        ("((torch.ones(4),), {3: 4})", "a tuple of tuple, dict"),
        ("((3,), {'a': None})", "no tensor"),
    ],
)
def test_inputs_of_another_form_are_refused(model_file, value, found):
    source = load_model_source(model_file(f"import torch\ndef build(): ...\ndef example_inputs(): return {value}\n"))
    with pytest.raises(FxparError, match=found):
        source.example_inputs()
    with pytest.raises(FxparError, match="returned a NoneType"):
        source.build()


def test_the_loss_a_model_computes_is_found():
    class Output(dict):
        loss = torch.tensor(2.0)

    one = torch.tensor(1.0)
    assert default_loss(one, ((), {})) is one
    assert default_loss({"loss": one}, ((), {})) is one
    assert default_loss(Output(), ((), {})) is Output.loss


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.ones(2, 3), "shape \\(2, 3\\)"),
        ({"logits": torch.ones(2)}, "a dict with logits"),
        ((torch.tensor(1.0), 2), "a tuple"),
        ({"loss": None}, "a dict with loss"),
    ],
)
def test_an_output_without_a_loss_says_what_to_define(output, found):
    with pytest.raises(FxparError, match=f"{found}[^\n]*\n.*loss\\(output, inputs\\)"):
        default_loss(output, ((), {}))


def test_wrong_names_list_the_right_ones(model_file):
    path = model_file(GOOD)
    with pytest.raises(FxparError, match="fp32"):
        load_model_source(path, dtype="fp8")
    with pytest.raises(FxparError, match="adamw, adam, sgd"):
        load_model_source(path, optimizer="lion")
    with pytest.raises(FxparError, match="--batch 3 cannot be applied"):
        load_model_source(path, batch=3)


def test_case_files_are_model_files(repository: Path):
    cases = sorted((repository.parent / "shared" / "cases").glob("case_*.py"))
    if not cases:
        pytest.skip("the case pack is not beside this checkout")
    for case in cases:
        if "_hf_" not in case.name:
            source = load_model_source(str(case))
            assert isinstance(source.meta["kind"], str) and source.build().training
            source.example_inputs()
