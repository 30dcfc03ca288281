"""The harness bites: rules made unsound by mechanical changes are all caught by the calls that judge the real ones."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

from fxpar.rule_examples.draw import GENERATORS, Draw
from fxpar.rules.registry import full_name, rule_for
from fxpar.rules.soundness import call_of_example, check_call, run_op
from tests.rules.mutants import LABELS, changed, differs, in_force
from tests.rules.test_soundness import MESHES

OPS = (
    "mm", "addmm", "baddbmm", "add.Tensor", "mul.Tensor", "relu", "gelu_backward", "where.self", "masked_fill.Scalar",
    "sum.dim_IntList", "amax", "amin", "cumsum", "sort", "_softmax", "_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward", "embedding",
    "embedding_dense_backward", "convolution", "convolution_backward", "view", "expand", "repeat", "select.int",
    "slice.Tensor", "slice_backward", "split.Tensor", "cat", "stack", "constant_pad_nd", "tril", "index.Tensor",
    "index_put", "gather", "scatter_add", "fxpar::attention", "fxpar::attention_backward", "fxpar::dropout",
    "nll_loss_forward", "argmax", "max.dim", "logsumexp", "linalg_vector_norm", "any.dim", "avg_pool2d",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
)  # fmt: skip

# These kernels take empty pieces on a CPU; their rules refuse them all the same, as other kernels may not.
SOUND = {("nll_loss_forward", "empty pieces are allowed"), ("native_group_norm_backward", "empty pieces are allowed")}

# Survivors of the rest of the table, beside empty pieces: each is sound, though the rule does not say so.
SOUND_ELSEWHERE = {
    # counts of smaller elements add up over pieces of the boundaries
    ("searchsorted.Tensor", "dim -1 splits too"),
    # linear in the first operand, as long as no logarithm is infinite
    *((op, "linear in operand 0 alone") for op in ("polar", "xlogy.Tensor", "xlogy.Scalar_Other", "special_xlog1py")),
    # moves its operand by less than what sums round
    ("nextafter", "linear in operand 0 alone"),
    # the arguments that become local are such as the op would find by itself
    *((op, "the local call is the global one") for op in
      ("chunk", "flatten.using_ints", "unsqueeze", "unsqueeze_copy")),
    # of the operand only the dtype is read, or values are not defined
    *((op, "operand 0 does not carry the loops") for op in
      ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "fxpar::as_strided_scatter")),
    *((op, "linear in operand 0 alone") for op in
      ("empty_like", "zeros_like", "new_empty", "new_empty_strided", "new_zeros")),
}


def verdict(op: str, label: str, rounds: int) -> str:
    """``"caught"``, ``"survived"``, or ``"same"`` when the mutant says nothing else of any call."""
    rule = rule_for(full_name(op))
    assert rule is not None
    result = "same"
    with in_force(changed(rule, label)):
        for turn in range(rounds):
            for number, generate in enumerate(GENERATORS[op]):
                given = generate(Draw(1000 * number + turn))
                call = call_of_example(given, run_op(given.op, given.args, given.tensors))
                if not differs(rule, label, call):
                    continue
                result = "survived"
                try:
                    if check_call(given, MESHES[turn % 3], seed=turn, whole=turn % 4 == 3, limit=16):
                        return "caught"
                except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
                    return "caught"  # the mutant cannot even be laid over the call
    return result


def verdict_apart(op: str, label: str, rounds: int) -> str:
    """``verdict`` in a process of its own: what a mutant asks of a kernel may crash it."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: there.send(verdict(op, label, rounds)))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return "caught"
    finally:
        child.join()


def survivors(op: str, rounds: int, judge: Callable[[str, str, int], str] = verdict) -> set[str]:
    """The mutants of an op that say something else and that no call catches; prints how many were caught."""
    verdicts = {label: judge(op, label, rounds) for label in LABELS}
    caught = sum(outcome == "caught" for outcome in verdicts.values())
    left = {label for label, outcome in verdicts.items() if outcome == "survived"}
    print(f"mutants of {op}: {caught} caught, survivors {sorted(left)}")
    return left


@pytest.mark.parametrize("op", OPS)
def test_unsound_mutants_are_caught(op: str) -> None:
    assert survivors(op, rounds=40) == {label for o, label in SOUND if o == op}


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(set(GENERATORS) - set(OPS)))
def test_unsound_mutants_of_the_other_rules_are_caught(op: str) -> None:
    """With the test above the whole table: ``pytest tests/rules/test_mutants.py -rA | grep "mutants of"`` counts."""
    left = survivors(op, 24, verdict_apart) - {"empty pieces are allowed"}
    assert left <= {label for o, label in SOUND_ELSEWHERE if o == op}
