"""The same request gives the same bytes, whatever the process, the processor's features, or the number of cores.

    pytest tests/test_determinism.py -m slow
"""

import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

MODELS = ("encoder.py", "llama.py")


def numpy_features() -> str:
    """The features of this processor that numpy can be told not to use."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # no public name

    return " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])


VARIANTS = {
    "hash seed": {"PYTHONHASHSEED": "1"},
    "another hash seed": {"PYTHONHASHSEED": "4242"},
    "plain loops in numpy": {"NPY_DISABLE_CPU_FEATURES": numpy_features()},
    "another BLAS kernel": {"OPENBLAS_CORETYPE": "Haswell"},
    "threads": {"OMP_NUM_THREADS": "2"},
}


@cache
def digest(folder, repository, model: str, prefix: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> str:
    """sha256 of the plan that a process of its own compiles."""
    path = folder / "plan.msgpack"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "NPY_DISABLE_CPU_FEATURES")}
    environment |= {"PYTHONPATH": str(repository), **dict(variables)}
    subprocess.run(
        [*prefix, sys.executable, "-m", "fxpar", "compile", str(repository / "tests" / "models" / model), "-o",
         str(path), "--cluster", "1x4:a100", "--mesh", "2x2"],
        env=environment, check=True, capture_output=True, text=True, timeout=1200,
    )
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", [*VARIANTS, "one core"])
def test_the_plan_is_the_same_file(model, variant, folder, repository):
    prefix: tuple[str, ...] = ()
    if variant == "one core":
        if shutil.which("taskset") is None:
            pytest.skip("no taskset here")
        prefix = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    variables = tuple(VARIANTS.get(variant, {}).items())
    assert digest(folder, repository, model, prefix, variables) == digest(folder, repository, model, (), ())


def test_numpy_gives_the_same_bounds_without_its_processor_features():
    """The quick part: message passing, on the solver's own test problem, in a process with plain loops."""
    code = (
        "from dataclasses import replace\n"
        "from fxpar.solver.prove import prove\n"
        "from tests.solver.layered import layered\n"
        "from fractions import Fraction\n"
        "proof, bound = prove(replace(layered(4, axes=2), budget=1000), Fraction(1, 3))\n"
        "print(bound, hash(proof.payments))"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    printed = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root, **variables}, check=True,
                       capture_output=True, text=True, timeout=250).stdout
        for variables in ({}, {"NPY_DISABLE_CPU_FEATURES": numpy_features()})
    }
    assert len(printed) == 1 and np.int64(printed.pop().split()[0]) > 0
