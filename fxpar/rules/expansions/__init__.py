"""What runs in place of a call where a local call is not enough (:mod:`fxpar.rules.expansion`), by kind of op."""
