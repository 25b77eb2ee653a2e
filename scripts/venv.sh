#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make or refresh a virtual environment: scripts/venv.sh dev|gpu|bench FOLDER PYTHON
#
#   dev    the package (editable) with its developer tools
#   gpu    the package and jax's CUDA compiler, for compiling GPU programs without a GPU; its CUDA
#          libraries are left out, so it computes on the CPU only
#   bench  the package, and the peers it is timed against: PyTorch and FBGEMM's CPU kernels
#
# A stamp names the interpreter, the place and the contents of the files that decide what gets
# installed. Nothing is done while it holds; otherwise the folder is made anew.
set -eu

kind=$1 folder=$2 python=$3

command -v "$python" >/dev/null 2>&1 || {
    echo "jaxsparse needs Python >= 3.11, but '$python' is not on the PATH." >&2
    echo "Install it, or name one: make PYTHON=/path/to/python3.12 ..." >&2
    exit 1
}

# Old interpreters must be able to read this far; `_base_executable` looks through an active venv.
describe='
import sys
have = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info < (3, 11):
    sys.stderr.write(
        "jaxsparse needs Python >= 3.11, but %s is %s.\n"
        "Name a newer one: make PYTHON=/path/to/python3.12 ...\n" % (sys.executable, have))
    sys.exit(1)
import hashlib
digest = hashlib.sha256()
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        digest.update(file.read())
print(sys._base_executable)
print(sys.implementation.name, have, sys.base_prefix, digest.hexdigest())
'
described=$("$python" -c "$describe" pyproject.toml constraints.txt scripts/venv.sh) || exit 1
base=$(printf '%s\n' "$described" | sed -n 1p)
want="$kind $(pwd) $(printf '%s\n' "$described" | sed -n 2p)"
stamp=$folder/.stamp

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && [ -x "$folder/bin/python" ]; then
    exit 0
fi

echo "Setting up $folder ($kind) with $base ..." >&2
"$base" -m venv --clear "$folder"
venv_python=$folder/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=2 UV_NO_PROGRESS=1

# uv is several times faster; where it cannot be had or does not work, pip does the same.
install() {
    if [ -z "${NO_UV:-}" ] && "$venv_python" -m uv --version >/dev/null 2>&1; then
        "$venv_python" -m uv pip install --quiet --python "$venv_python" "$@" && return 0
        echo "uv failed; trying pip." >&2
    fi
    "$venv_python" -m pip install "$@"
}

if [ -z "${NO_UV:-}" ]; then
    "$venv_python" -m pip install -c constraints.txt uv || echo "No uv; using pip." >&2
fi
case $kind in
dev)
    install -c constraints.txt -e '.[dev]'
    ;;
gpu)
    install -c constraints.txt -e .
    jax_version=$("$venv_python" -c 'import importlib.metadata as m; print(m.version("jax"))')
    install --no-deps "jax-cuda13-plugin==$jax_version" "jax-cuda13-pjrt==$jax_version"
    ;;
bench)
    # By pip: uv does not read its configuration, where an index of torch's CPU builds may stand.
    "$venv_python" -m pip install -c constraints.txt -e '.[bench]'
    ;;
*)
    echo "scripts/venv.sh: the first argument must be dev, gpu or bench, got '$kind'" >&2
    exit 2
    ;;
esac
printf '%s\n' "$want" >"$stamp"
