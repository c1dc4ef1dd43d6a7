#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the NVML stand-in: build.sh OUTDIR [gcc options], for example -DWITHOUT_MEMORY_V2.
# Writes OUTDIR/libnvidia-ml.so.1 by rename: a process that has the old one loaded keeps it.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 OUTDIR [gcc options]" >&2; exit 2; }
out=$1
shift
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
mkdir -p "$out"
gcc -std=gnu11 -O1 -Wall -Wextra -Werror -fPIC -shared -Wl,-soname,libnvidia-ml.so.1 "$@" \
    -o "$out/.libnvidia-ml.so.1.new" "$here/nvml_stand_in.c"
mv "$out/.libnvidia-ml.so.1.new" "$out/libnvidia-ml.so.1"
