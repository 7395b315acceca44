# The layout of an attempt. A run with m6.elastic plans it for the nodes that passed preflight, and may leave some idle.
#
# shellcheck shell=bash disable=SC2034  # the other parts read them

choose_layout() { # choose_layout FAILED [OPTIONS OF m6 pretrain]: FAILED is --failed after an attempt that failed, else empty
    local options=(${1:+"$1"}) chosen settings line
    shift
    STEP_NODES=$SLURM_JOB_NUM_NODES GROW_AT=0 LAYOUT_OPTIONS=()
    [[ -z $STOP_ASKED ]] || return 0
    grep -q '"elastic"' "$CONFIG" || return 0
    while (($#)); do # what matters for the layout
        [[ $1 != --set && $1 != --init && $1 != --profile ]] || options+=("$1" "$2")
        shift
    done
    if ! chosen=$(python -m m6 plan replan "$CONFIG" --run-dir "$RUN_DIR" --nodes "$SLURM_JOB_NUM_NODES" \
        --ranks-per-node "$RANKS_PER_NODE" --out "$M6_ATTEMPT_DIR/layout" "${options[@]+"${options[@]}"}" 2>&1); then
        give_up "no layout: ${chosen##*error: }"
    fi
    log "layout: $chosen"
    mapfile -t settings <"$M6_ATTEMPT_DIR/layout"
    STEP_NODES=${settings[0]} GROW_AT=${settings[1]} GROW_AFTER_S=${settings[2]}
    for line in "${settings[@]:3}"; do
        LAYOUT_OPTIONS+=(--set "$line")
    done
}

watch_growth() { # asks the job to stop, as before its time limit, when enough nodes for a faster layout have been idle
    local now idle since=0
    while ((GROW_AT)) && sleep "$WATCH_INTERVAL_S" && kill -0 "$STEP_PID" 2>/dev/null; do
        now=$(date +%s)
        idle=$(sinfo --noheader --partition="$SLURM_JOB_PARTITION" --states=idle --format=%D | awk '{ n += $1 } END { print n + 0 }')
        if ((SLURM_JOB_NUM_NODES + idle < GROW_AT)); then
            since=0
        elif ((since == 0)); then
            since=$now
        elif ((now - since >= GROW_AFTER_S)); then
            log "$idle nodes have been idle for $((now - since)) s: $GROW_AT would be faster than $STEP_NODES"
            kill -s "$STOP_SIGNAL" $$
            return
        fi
    done
}
