"""Four folders, one import package: the map in pyproject.toml, the committed links and the folders must agree."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("plans", "solver", "runtime")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def package_folders() -> dict[str, str]:
    """Import name -> folder, for every folder with an __init__.py."""
    found = {}
    for top in ("fxpar", *LINKED):
        for init in (ROOT / top).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT)
            if not any((ROOT / parent).is_symlink() for parent in (folder, *folder.parents)):
                found[".".join(folder.parts if top == "fxpar" else ("fxpar", *folder.parts))] = str(folder)
    return found


def source_files() -> list[str]:
    """What git has or would take: no caches, no build results."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({file for file in listed.stdout.split("\0") if file and (ROOT / file).exists()})


def test_map_links_and_folders_agree():
    assert SETUPTOOLS["package-dir"] == {"fxpar": "fxpar", **{f"fxpar.{name}": name for name in LINKED}}
    for name in LINKED:
        link = ROOT / "fxpar" / name
        assert link.is_symlink() and str(link.readlink()) == f"../{name}"
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_folders()), "update [tool.setuptools] packages"


def test_every_folder_of_modules_is_a_package():
    folders = {str(Path(file).parent) for file in source_files() if file.endswith(".py")}
    code = {folder for folder in folders if Path(folder).parts[:1] and Path(folder).parts[0] in ("fxpar", *LINKED)}
    assert code <= set(package_folders().values())


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_is_not_importable_by_its_generic_name(name: str):
    done = python(f"import {name}", ROOT)
    assert done.returncode == 1 and f"ImportError: this folder is the package fxpar.{name}" in done.stderr


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        ("fxpar", {"torch", "ortools", "msgspec"}),
        ("fxpar.plans", {"torch", "ortools"}),
        ("fxpar.solver", {"torch"}),
        ("fxpar.runtime", {"ortools", "fxpar.solver"}),
        ("fxpar.cli.main", {"torch", "ortools"}),
    ],
)
def test_a_layer_loads_only_what_it_needs(name: str, unwanted: set[str]):
    done = python(f"import sys, {name}; print([m for m in {sorted(unwanted)!r} if m in sys.modules])", ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_installed_package_is_this_checkout(tmp_path: Path):
    """The editable install reaches the linked folders from anywhere, past a user's own plans.py."""
    (tmp_path / "plans.py").write_text("raise SystemExit('the user has a plans.py of their own')")
    done = python("import fxpar.plans, fxpar.runtime, fxpar; print(fxpar.plans.__file__, fxpar.FxparError)", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(ROOT / "fxpar/plans/__init__.py"), "<class", "'fxpar.plans.errors.FxparError'>"]


def test_wheel_and_sdist_hold_every_module_once(tmp_path: Path):
    """Build as an installer does: the sdist from the checkout, the wheel from the sdist, which has no links."""
    checkout = tmp_path / "checkout"
    for file in source_files():
        target = checkout / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / file).is_symlink():
            target.symlink_to((ROOT / file).readlink())
        elif (ROOT / file).is_file():
            target.write_bytes((ROOT / file).read_bytes())

    build = "from setuptools import build_meta as b; print(b.build_{}({!r}))"
    done = python(build.format("sdist", str(tmp_path)), checkout)
    assert done.returncode == 0, done.stderr
    sdist = tmp_path / done.stdout.split()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    done = python(build.format("wheel", str(tmp_path)), unpacked)
    assert done.returncode == 0, done.stderr

    want = sorted(
        (file if file.startswith("fxpar/") else f"fxpar/{file}")
        for file in source_files()
        if file.endswith(".py") and file.split("/")[0] in ("fxpar", *LINKED)
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        names = wheel.namelist()
    assert sorted(name for name in names if name.endswith(".py")) == want
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fxpar"}


def test_every_name_of_fxpar_is_found_where_it_is_said_to_be():
    import fxpar

    for name in fxpar.__all__:
        assert getattr(fxpar, name).__name__ == name and name in dir(fxpar)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fxpar.nothing  # noqa: B018
