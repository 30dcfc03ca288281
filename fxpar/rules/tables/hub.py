"""The identity in front of several readers."""

from fxpar.rules.ops import hub
from fxpar.rules.registry import rule

__all__ = ["hub"]

rule("fxpar::hub", "... -> ...", linear=("0",))
