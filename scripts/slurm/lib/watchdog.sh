# Ends a step that stands still, once its ranks have told where they stand.
#
# shellcheck shell=bash

# Only changes of the files count, by this node's own measure of time: the file server writes their times by a clock of its
# own, and any clock may be set while a step runs.
watch_step() {
    local now mark age progress loading changed=$STEP_STARTED limit=$START_TIMEOUT_S
    progress=$(mark_of "$RUN_DIR/progress") loading=$(mark_of "$RUN_DIR/loading") # what earlier attempts left
    while sleep "$WATCH_INTERVAL_S" && kill -0 "$STEP_PID" 2>/dev/null; do
        now=$(uptime_s)
        mark=$(mark_of "$RUN_DIR/progress")
        if [[ -n $mark && $mark != "$progress" ]]; then
            progress=$mark changed=$now limit=$STEP_TIMEOUT_S # until then it loads, resumes and compiles
        fi
        # A checkpoint of terabytes takes longer to read than any limit. It is renewed with each part that was read.
        mark=$(mark_of "$RUN_DIR/loading")
        if [[ -n $mark && $mark != "$loading" ]]; then
            loading=$mark changed=$now
        fi
        age=$((now - changed))
        if ((age > limit)); then
            log "watchdog: no step for $age s, the limit is $limit s"
            end_with_evidence
            return
        fi
    done
}

mark_of() { # differs after each write of a file; empty while it cannot be read
    local mark
    mark=$(stat --format='%i %y' "$1" 2>/dev/null && cat "$1" 2>/dev/null) && echo "$mark" || true
}

uptime_s() { # seconds since this node's start, which no change of its clock moves
    local uptime
    read -r uptime _ </proc/uptime
    echo "${uptime%.*}"
}

end_with_evidence() { # stacks go to the ranks' logs, the flight recorder's files to the attempt's folder
    local step
    step=$(cat "$M6_ATTEMPT_DIR/step" 2>/dev/null || true)
    if [[ -n $step ]]; then
        scancel --signal=QUIT "$step" || true
        sleep "$EVIDENCE_S"
        # A rank that was stopped answers only when it goes on. By then the others, which go on with it, have told
        # where they stood.
        scancel --signal=CONT "$step" || true
        sleep "$EVIDENCE_S"
        log "watchdog: stacks of $(grep -l 'most recent call first' "$M6_ATTEMPT_DIR"/rank_*.log | wc -l) of" \
            "$((STEP_NODES * RANKS_PER_NODE)) ranks in $M6_ATTEMPT_DIR; number of ranks, one of them and where it stands:"
        describe_ranks position
        scancel --signal=KILL "$step" || true
        sleep 10
    fi
    kill -KILL "$STEP_PID" 2>/dev/null || true # srun itself may be what hangs
}
