"""Expert modules of transformers become fxpar::experts where that is what they compute, and only there."""

import pytest
import torch
from torch import nn

from fxpar.capture.experts_calls import activation_of, experts_replaced, is_plain

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
SIZES = {"hidden_size": 12, "intermediate_size": 10, "num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral() -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    return filled(MixtralExperts(transformers.MixtralConfig(**SIZES, experts_implementation="eager")))


def gpt_oss() -> nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return filled(GptOssExperts(transformers.GptOssConfig(**SIZES, experts_implementation="eager")))


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double()


def routed() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    scores, index = torch.rand(7, 4, dtype=torch.float64).topk(2)
    return torch.randn(7, 12, dtype=torch.float64), index, scores


def test_the_same_numbers_and_the_module_as_before():
    module = mixtral()
    given = routed()
    eager = module(*given)
    before = dict(module.__dict__)
    with experts_replaced(nn.ModuleList([module])):
        assert "forward" in module.__dict__
        ours = module(*given)
    torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12)
    assert module.__dict__ == before


def test_experts_with_a_bias_and_a_gate_of_their_own_are_left_alone():
    module = gpt_oss()
    assert not is_plain(module)
    with experts_replaced(module):
        assert "forward" not in module.__dict__


@pytest.mark.parametrize("change", [
    {"has_bias": True}, {"has_post_expert_norm": True}, {"_is_expert_parallel": True}, {"act_fn": nn.Tanh()},
    {"num_experts": 5},
])
def test_what_the_op_does_not_compute_is_left_alone(change):
    module = mixtral()
    assert is_plain(module)
    for name, value in change.items():
        setattr(module, name, value)
    assert not is_plain(module)


def test_other_modules_are_no_experts():
    assert not is_plain(nn.Linear(2, 2)) and not is_plain(nn.Module())


@pytest.mark.parametrize(("module", "name"), [
    (nn.SiLU(), "silu"), (nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.ReLU(), "relu"), (nn.Tanh(), None),
    (torch.tanh, None),
])
def test_activations_by_name(module, name):
    assert activation_of(module) == name


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_activations_of_transformers(name):
    from transformers.activations import ACT2FN

    from fxpar.rules.ops.experts import ACTIVATIONS

    module, a = ACT2FN[name], torch.linspace(-3, 3, 25, dtype=torch.float64)
    known = activation_of(module)
    assert known is not None
    torch.testing.assert_close(ACTIVATIONS[known][0](a), module(a), rtol=1e-12, atol=1e-12)
