"""Matrix products."""

from fxpar.rules.registry import rule

rule("mm", "m k, k n -> m n", linear=("0", "1"))
rule("bmm", "b m k, b k n -> b m n", linear=("0", "1"))
