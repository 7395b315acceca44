# Ends a step that stands still, once its ranks have told where they stand.
#
# shellcheck shell=bash

watch_step() {
    local now last age limit
    while sleep "$WATCH_INTERVAL_S" && kill -0 "$STEP_PID" 2>/dev/null; do
        now=$(date +%s)
        last=$(stat --format=%Y "$RUN_DIR/progress" 2>/dev/null || echo 0)
        if ((last >= STEP_STARTED)); then
            age=$((now - last)) limit=$STEP_TIMEOUT_S
        else # no step since this attempt began: it loads, resumes and compiles
            age=$((now - STEP_STARTED)) limit=$START_TIMEOUT_S
        fi
        if ((age > limit)); then
            log "watchdog: no step for $age s, the limit is $limit s"
            end_with_evidence
            return
        fi
    done
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
