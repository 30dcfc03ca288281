if __name__ != "fxpar.runtime.rewrite":
    raise ImportError("this folder is the package fxpar.runtime.rewrite: import it by that name")
