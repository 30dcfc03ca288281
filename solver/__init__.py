"""The numeric solver: numbers in, choices and a proven bound out. Knows no tensor, op or mesh."""

if __name__ != "fxpar.solver":
    raise ImportError("this folder is the package fxpar.solver: import it by that name")
