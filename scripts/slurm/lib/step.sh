# One step of srun: every rank, until all have ended.
#
# shellcheck shell=bash

run_step() { # run_step COMMAND...
    REPEATER=
    STEP_STARTED=$(uptime_s)
    [[ -z $STOP_ASKED ]] || return 0
    # In the background, for a trap would not run while srun is in the foreground. In --output, %% stands for a percent sign.
    srun --nodes="$STEP_NODES" --ntasks="$((STEP_NODES * RANKS_PER_NODE))" \
        --ntasks-per-node="$RANKS_PER_NODE" --kill-on-bad-exit=1 --wait=60 --output="${M6_ATTEMPT_DIR//%/%%}/rank_%5t.log" \
        "${SRUN_OPTIONS[@]}" bash "$M6_ROOT/scripts/slurm/lib/rank.sh" "$@" &
    STEP_PID=$!
    pass_on_stop # one that came before the line above
    watch_step &
    local watchdog=$! growth
    watch_growth &
    growth=$!
    while kill -0 "$STEP_PID" 2>/dev/null; do # `wait` returns whenever a trap has run
        wait "$STEP_PID" || true
    done
    STEP_PID=
    kill "$watchdog" "$growth" $REPEATER 2>/dev/null || true
    log "the step has ended at step $(newest_checkpoint) (newest checkpoint), after $(($(uptime_s) - STEP_STARTED)) s"
}

pass_on_stop() { # srun hands the signal to every rank; repeated, since a rank that is starting ignores it
    [[ -n $STOP_ASKED && -n $STEP_PID && -z $REPEATER ]] || return 0
    log "asking all ranks to save and end"
    while kill -s "$STOP_SIGNAL" "$STEP_PID" 2>/dev/null; do sleep 2; done &
    REPEATER=$!
}
