if __name__ != "fxpar.solver":
    raise ImportError("this folder is the package fxpar.solver: import it by that name")
