# Sourced by demo.sh and test.sh: makes .venv, reuses it if it is there, and installs the package with the extras named.
#   setup EXTRAS...    e.g. setup demo test
# PYTHON chooses the interpreter (3.10 to 3.13) for a new environment.

setup() {
    local extras; extras=$(IFS=,; echo "$*")
    local stamp=".venv/.installed-$extras"
    if [ ! -x .venv/bin/python ]; then
        echo "Making .venv"
        "${PYTHON:-python3}" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
            echo "Python 3.10 to 3.13 is needed; set PYTHON to such an interpreter (found: $("${PYTHON:-python3}" --version 2>&1))" >&2
            return 1
        }
        "${PYTHON:-python3}" -m venv .venv || {
            rm -rf .venv
            echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        }
    fi
    if [ ! "$stamp" -nt setup.py ]; then
        echo "Installing vr_online[$extras] (the first time downloads torch, which takes some minutes)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
        touch "$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

# How many processes to launch: the GPUs, or two on the CPU; a power of two up to 8, which divides the demo's batch and shards.
processes() {
    python -c 'import torch; n = torch.cuda.device_count() or 2; print(max(r for r in (1, 2, 4, 8) if r <= n))'
}
