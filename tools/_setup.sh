# Sourced by tools/test and tools/demo: makes the virtual environment once, and leaves its Python in $python.
#
#   setup EXTRA     install this checkout with the extra `plot` or `dev`, at the versions of constraints.txt
#
# SWAPIO_VENV     where the environment is made (default: .venv in the checkout)
# SWAPIO_PYTHON   the Python to make it from (default: the first of python3.11, python3.12, ... that is 3.11 or newer)

find_python() {
    local candidate
    for candidate in ${SWAPIO_PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 /usr/bin/python3}; do
        # a name on the PATH may be a stub that cannot run, and Debian's Python may come without ensurepip
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "swapio needs Python 3.11 or newer with the modules venv and ensurepip (Debian, Ubuntu: apt-get install python3 python3-venv);" >&2
    echo "none of these works: ${SWAPIO_PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}. Set SWAPIO_PYTHON to one that does." >&2
    return 1
}

setup() {
    local extra=$1 venv want found quiet=-q
    venv=$(realpath -ms "${SWAPIO_VENV:-$root/.venv}")
    python=$venv/bin/python
    want=$(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/tools/_setup.sh" | sha256sum)
    want="${want%% *} $root ${SWAPIO_PYTHON:-}"
    # dev holds all of plot, so either stamp will do for plot
    for found in "$venv/installed-$extra" "$venv/installed-dev"; do
        if [ -x "$python" ] && [ "$(cat "$found" 2>/dev/null)" = "$want" ]; then return; fi
    done
    exec 9<"$root/pyproject.toml"
    if command -v flock >/dev/null; then flock 9; fi # two first calls at once must not install into each other
    if [ "$(cat "$venv/installed-$extra" 2>/dev/null)" != "$want" ]; then
        echo "== set-up: swapio[$extra] into $venv (once; PyTorch is large, so this takes minutes)"
        if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
            echo "$venv exists and is not a virtual environment; set SWAPIO_VENV to another place" >&2
            return 1
        fi
        found=$(find_python)
        rm -f "$venv"/installed-*
        "$found" -m venv --clear "$venv"
        if [ -t 1 ]; then quiet=; fi
        "$python" -m pip install $quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root[$extra]"
        echo "$want" >"$venv/installed-$extra"
    fi
    exec 9<&-
}
