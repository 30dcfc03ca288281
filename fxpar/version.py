"""The version of this fxpar, as the package metadata and the plans it writes state it."""

VERSION = "0.1.0"
