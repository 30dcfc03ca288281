"""Ties: equal places of repeated layers share a class, and nothing else does."""

from collections import Counter, defaultdict

import msgspec
import pytest
import torch

from fxpar.layers import layer_key, tie_layers
from tests.compiled import decoder_program, mlp_program

torch.set_num_threads(1)


@pytest.mark.parametrize(("path", "key"), [
    ("", ""), ("layers.3.mlp", "layers.*.mlp"), ("h.0.1.x", "h.*.*.x"), ("0", "*"), ("conv2.weight", "conv2.weight"),
    ("a.10", "a.*"), ("layer1.0.conv1", "layer1.*.conv1"), ("x.1a.2", "x.1a.*"),
])
def test_numbers_between_dots_are_starred(path, key):
    assert layer_key(path) == key


def test_classes_have_one_site_and_one_place():
    program = decoder_program(layers=3)
    classes = tie_layers(program)
    members = defaultdict(list)
    for index, c in enumerate(classes.nodes):
        members[c].append(index)
    for indices in members.values():
        assert len({classes.sites[i] for i in indices}) == 1
        assert len({(layer_key(program.nodes[i].module), program.nodes[i].phase) for i in indices}) == 1
        assert len({program.nodes[i].module for i in indices}) == len(indices)
    counts = Counter((*classes.nodes, *classes.inputs))
    assert classes.sizes == tuple(counts[c] for c in range(len(counts)))
    assert not set(classes.nodes) & set(classes.inputs)


def test_every_layer_ties_with_every_other():
    program = decoder_program(layers=3)
    classes = tie_layers(program)
    inside = [c for n, c in zip(program.nodes, classes.nodes, strict=True) if n.module.startswith("layers.1.")]
    assert len(inside) > 20 and sum(classes.sizes[c] == 3 for c in inside) > 0.9 * len(inside)
    named = {i.name: c for i, c in zip(program.inputs, classes.inputs, strict=True)}
    assert named["layers.0.up.weight"] == named["layers.2.up.weight"]
    assert named["layers.0.norm1.weight"] != named["layers.0.norm2.weight"] != named["norm.weight"]


def test_layers_of_other_shapes_stay_apart():
    program = mlp_program()
    tied = tie_layers(program)
    first = next(i for i in program.inputs if i.name == "0.weight")
    frozen = msgspec.structs.replace(program, inputs=tuple(
        msgspec.structs.replace(i, requires_grad=False) if i is first else i for i in program.inputs
    ))
    named = {i.name: c for i, c in zip(program.inputs, tied.inputs, strict=True)}
    apart = {i.name: c for i, c in zip(program.inputs, tie_layers(frozen).inputs, strict=True)}
    assert named["0.weight"] == named["3.weight"] and named["0.weight"] != named["2.weight"]
    assert apart["0.weight"] != apart["3.weight"]


def test_untied_everything_is_its_own():
    program = decoder_program()
    classes = tie_layers(program, tied=False)
    assert set(classes.sizes) == {1} and len(classes.sizes) == len(program.nodes) + len(program.inputs)
