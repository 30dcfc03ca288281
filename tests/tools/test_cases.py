"""tools/cases.py tells right from wrong, whatever a case does."""

import json
import subprocess
import sys

import pytest
import torch

RUN_SINGLE = '''
import importlib.util, sys
import torch
from torch.utils import _pytree as pytree


def load_case(path):
    spec = importlib.util.spec_from_file_location("the_case", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["the_case"] = module
    spec.loader.exec_module(module)
    return module


def clone_inputs(inputs):
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, inputs)


def compare(ref, got, meta=None):
    same = torch.allclose(ref["loss"], got["loss"]) and all(
        (ref["grads"][n] is None) == (g is None) and (g is None or torch.allclose(ref["grads"][n], g, atol=1e-6))
        for n, g in got["grads"].items()
    )
    return [] if same else ["loss or gradients differ"]
'''

CASE = """
import torch
from torch import nn

META = dict(expects="{expects}", mention=["branch"], mesh=[2], force={{"dp": 2}})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        {line}
        return self.w(x)


def build():
    return Net()


def example_inputs():
    return (torch.arange(16.0).reshape(4, 4),), {{}}


def loss(output, inputs):
    return output.square().mean()
"""
BRANCH = "x = x if x.sum() > 0 else -x"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp("cases")
    (folder / "run_single.py").write_text(RUN_SINGLE)
    (folder / "refs").mkdir()
    kinds = {
        "01_right": ("parallel", "x = x + 0.0"),
        "02_wrong": ("parallel", "x = x * 2.0"),
        "03_refused": ("parallel", BRANCH),
        "04_error": ("clear_error", BRANCH),
        "05_no_error": ("clear_error", "x = x + 0.0"),
        "06_gone": ("parallel", "__import__('os')._exit(3)"),
    }
    for name, (expects, line) in kinds.items():
        (folder / f"case_{name}.py").write_text(CASE.format(expects=expects, line=line))
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"w": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(4, 4)})
        value = model["w"](torch.arange(16.0).reshape(4, 4)).square().mean()
        value.backward()
        record = {"init_state": model.state_dict(), "loss": value.detach(),
                  "grads": {n: p.grad for n, p in model.named_parameters()}}
        torch.save(record, folder / "refs" / f"case_{name}.pt")
    command = [sys.executable, str(repository / "tools" / "cases.py"), str(folder), "--forced", "--json", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    return done.returncode, {v["case"]: v for v in json.loads(done.stdout)["cases"]}, done.stdout


def test_counts_and_exit_code(outcome):
    code, cases, text = outcome
    assert code == 1 and len(cases) == 6
    assert json.loads(text)["passed"] == 2 and json.loads(text)["failed"] == 4


@pytest.mark.parametrize(
    ("case", "ok", "says"),
    [
        ("case_01_right", True, ""),
        ("case_02_wrong", False, "loss or gradients differ"),
        ("case_03_refused", False, "refused: "),
        ("case_04_error", True, "refused as it should be"),
        ("case_05_no_error", False, "a plan was made"),
        ("case_06_gone", False, "exit code 3"),
    ],
)
def test_verdicts(outcome, case, ok, says):
    verdict = outcome[1][case]
    assert verdict["ok"] is ok and says in " ".join(verdict["lines"]), verdict
