# Ends a step that stands still, once its ranks have told where they stand.
#
# shellcheck shell=bash

watch_step() {
    local now last loading age limit
    while sleep "$WATCH_INTERVAL_S" && kill -0 "$STEP_PID" 2>/dev/null; do
        now=$(date +%s)
        last=$(written "$RUN_DIR/progress") loading=$(written "$RUN_DIR/loading") limit=$STEP_TIMEOUT_S
        if ((last < STEP_STARTED)); then # no step since this attempt began: it loads, resumes and compiles
            last=$STEP_STARTED limit=$START_TIMEOUT_S
        fi
        # A checkpoint of terabytes takes longer to read than any limit. It is renewed with each part that was read.
        age=$((now - (loading > last ? loading : last)))
        if ((age > limit)); then
            log "watchdog: no step for $age s, the limit is $limit s"
            end_with_evidence
            return
        fi
    done
}

written() { stat --format=%Y "$1" 2>/dev/null || echo 0; } # when a file was last written, in seconds

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
