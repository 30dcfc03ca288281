"""fxpar: ahead-of-time automatic parallelism for PyTorch training.

The names below are looked up on first use, so that `import fxpar` (and `import fxpar.plans`) loads no torch, and
`import fxpar.runtime` loads no solver.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpar.compile import compile_model as compile_model
    from fxpar.model_source import load_model_source as load_model_source
    from fxpar.plans.errors import FxparError as FxparError
    from fxpar.runtime.model import load as load
    from fxpar.user_rules import rule as rule

_HOME_OF_NAME = {
    "FxparError": "fxpar.plans.errors",
    "compile_model": "fxpar.compile",
    "load": "fxpar.runtime.model",
    "load_model_source": "fxpar.model_source",
    "rule": "fxpar.user_rules",
}

__all__ = sorted(_HOME_OF_NAME)


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'fxpar' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF_NAME})
