"""A process that serves one command keeps what it frees; one that calls the command line as a function does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import resource, sys
import numpy as np
from fxpar.cli.main import main
from fxpar.cli.short_lived import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
elif sys.argv[1] == "called":
    assert main(["show", "nowhere.plan"]) == 1

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

np.ones(8 << 20)
before = faults()
for _ in range(20):
    np.ones(8 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
@pytest.mark.parametrize(("how", "kept"), [("kept", True), ("called", False)])
def test_freed_arrays_are_taken_again(how, kept):
    done = subprocess.run([sys.executable, "-c", PROBE, how], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pages = (8 << 20) * 8 // 4096
    # with huge pages one fault brings 512 pages
    assert (int(done.stdout) < pages // 512) == kept
