# The layout of an attempt. A run with m6.elastic plans it for the nodes that passed preflight, and may leave some idle.
#   RUN/slurm/growth  a line, the number of nodes, for each time that this job asked for more and began again with as many
#
# shellcheck shell=bash disable=SC2034  # the other parts read them

# choose_layout FAILED [OPTIONS OF m6 pretrain]: FAILED is --failed after an attempt that failed, else empty.
# Returns 1 after an error that another attempt may not meet.
choose_layout() {
    local options=(${1:+"$1"}) chosen settings line
    shift
    STEP_NODES=$SLURM_JOB_NUM_NODES GROW_AT=0 LAYOUT_OPTIONS=()
    [[ -z $STOP_ASKED ]] || return 0
    # A quick look, which spares other runs the seconds of the command; it knows better.
    grep -q '"elastic"' "$CONFIG" || [[ " $*" == *[" ="]m6.elastic* ]] || return 0
    while (($#)); do # what matters for the layout
        case $1 in
        --set | --init | --profile) options+=("${@:1:2}") ;;
        --set=* | --init=* | --profile=*) options+=("$1") ;;
        esac
        shift
    done
    if ! chosen=$(python -m m6 plan replan "$CONFIG" --run-dir "$RUN_DIR" --nodes "$SLURM_JOB_NUM_NODES" \
        --ranks-per-node "$RANKS_PER_NODE" --out "$M6_ATTEMPT_DIR/layout" "${options[@]+"${options[@]}"}" 2>&1); then
        [[ ! -e $M6_ATTEMPT_DIR/mistake ]] || give_up "no layout: ${chosen##*error: }"
        log "no layout: $chosen"
        return 1
    fi
    [[ -s $M6_ATTEMPT_DIR/layout ]] || return 0
    log "layout: $chosen"
    mapfile -t settings <"$M6_ATTEMPT_DIR/layout"
    STEP_NODES=${settings[0]} GROW_AT=${settings[1]} GROW_AFTER_S=${settings[2]}
    for line in "${settings[@]:3}"; do
        LAYOUT_OPTIONS+=(--set "$line")
    done
}

watch_growth() { # asks the job to stop, as before its time limit, when enough nodes for a faster layout have been idle
    local now idle since=0 patience asked=$RUN_DIR/slurm/growth
    # A job of a chain may not be requeued: it would leave the rest of its time to no one.
    if ((GROW_AT == 0)) || ! may_requeue; then
        return 0
    fi
    # What is idle may be kept for others: after each time that asking was no use, the job waits twice as long.
    [[ $(tail -n 1 "$asked" 2>/dev/null) == "$SLURM_JOB_NUM_NODES" ]] || rm -f "$asked"
    patience=$((GROW_AFTER_S << $(wc -l < <(cat "$asked" 2>/dev/null))))
    while sleep "$WATCH_INTERVAL_S" && kill -0 "$STEP_PID" 2>/dev/null; do
        now=$(uptime_s)
        idle=$(idle_nodes) || continue # Slurm's controller is busy
        if ((SLURM_JOB_NUM_NODES + idle < GROW_AT)); then
            since=0
        elif ((since == 0)); then
            since=$now
        elif ((now - since >= patience)); then
            log "$idle nodes have been idle for $((now - since)) s: $GROW_AT would be faster than $STEP_NODES"
            echo "$SLURM_JOB_NUM_NODES" >>"$asked"
            kill -s "$STOP_SIGNAL" $$
            return
        fi
    done
}

# The number of idle nodes of the partition that this job may have: with the features it asks for, and not excluded.
idle_nodes() {
    local job features excluded
    job=$(scontrol show job "$SLURM_JOB_ID" --oneliner)
    features=$(sed -n 's/.* Features=\([^ ]*\) .*/\1/p' <<<"$job")
    excluded=$(sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p' <<<"$job")
    [[ $features != "(null)" ]] || features=
    [[ $excluded == "(null)" || -z $excluded ]] || excluded=$(scontrol show hostnames "$excluded" | paste -sd ,)
    # Of other expressions than A and A&B no node is counted.
    sinfo --Node --noheader --partition="$SLURM_JOB_PARTITION" --states=idle --format='%N %f' | sort -u |
        awk -v features="$features" -v excluded=",$excluded," '
            { has = 1; for (n = split(features, wanted, "&"); n > 0; n--) has = has && index("," $2 ",", "," wanted[n] ",") }
            has && !index(excluded, "," $1 ",") { count++ }
            END { print count + 0 }'
}
