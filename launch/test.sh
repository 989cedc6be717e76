#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments go to pytest: ./launch/test.sh -k sampler
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh
setup test
exec python -m pytest tests "$@"
