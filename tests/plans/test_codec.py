"""Plan files: inverse, deterministic, and nothing damaged or hostile gets through."""

import hashlib
import os
import random
import subprocess
import sys
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.plans.codec import MAGIC, decode, encode, program_digest, read_plan, to_wire
from fxpar.plans.errors import PlanFileError
from fxpar.plans.plan import FORMAT_VERSION, Plan
from tests.compiled import decoder_plan, mlp_plan
from tests.plans.draw import plans


def wire(plan: Plan) -> dict[str, Any]:
    """The wire form as plain lists and maps, to be damaged."""
    return msgpack.unpackb(msgpack.packb(msgspec.to_builtins(to_wire(plan), builtin_types=(bytes,))))


def sealed(payload: object, version: object = FORMAT_VERSION) -> bytes:
    """A file with a right checksum around any payload (bytes are taken as they are)."""
    body = payload if isinstance(payload, bytes) else msgpack.packb(payload)
    return msgpack.packb([MAGIC, version, hashlib.sha256(body).digest(), body])


def refused(data: bytes, match: str) -> PlanFileError:
    with pytest.raises(PlanFileError, match=match) as caught:
        decode(data, where="p.msgpack")
    assert caught.value.where == "p.msgpack" and caught.value.way_out
    return caught.value


@given(plans())
def test_decode_is_the_inverse_of_encode(plan: Plan):
    data = encode(plan)
    assert decode(data) == plan
    assert encode(decode(data)) == data


@pytest.mark.parametrize("make", [mlp_plan, decoder_plan])
def test_real_plans_survive_the_file(make, tmp_path):
    plan = make("2x2") if make is mlp_plan else make("2")
    data = encode(plan)
    assert decode(data) == plan
    path = tmp_path / "plan.msgpack"
    path.write_bytes(data)
    assert read_plan(path) == plan
    digest = hashlib.sha256(data).hexdigest()
    assert read_plan(path, sha256=digest.upper()) == plan
    with pytest.raises(PlanFileError, match="not the one that was asked for"):
        read_plan(path, sha256="0" * 64)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        read_plan(tmp_path / "no.msgpack")
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        read_plan(tmp_path)


PROCESS = """
import hashlib, sys
from fxpar.plans.codec import decode, encode, program_digest
plan = decode(open(sys.argv[1], "rb").read())
print(hashlib.sha256(encode(plan)).hexdigest(), program_digest(plan.program))
"""


def test_the_bytes_do_not_depend_on_the_process(repository, tmp_path):
    plan = mlp_plan("2x2")
    path = tmp_path / "plan.msgpack"
    path.write_bytes(encode(plan))
    want = f"{hashlib.sha256(encode(plan)).hexdigest()} {program_digest(plan.program)}"
    for seed in ("1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(path)], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=repository,
            capture_output=True, text=True, check=True,
        )
        assert done.stdout.strip() == want


def test_every_truncation_is_refused():
    data = encode(mlp_plan("2x2"))
    for length in range(len(data)):
        with pytest.raises(PlanFileError):
            decode(data[:length])
    with pytest.raises(PlanFileError):
        decode(data + b"\0")


