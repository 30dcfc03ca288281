"""Programs made from four units equal those of the whole model, bit for bit; what does not repeat is traced whole."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxpar.capture.repeated_layers import trace_repeated
from fxpar.capture.replicate import replicate, same
from fxpar.capture.stacks import Stack
from fxpar.capture.trace import trace
from tests.capture.deep_models import WIDTH, Block, deep, encoder, hugging_face


def whole_trace(model, args, kwargs, loss, train=True):
    return trace(model, args, kwargs, loss=loss, train=train, keep_output=False)


def repeated(model, args, kwargs, loss, train=True, at_least=1):
    def tracer(shorter):
        return whole_trace(shorter, args, kwargs, loss, train)

    return trace_repeated(
        model, args, kwargs, tracer, loss=loss, train=train, keep_output=False, at_least=at_least
    )


def state_of(model):
    return {
        name: {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    "name", ["llama", "bert", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "vit", "mixtral"))]
)
def test_transformers(name):
    pytest.importorskip("transformers")
    model, kwargs = hugging_face(name, 6)
    model.train()
    found = repeated(model, (), kwargs, None)
    assert found is not None and same(found, whole_trace(model, (), kwargs, None))


@pytest.mark.slow
def test_encoder_and_decoder():
    pytest.importorskip("transformers")
    model, kwargs = hugging_face("t5", 6)
    found = repeated(model.train(), (), kwargs, None)
    assert found is not None and same(found, whole_trace(model, (), kwargs, None))


def test_torch_encoder_and_what_it_leaves_behind():
    model, args, kwargs, loss = encoder(7)
    before = state_of(model), list(map(id, model.parameters())), torch.get_rng_state()
    found = repeated(model, args, kwargs, loss)
    assert found is not None and same(found, whole_trace(model, args, kwargs, loss))
    assert (state_of(model), list(map(id, model.parameters()))) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_forward_only():
    model, args, kwargs, loss = deep([Block(i, 0.1) for i in range(7)])
    found = repeated(model, args, kwargs, loss, train=False)
    assert found is not None and same(found, whole_trace(model, args, kwargs, loss, train=False))
    assert model.training


@settings(max_examples=3, deadline=None)
@given(
    traits=st.fixed_dictionaries({"shared": st.booleans(), "masked": st.booleans(), "tied": st.booleans()}),
    block=st.fixed_dictionaries(
        {"dropout": st.sampled_from([0.0, 0.2]), "norm": st.booleans(), "rounds": st.integers(1, 2)}
    ),
    units=st.sampled_from([3, 5, 7]),
    odd=st.tuples(st.booleans(), st.booleans()),
    period=st.integers(1, 2),
)
def test_any_number_of_units(traits, block, units, odd, period):
    """Stacks between odd layers, of one or two kinds of layers in turn."""

    def model(count):
        scales = [0.25] * odd[0] + [1.0 + i % period for i in range(count * period)] + [0.75] * odd[1]
        return deep([Block(i, scale=scale, **block) for i, scale in enumerate(scales)], **traits)

    short, long = whole_trace(*model(4)), whole_trace(*model(units))
    assert same(replicate(short, [Stack("blocks", int(odd[0]), period, 4)], [units]), long)


def test_alternating_layers_and_odd_ones_at_the_ends():
    blocks = [Block(0, scale=9.0), *(Block(i, scale=1.0 + i % 2) for i in range(1, 14)), Block(14, scale=7.0)]
    model, args, kwargs, loss = deep(blocks, shared=True, masked=True)
    found = repeated(model, args, kwargs, loss)
    assert found is not None and same(found, whole_trace(model, args, kwargs, loss))


def test_layers_after_an_odd_one_are_traced():
    blocks = [Block(i, 0.1) for i in range(10)]
    blocks[7].steps[0].weight.requires_grad_(False)
    model, args, kwargs, loss = deep(blocks)
    found = repeated(model, args, kwargs, loss)
    assert found is not None and same(found, whole_trace(model, args, kwargs, loss))


def odd_layer():
    return deep([Block(i, scale=3.0 if i == 4 else 1.0) for i in range(8)])


def drop_path():
    return deep([Block(i, dropout=0.1 * i / 8) for i in range(8)])


def tied_layers():
    blocks = [Block(i) for i in range(8)]
    blocks[6].steps = blocks[2].steps
    return deep(blocks)


def frozen_layer():
    blocks = [Block(i) for i in range(8)]
    blocks[4].steps[0].weight.requires_grad_(False)
    return deep(blocks)


def one_layer_evaluates():
    blocks = [Block(i, dropout=0.1) for i in range(8)]
    blocks[4].eval()
    return deep(blocks)


def hooked_layer():
    blocks = [Block(i) for i in range(8)]
    blocks[4].register_full_backward_hook(lambda module, given, made: tuple(g * 2 for g in given))
    return deep(blocks)


def index_in_forward():
    return deep([Block(i) for i in range(8)], extra=lambda number, depth, x: x * 3.0 if number == 5 else x)


def index_of_the_last():
    return deep([Block(i) for i in range(8)], extra=lambda number, depth, x: x * 3.0 if number == depth - 1 else x)


def depth_in_forward():
    return deep([Block(i) for i in range(8)], extra=lambda number, depth, x: x * (number + 1))


class Skips(nn.Module):
    """Layer i of the second half reads what layer i of the first half made."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(i) for i in range(10)])

    def forward(self, x):
        kept = []
        for number, block in enumerate(self.blocks):
            half = len(self.blocks) // 2
            x = block(x if number < half else x + kept[2 * half - 1 - number])
            kept.append(x)
        return x


def skips():
    return Skips(), (torch.randn(4, WIDTH),), {}, lambda output, inputs: output.sum()


class Listed(nn.Module):
    """Runs a list of its own that holds the layers backwards."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(i) for i in range(8)])
        self.order = tuple(reversed(self.blocks))

    def forward(self, x):
        for block in self.order:
            x = block(x)
        return x


def listed():
    return Listed(), (torch.randn(4, WIDTH),), {}, lambda output, inputs: output.sum()


class Collected(nn.Module):
    """The loss reads what every layer made."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(i) for i in range(8)])

    def forward(self, x):
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x.mean())
        return torch.stack(made)


def collected():
    return Collected(), (torch.randn(4, WIDTH),), {}, lambda output, inputs: output.sum()


NOT_REPEATED = [
    odd_layer, drop_path, tied_layers, frozen_layer, one_layer_evaluates, hooked_layer, index_in_forward,
    index_of_the_last, depth_in_forward, skips, listed, collected,
]  # fmt: skip


@pytest.mark.parametrize("make", NOT_REPEATED, ids=lambda make: make.__name__)
def test_what_does_not_repeat_is_traced_whole(make):
    model, args, kwargs, loss = make()
    before = copy.deepcopy(model.state_dict())
    assert repeated(model, args, kwargs, loss) is None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [name for name, _ in model.blocks.named_children()] == [str(i) for i in range(len(model.blocks))]


def test_shallow_models_are_left_alone():
    model, args, kwargs, loss = deep([Block(i) for i in range(7)])
    assert repeated(model, args, kwargs, loss, at_least=4) is None
