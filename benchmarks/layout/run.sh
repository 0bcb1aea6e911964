#!/bin/sh
# Build and run the measurement; any argument is the number of matrices in the pool (4.1 MB each).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
"${CC:-gcc}" -std=gnu11 -O3 -march=native -Wall -Wextra -Werror "$here/layout.c" -o "$build/layout" -lm
"$build/layout" "$@"
