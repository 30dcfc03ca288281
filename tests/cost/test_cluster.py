import pytest

from fxpar.cost.cluster import COLLECTIVES, OP_CLASSES, parse_cluster, preset_names
from fxpar.plans.errors import FxparError


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_with_every_rate(name):
    cluster = parse_cluster(f"2x8:{name}")
    assert (cluster.nodes, cluster.devices_per_node, cluster.world_size) == (2, 8, 16)
    assert cluster.name == name
    assert set(OP_CLASSES) <= set(cluster.device.efficiency)
    assert set(cluster.intra.efficiency) == set(cluster.inter.efficiency) == set(COLLECTIVES)
    assert 0 < cluster.usable_bytes <= cluster.device.memory_bytes
    if name != "cpu":
        assert cluster.inter.bandwidth < cluster.intra.bandwidth


def test_forms_of_the_command_line(tmp_path):
    assert parse_cluster("4").name == "cpu"
    assert parse_cluster("4").world_size == 4
    assert parse_cluster("2x2").nodes == 2
    assert parse_cluster("8:h100").nodes == 1
    file = tmp_path / "mine.toml"
    file.write_text('base = "h100"\nname = "mine"\nnodes = 3\ndevice.memory_bytes = 1000\ninter.bandwidth = 1e9\n')
    mine = parse_cluster(str(file))
    assert (mine.name, mine.nodes, mine.devices_per_node, mine.device.memory_bytes) == ("mine", 3, 8, 1000)
    assert mine.inter.bandwidth == 1e9 and mine.inter.protocols == parse_cluster("8:h100").inter.protocols
    assert parse_cluster(f"2x4:{file}").world_size == 8


def test_a_rate_of_one_dtype_overrides_its_class():
    device = parse_cluster("1:h100").device
    assert device.efficiency_of("matmul", "tfloat32") < device.efficiency_of("matmul", "bfloat16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2x8:h1000", "no cluster preset is called 'h1000'"),
        ("2x8:../cpu", "no cluster preset is called '../cpu'"),
        ("h100", "cannot read the cluster 'h100'"),
        ("", "cannot read the cluster ''"),
        ("0x8:h100", "$.nodes"),
        ("60000x8:h100", "are more than 65536"),
        ("nowhere.toml", "No such file"),
        ("2x8:nowhere.toml", "No such file"),
    ],
)
def test_what_cannot_be_read_is_said(text, says):
    with pytest.raises(FxparError) as caught:
        parse_cluster(text)
    assert says in str(caught.value)


def test_unknown_presets_list_those_known():
    with pytest.raises(FxparError) as caught:
        parse_cluster("2x8:tpu")
    assert all(name in caught.value.way_out for name in preset_names())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = ", "is not TOML"),
        ("nodes = 1", "missing required field"),
        ('base = "h100"\n[device]\nmemory_bytes = "80"', "$.device.memory_bytes"),
        ('base = "h100"\n[device.efficiency]\nmatmul = 1.5', "$.device.efficiency"),
        ('base = "h100"\n[device]\nmemory_bandwidth = inf', "infinite"),
        ('base = "h100"\n[device]\nmemory_bandwidth = nan', "$.device"),
        ('base = "h100"\n[device.efficiency]\nmatmull = 0.5', "'matmull'"),
        ('base = "h100"\n[intra]\nlatency = 1', "latency"),
        ('base = "h100"\n[inter]\nprotocols = []', "$.inter.protocols"),
        ('base = "h100"\n[inter]\nprotocols = [{name = "other", base_ns = 1, hop_ns = 1}]', "share no protocol"),
        ("base = 3", "$.base"),
        ('base = "{self}"', "more than 4 bases"),
    ],
)
def test_a_bad_file_is_refused_by_the_field(tmp_path, text, says):
    file = tmp_path / "bad.toml"
    file.write_text(text.replace("{self}", str(file)))
    with pytest.raises(FxparError) as caught:
        parse_cluster(str(file))
    assert says in str(caught.value)
