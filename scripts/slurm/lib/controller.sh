# Slurm's controller may be away for a moment, while it is restarted or busy. No run ends by that.
#
# shellcheck shell=bash

patiently() { # patiently COMMAND...: again for four minutes until it works; after that it fails with the command's code
    local pause
    for pause in 5 10 20 40 60 60 60; do
        if "$@"; then
            return
        fi
        log "failed, again in $pause s: $*" >&2 # what goes to stdout may be read as the command's answer
        sleep "$pause"
    done
    "$@"
}
