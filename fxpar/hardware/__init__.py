"""Cluster presets, one TOML a machine, read by `fxpar.cost.cluster`. Every number has its source beside it."""
