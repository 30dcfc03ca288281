"""A program keeps no strides: every op that a plan may run gives the same numbers for operands of any strides."""

import pytest
import torch

from fxpar import rule_examples  # noqa: F401  fills GENERATORS
from fxpar.rule_examples.draw import GENERATORS, Draw
from fxpar.runtime.interpret import call, concrete

torch.set_num_threads(1)

UNDEFINED = {
    "empty", "empty_permuted", "empty_like", "empty.memory_format", "new_empty", "new_empty_strided", "empty_strided",
}
REASONS = {
    "_reshape_alias": "takes strides as an argument; capture writes a view instead",
    "_grouped_mm": "refuses strides that are not aligned, never reads wrongly",
}


def padded(tensor):
    """The same values with a gap after every row."""
    if not tensor.dim() or not tensor.numel():
        return tensor
    wide = torch.ones((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def transposed(tensor):
    """The same values with the first dim innermost."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else padded(tensor)


def run(example, change):
    values = {index: change(tensor) for index, tensor in enumerate(example.tensors)}
    result = call(example.op, [concrete(arg, values) for arg in example.args], torch.device("cpu"))
    return result if isinstance(result, tuple | list) else (result,)


@pytest.mark.parametrize("op", sorted(set(GENERATORS) - UNDEFINED - set(REASONS)))
def test_strides_do_not_matter(op):
    for generator in GENERATORS[op]:
        for seed in range(3):
            example = generator(Draw(seed))
            want = run(example, torch.Tensor.contiguous)
            for change in (padded, transposed):
                for one, two in zip(run(example, change), want, strict=True):
                    if isinstance(one, torch.Tensor):
                        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8, equal_nan=True)
