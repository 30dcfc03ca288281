"""Settings that every test shares: quiet threads, hypothesis profiles, and where test models live."""

import logging
import os
from pathlib import Path

import hypothesis
import pytest

# Read by torch and OpenMP when they load, in this process and in every rank a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# dynamo logs thousands of structured records a trace; pytest would render and keep each of them
logging.getLogger("torch.__trace").propagate = False

# The machine may be busy with other runs, so a deadline per example would only measure the neighbours.
hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def model_file(tmp_path):
    """Write a model.py and return its path: `model_file("def build(): ...")`."""

    def write(source: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write
