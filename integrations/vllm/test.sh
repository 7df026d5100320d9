#!/bin/sh
# Sets up an environment with vLLM's CPU build (4 GB, once) and runs the plugin's tests in it; arguments go to pytest.
#   integrations/vllm/test.sh                    # everything: about ten minutes on two cores
#   integrations/vllm/test.sh -m "not engine"    # what needs no engine: seconds
# $PYTHON (3.11 or newer) builds it, $VENV is where (integrations/vllm/.venv).
set -eu
cd "$(dirname "$0")"
venv=${VENV:-.venv}
if [ ! "$venv/.installed" -nt requirements.txt ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e ../.. -e .
    touch "$venv/.installed"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$venv/bin/python" -m pytest "$@"
