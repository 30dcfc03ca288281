"""Views that are copies: found in the program as the replay of one device finds them."""

from fxpar.copying_views import copying_views
from fxpar.cost.op_work import is_view_op
from fxpar.plans.program import node_inputs
from fxpar.replay_memory import storage_roots
from fxpar.rules.ops.hub import HUB
from fxpar.runtime.rewrite.passes import rewrite
from tests.compiled import decoder_plan


def test_views_with_storages_of_their_own_are_those_that_the_replay_finds():
    plan = decoder_plan("1")
    program = plan.program
    local = rewrite(program, plan.decisions, (0,), every_pass=False)
    roots, of = storage_roots(local), {}
    for value, (origin, _) in enumerate(local.origins):
        of.setdefault(origin, value)
    expected = {
        n for n, node in enumerate(program.nodes)
        if node.phase == "forward" and is_view_op(node.op) and node.op != HUB and node_inputs(node)
        and roots[of[node.outputs[0]]] == of[node.outputs[0]]
    }
    assert copying_views(program) == expected
    # of every layer, what attention makes with its heads put side by side
    assert len(expected) >= 2
