#!/bin/sh
# Tests of the SGLang plugin on a CPU, in an environment of their own that the first run builds (6 GB).
#
#   integrations/sglang/test.sh                          # everything: a quarter of an hour on one core
#   integrations/sglang/test.sh -m "not engine"          # without starting SGLang: about a minute; any of pytest's options
#   SGLANG_VERSION=0.5.22 integrations/sglang/test.sh    # another release of SGLang, in another environment
set -eu

cd "$(dirname "$0")"
version=${SGLANG_VERSION:-0.5.23}
environment=${SGLANG_ENVIRONMENT:-../../.venv-sglang-$version}

if [ ! -f "$environment/.installed" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    pip() { "$environment/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
    pip install -r requirements.txt
    pip install --no-deps "sglang==$version" -e ../.. -e . -e tests/platform
    touch "$environment/.installed"
fi

export SGLANG_PLATFORM=dspine_cpu TRITON_INTERPRET=1
exec "$environment/bin/python" -m pytest "$@"
