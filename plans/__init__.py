if __name__ != "fxpar.plans":
    raise ImportError("this folder is the package fxpar.plans: import it by that name")
