# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced from the repository's root as `source tools/as_root.sh tools/X "$@"`: booting hosts takes root, so the command
# is started again by sudo, with the user's own cache.
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "$1: found user $(id -un) and no sudo, expected either; cure: run as root" >&2; exit 1; }
  exec sudo env "PATH=$PATH" "LLMFLEET_CACHE=${LLMFLEET_CACHE:-$HOME/.cache/llmfleet}" "CI=${CI:-}" "$@"
fi