def test_every_flipped_bit_is_refused():
    data, rng = encode(mlp_plan("2x2")), random.Random(1)
    for _ in range(2000):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(PlanFileError):
            decode(bytes(damaged))


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_words(data: bytes):
    for file in (data, sealed(data)):
        with pytest.raises(PlanFileError):
            decode(file)


ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8),
              st.binary(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def spots(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every part of a nested value but the root."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [p for key in keys for p in [(*path, key), *spots(node[key], (*path, key))]]


@settings(max_examples=400)
@given(st.data())
def test_any_part_replaced_by_anything_is_refused_or_a_consistent_plan(data):
    """With a right checksum: the file says what its maker wanted, so it may be taken, but never half."""
    payload = wire(mlp_plan("2"))
    path = data.draw(st.sampled_from(spots(payload)))
    node = payload
    for key in path[:-1]:
        node = node[key]
    if isinstance(node, list) and data.draw(st.booleans()):
        del node[path[-1]]
    elif isinstance(node[path[-1]], int) and data.draw(st.booleans()):
        node[path[-1]] = data.draw(st.integers(-3, 60))
    else:
        node[path[-1]] = data.draw(ANY)
    try:
        plan = decode(sealed(payload))
    except PlanFileError as error:
        assert error.numbers
        return
    assert decode(encode(plan)) == plan


def test_a_plan_of_another_version_is_refused_by_name():
    later = FORMAT_VERSION + 7
    error = refused(sealed(wire(mlp_plan("2")), version=later), f"format {later} is not known")
    assert str(FORMAT_VERSION) in error.numbers[0]
    refused(sealed(wire(mlp_plan("2")), version="one"), "format 'one' is not known")
    refused(sealed(wire(mlp_plan("2")), version=True), "not known")


@pytest.mark.parametrize("outer", [[], ["fxpar-plan"], ["other", 1, b"", b""], {}, 7, "fxpar-plan", [[]] * 4])
def test_other_files_are_no_plans(outer):
    refused(msgpack.packb(outer), "not a plan file")


def test_a_wrong_checksum_is_refused():
    body = msgpack.packb(wire(mlp_plan("2")))
    refused(msgpack.packb([MAGIC, FORMAT_VERSION, hashlib.sha256(b"").digest(), body]), "damaged")
    refused(msgpack.packb([MAGIC, FORMAT_VERSION, "x" * 32, body]), "damaged")
    refused(msgpack.packb([MAGIC, FORMAT_VERSION, b"", 5]), "damaged")


def test_hostile_messagepack_is_refused():
    good = msgpack.packb(wire(mlp_plan("2")))
    twice = b"\x82" + 2 * (msgpack.packb("cluster") + msgpack.packb("cpu"))
    deep = wire(mlp_plan("2"))
    nested: Any = 1
    for _ in range(80):
        nested = [nested]
    deep["structure"] = nested
    for payload, words in [
        (twice, "twice"),
        (msgpack.packb({"cluster": msgpack.ExtType(5, b"x")}), "ext"),
        (msgpack.packb({"cluster": msgpack.Timestamp(1)}), "ext"),
        (msgpack.packb(deep), "deeper"),
        (msgpack.packb({"gap": float("nan")}), "NaN"),
        (msgpack.packb({"gap": 2**64 - 1}), "64 bits"),
        (msgpack.packb({"cluster": "x" * 5000}), "4096|max_str_len"),
        (msgpack.packb({1: 2}), "key"),
        (b"\x81\xd9\x02\xff\xfe\x01", "utf-8"),
        (b"\xdd\xff\xff\xff\xff", "array|max_array_len"),
        (b"\xc6\xff\xff\xff\xff", "incomplete"),
        (b"\x91" * 200_000, ""),
        (good + good, "extra|Extra"),
        (b"\xc1", ""),
    ]:
        error = refused(sealed(payload), "damaged")
        assert words == "" or any(w in error.numbers[0] for w in words.split("|")), (words, error.numbers)


@pytest.mark.parametrize(("path", "value", "place"), [
    (("nodes", 0, 0), "aten.mm.default", "$.nodes[0][0]"),
    (("nodes", 0, 2), [0.5], "$.nodes[0][2][0]"),
    (("nodes", 3, 1, 0), {"t": "v", "id": "x"}, "$.nodes[3][1][0]"),
    (("nodes", 3, 1, 0), {"t": "z"}, "$.nodes[3][1][0]"),
    (("nodes", 0, 3), 1, "$.nodes[0][3]"),
    (("types", 0, 0, 0), "4", "$.types[0][0][0]"),
    (("mesh",), [[["dp", "2"]]], "$.mesh[0][0][1]"),
    (("inputs", 0, 0, 1), "weights", "$.inputs[0][0][1]"),
    (("layouts", 0, 0), ["X"], "$.layouts[0][0]"),
    (("certificate", "status"), "best", "$.certificate.status"),
    (("prediction", "step_ns"), None, "$.prediction.step_ns"),
    (("structure",), {"t": "q"}, "$.structure"),
])
def test_wrong_types_are_named_by_their_place(path, value, place):
    payload = wire(mlp_plan("2"))
    node = payload
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert place in refused(sealed(payload), "damaged").numbers[0]


@pytest.mark.parametrize("missing", ["strings", "nodes", "mesh", "certificate", "provenance"])
def test_missing_fields_are_named(missing):
    payload = wire(mlp_plan("2"))
    del payload[missing]
    assert f"`{missing}`" in refused(sealed(payload), "damaged").numbers[0]


@pytest.mark.parametrize(("where", "index"), [("op", 0), ("module", 4), ("source", 5), ("choice", 6)])
@pytest.mark.parametrize("value", [-1, 10**6, 2**62])
def test_indices_outside_their_table_are_refused(where, index, value):
    payload = wire(mlp_plan("2"))
    payload["nodes"][0][index] = value
    refused(sealed(payload), "damaged")


@pytest.mark.parametrize(("table", "row"), [("values", 0), ("values", 1), ("inputs", 1), ("outputs", 1)])
def test_interned_values_outside_their_table_are_refused(table, row):
    payload = wire(mlp_plan("2"))
    payload[table][0][row] = 10**6
    refused(sealed(payload), "damaged")
