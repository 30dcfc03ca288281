"""Classes of logical dims: one per loop, the batch among them, and names for people."""

import pytest
import torch
from hypothesis import given
from torch import nn

from fxpar.capture import capture
from fxpar.logical_dims import analyse, twins
from fxpar.names import Classes, batch_class, classes_of, names_of, places_of
from fxpar.plans.program import Program, node_inputs
from fxpar.rules.choices import factors_on_atoms, site_of
from tests.program_builder import ProgramBuilder, programs

torch.set_num_threads(1)


def input_classes(program: Program, classes: Classes, name: str) -> list[tuple[int, ...]]:
    value = next(i.value for i in program.inputs if i.name == name)
    return list(classes.of_atom[value])


@given(programs())
def test_a_factor_and_all_its_atoms_have_one_class(program: Program):
    program = analyse(program)
    classes = classes_of(program)
    for value, dims in enumerate(program.dims):
        assert [[classes.sizes[c] for c in row] for row in classes.of_atom[value]] == [list(a) for a in dims]
    for node, numbers in zip(program.nodes, classes.of_factor, strict=True):
        factors = factors_on_atoms(site_of(node, program))
        values = (*node_inputs(node), *node.outputs)
        assert len(factors) == len(numbers)
        for factor, number in zip(factors, numbers, strict=True):
            assert {classes.of_atom[values[o]][dim][atom] for o, dim, atom in places_of(factor)} == {number}
    for a, b in twins(program):
        assert classes.of_atom[a] == classes.of_atom[b]
    assert all(classes.kin[k] == k <= c for c, k in enumerate(classes.kin))


def perceptron(batch: int) -> Program:
    b = ProgramBuilder()
    x, y = b.enter("x", (batch, 6)), b.enter("y", (batch, 3))
    h = b.call("relu", b.call("mm", b.call("mul.Scalar", x, 2.0), b.parameter("w", (6, 8))))
    h = b.call("sub.Tensor", b.call("mm", h, b.parameter("v", (8, 3))), y)
    b.leave(b.call("sum.dim_IntList", b.call("mul.Tensor", h, h), (0, 1)), "loss")
    return analyse(b.done())


def test_rows_of_a_perceptron_are_the_batch():
    program = perceptron(5)
    classes = classes_of(program)
    batch = batch_class(program, classes=classes)
    assert batch == set(input_classes(program, classes, "x")[0]) == set(input_classes(program, classes, "y")[0])
    assert batch_class(program, 0) == batch
    assert batch_class(program, 7) == frozenset()


def test_a_batch_of_one_is_no_batch():
    assert batch_class(perceptron(1)) == frozenset()
    assert batch_class(perceptron(1), 0) == frozenset()


def test_two_towers_add_their_batches():
    b = ProgramBuilder()
    texts, images = b.enter("texts", (4, 6)), b.enter("images", (4, 10))
    t = b.call("mm", texts, b.parameter("w", (6, 8)))
    i = b.call("mm", images, b.parameter("v", (10, 8)))
    scores = b.call("_softmax", b.call("mm", t, b.call("t", i)), 1, False)
    b.leave(b.call("sum.dim_IntList", scores, (0, 1)), "loss")
    program = analyse(b.done())
    classes = classes_of(program)
    expected = {*input_classes(program, classes, "texts")[0], *input_classes(program, classes, "images")[0]}
    assert len(expected) == 2
    for found in (batch_class(program, classes=classes), batch_class(program, 0, classes)):
        # and what the softmax makes of the images
        assert found >= expected and {classes.kin[c] for c in found} == expected


LIBRARY = torch.library.Library("fxpar_tests", "FRAGMENT")
LIBRARY.define("unknown(Tensor x) -> Tensor")
LIBRARY.impl("unknown", lambda x: x.clone(), "CompositeExplicitAutograd")


def test_the_batch_goes_on_behind_an_op_without_a_rule():
    b = ProgramBuilder()
    x = b.enter("x", (4, 6))
    h = b.call("fxpar_tests::unknown", b.call("mm", x, b.parameter("w", (6, 8))))
    h = b.call("relu", b.call("relu", b.call("relu", h)))
    program = analyse(b.done())
    classes = classes_of(program)
    batch = batch_class(program, classes=classes)
    assert {classes.of_atom[x.id][0][0], classes.of_atom[h.id][0][0]} <= batch
    assert classes.of_atom[x.id][0] != classes.of_atom[h.id][0]


class SequenceFirst(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(length, 1, 12))
        layer = nn.TransformerEncoderLayer(12, 2, 19, dropout=0.0, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x, pad, mask):
        h = self.encoder(x + self.positions, mask=mask, src_key_padding_mask=pad, is_causal=True)
        keep = (~pad).t().unsqueeze(-1)
        return ((h * keep).sum(0) / keep.sum(0)).square().mean()


@pytest.mark.parametrize("batch_size", [5, 6])
def test_a_sequence_first_encoder_has_its_batch_inside(batch_size: int):
    """x is [s, b, d], the padding mask [b, s], the attention mask [s, s]; also when b equals s."""
    length = 6
    pad = torch.zeros(batch_size, length, dtype=torch.bool)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    program = analyse(
        capture(SequenceFirst(length), (torch.randn(length, batch_size, 12),), {"pad": pad, "mask": mask})
    )
    classes = classes_of(program)
    x = input_classes(program, classes, "x")
    assert batch_class(program, classes=classes) == set(x[1]) == set(input_classes(program, classes, "pad")[0])
    assert batch_class(program, 1, classes) >= set(x[1])
    assert not batch_class(program, 1, classes) & {*x[0], *x[2]}


def test_a_grouped_query_decoder():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    architecture = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=44, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=101, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 101, (5, 7))
    program = analyse(
        capture(transformers.LlamaForCausalLM(architecture), (), {"input_ids": ids, "labels": ids.clone()})
    )
    classes = classes_of(program)
    batch = batch_class(program, classes=classes)
    assert (
        batch
        == set(input_classes(program, classes, "input_ids")[0])
        == set(input_classes(program, classes, "labels")[0])
    )
    names = names_of(program, classes, batch)
    text = {
        i.name: [[names[c] for c in row] for row in classes.of_atom[i.value]]
        for i in program.inputs
        if i.kind in ("parameter", "input")
    }
    assert text["input_ids"] == [["batch"], ["sequence"]]
    assert text["model.embed_tokens.weight"] == text["lm_head.weight"] == [["vocab"], ["hidden"]]
    assert text["model.layers.0.mlp.up_proj.weight"] == [["ffn"], ["hidden"]]
    rows, columns = text["model.layers.0.self_attn.q_proj.weight"]
    assert rows[:2] == ["heads", "heads"] and set(rows[2:]) == {"head_dim"} and columns == ["hidden"]
    query = next(i.value for i in program.inputs if i.name.endswith("q_proj.weight"))
    key = next(i.value for i in program.inputs if i.name.endswith("k_proj.weight"))
    assert program.dims[query][0][:2] == (2, 4)  # (kv, rep, e)
    assert classes.of_atom[query][0][0] == classes.of_atom[key][0][0]
