if __name__ != "fxpar.runtime":
    raise ImportError("this folder is the package fxpar.runtime: import it by that name")
