"""The layer table: imports go downwards only, private torch stays in its adapters, files stay short and well named."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Per layer: the folder, then what it may import besides the standard library and itself. A file belongs to the first
# layer whose folder holds it.
THIRD_PARTY = ("torch", "numpy", "sympy", "msgspec", "msgpack", "ortools", "rich", "transformers", "safetensors")
LAYERS = {
    "plans": ("msgpack", "msgspec"),
    "solver": ("numpy", "ortools", "fxpar.plans.errors"),
    "fxpar/rules": ("fxpar.plans", "torch", "sympy"),
    "runtime": ("fxpar.plans", "fxpar.rules", "torch"),
    "fxpar/cli": ("fxpar", *THIRD_PARTY),
    "fxpar/__main__.py": ("fxpar.cli",),
    "fxpar": THIRD_PARTY,
}

# Private torch names, and the adapter files that may use them. A folder allows every file in it.
PRIVATE_TORCH = {
    # Names of ops in the public registry; many ops that a graph holds begin with an underscore.
    "torch.ops.aten": ("fxpar", "runtime"),
    # The field's tree functions; torch offers them under no public name that also knows ModelOutput.
    "torch.utils._pytree": ("fxpar", "runtime"),
    # OpOverload, the type of every op in a graph, has no public name.
    "torch._ops": ("fxpar", "runtime"),
    "torch._subclasses": ("fxpar/capture",),
    "torch.ops._c10d_functional": ("runtime/collectives.py",),
    # A minor run of a compound dim has no public placement.
    "torch.distributed.tensor.placement_types._StridedShard": ("runtime/surface.py",),
    "torch.distributed._functional_collectives": ("runtime/collectives.py",),
    # The only way to see every op of a running step, and so every tensor that it makes.
    "torch.utils._python_dispatch.TorchDispatchMode": ("fxpar/live_bytes.py",),
    # Orders and the runtime of schedules with stages of one's own have no public names.
    "torch.distributed.pipelining": ("runtime/torch_pipelining.py",),
    # Experts' grouped product, which the float64 reference has to answer: transformers calls it by this name.
    "torch._grouped_mm": ("fxpar/reference.py",),
    # The adapter of capture may use anything: each line of it is there to hide something private.
    "torch": ("fxpar/capture/adapter.py",),
}

BANNED = {"util", "utils", "helper", "helpers", "manager", "config", "context", "info", "spec"}
LONGEST_FILE = 500


def code_files(*folders: str) -> list[str]:
    """Python files below `folders`, relative to the root; links (fxpar/plans ...) are not followed."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted({str(path.relative_to(ROOT)) for path in found if not any(p.is_symlink() for p in path.parents)})


CODE = code_files("fxpar", "plans", "solver", "runtime")
ALL = CODE + code_files("tests", "tools")


def layer_of(file: str) -> str:
    return next(layer for layer in LAYERS if file == layer or file.startswith(layer + "/"))


def inside(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def attribute_chains(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Dotted names as written in expressions: `torch.ops._c10d_functional.all_reduce`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names: list[str] = []
            at: ast.expr = node
            while isinstance(at, ast.Attribute):
                names.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name):
                yield node.lineno, ".".join([at.id, *reversed(names)])


@pytest.mark.parametrize("file", CODE)
def test_imports_go_downwards(file: str):
    layer = layer_of(file)
    own = "fxpar" if layer == "fxpar" else "fxpar." + layer.removeprefix("fxpar/")
    for line, name in imports(ast.parse((ROOT / file).read_text())):
        if name.split(".")[0] in sys.stdlib_module_names:
            continue
        upwards = layer == "fxpar" and inside(name, "fxpar.cli")
        allowed = any(inside(name, one) for one in (own, *LAYERS[layer]))
        assert allowed and not upwards, f"{file}:{line} imports {name}, which {layer}/ may not"


@pytest.mark.parametrize("file", CODE)
def test_private_torch_stays_in_its_adapters(file: str):
    tree = ast.parse((ROOT / file).read_text())
    for line, name in (*imports(tree), *attribute_chains(tree)):
        parts = name.split(".")
        if parts[0] != "torch" or not any(part.startswith("_") and not part.startswith("__") for part in parts):
            continue
        homes = [home for private, homes in PRIVATE_TORCH.items() if inside(name, private) for home in homes]
        at_home = any(file == home or file.startswith(home + "/") for home in homes)
        assert at_home, f"{file}:{line} uses {name}; PRIVATE_TORCH in {Path(__file__).name} names the adapters: {homes}"


@pytest.mark.parametrize("file", ALL)
def test_files_are_short_and_named_for_the_thing_in_them(file: str):
    source = (ROOT / file).read_text()
    assert source.count("\n") <= LONGEST_FILE, f"{file} has {source.count(chr(10))} lines"
    words = {word for part in Path(file).with_suffix("").parts for word in part.split("_")}
    assert not words & BANNED, f"{file}: {words & BANNED} says nothing of what is in it"
    assert Path(file).stem != "strategy", file
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            assert not node.name.lower().endswith(tuple(BANNED)), f"{file}:{node.lineno} class {node.name}"
