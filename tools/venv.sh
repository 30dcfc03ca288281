# To be sourced by the scripts beside it: changes to the root of the repository and sets `python` to the interpreter of
# .venv, which is made where it is missing and left alone as long as pyproject.toml and constraints.txt stay the same.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/installed-for
python=.venv/bin/python
want=$({ pwd -P; cat pyproject.toml constraints.txt; } | sha256sum)

[ -x "$python" ] || "${PYTHON:-python3}" -m venv .venv
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    # torch goes first and pinned: left to pip's free choice it may become a CUDA build of several GB.
    "$python" -m pip install -qq "$(grep '^torch==' constraints.txt)" -c constraints.txt
    "$python" -m pip install -qq -c constraints.txt -e '.[dev,hf]'
    echo "$want" > "$stamp"
fi

export OMP_NUM_THREADS=1
