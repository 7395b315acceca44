# The body of every training job: `source` it, then `train CONFIG [OPTIONS OF m6 pretrain]`, where CONFIG is a JSON or the
# name of a shipped one, or
# `M6_COMMAND=finetune train CONFIG --init RUN [OPTIONS OF m6 finetune]`.
#
# What an attempt came to is read from files, never from exit codes: srun reports the largest code of all ranks, which
# is that of the ones it ended, and after a lost node it may report 0.
#   RUN/DONE, RUN/FATAL, RUN/STOP     finished; not worth another attempt; stopped by a person: the job ends
#   ATTEMPT/mistake                   a user's mistake, which m6 ends with: becomes RUN/FATAL
#   ATTEMPT/over                      the stage of this job is over: the job ends, and that of the next stage goes on
#   else, asked to stop by Slurm      saved: the job requeues itself, or leaves the rest to its successor
#   else                              something failed: again in the same allocation, on nodes that pass preflight
# Two attempts in a row that end without a checkpoint beyond the newest so far become RUN/FATAL. One that was stopped in
# preflight does not count among those that got further; two in a row are counted by themselves.
#
# shellcheck shell=bash

: "${M6_ROOT:=$SLURM_SUBMIT_DIR}" # $0 is a copy in a spool folder: it does not say where the repository is
export M6_ROOT

SCRIPT_ARGUMENTS=("$@")
STOP_SIGNAL=USR2 # as in the header's --signal=B:USR2@...; some versions of NCCL catch USR1
STOP_ASKED=
STEP_PID=
CHECK_PID=
REPEATER=
trap on_stop_signal "$STOP_SIGNAL" # before anything slow: a stop that comes early is remembered
trap on_term TERM

log() { printf '%(%FT%T%z)T job %s: %s\n' -1 "$SLURM_JOB_ID" "$*"; }

# shellcheck source=scripts/slurm/lib/controller.sh
source "$M6_ROOT/scripts/slurm/lib/controller.sh"
# shellcheck source=scripts/slurm/lib/settings.sh
source "$M6_ROOT/scripts/slurm/lib/settings.sh"
# shellcheck source=scripts/slurm/lib/attempts.sh
source "$M6_ROOT/scripts/slurm/lib/attempts.sh"
# shellcheck source=scripts/slurm/lib/preflight.sh
source "$M6_ROOT/scripts/slurm/lib/preflight.sh"
# shellcheck source=scripts/slurm/lib/layout.sh
source "$M6_ROOT/scripts/slurm/lib/layout.sh"
# shellcheck source=scripts/slurm/lib/step.sh
source "$M6_ROOT/scripts/slurm/lib/step.sh"
# shellcheck source=scripts/slurm/lib/watchdog.sh
source "$M6_ROOT/scripts/slurm/lib/watchdog.sh"
# shellcheck source=scripts/slurm/lib/successors.sh
source "$M6_ROOT/scripts/slurm/lib/successors.sh"

on_stop_signal() {
    [[ -n $STOP_ASKED ]] || log "asked to stop"
    STOP_ASKED=1
    pass_on_stop
    end_check
}

on_term() { # scancel, or Slurm takes the job back
    log "SIGTERM: ending"
    [[ -z $STEP_PID ]] || kill -TERM "$STEP_PID" 2>/dev/null || true
    exit 143
}

train() {
    local words failed=
    CONFIG=$1
    shift
    if [[ " $* " == *" --restart "* ]]; then
        log "error: --restart would begin again at every attempt; m6 submit --restart begins again once"
        exit 2
    fi
    find_config
    settings
    check_only_job
    while :; do
        exit_if_over
        if stalled; then
            words=$(likely_cause)
            give_up "two attempts in a row ended without a new checkpoint after step" \
                "$(newest_checkpoint)${words:+ ($words)}; see the logs of the last ones in $RUN_DIR/slurm/attempts"
        fi
        open_attempt
        if ! preflight "$@"; then
            replace_nodes
        fi
        record_attempt
        if ! choose_layout "$failed" "$@"; then
            continue
        fi
        run_step python -u -m m6 "${M6_COMMAND:-pretrain}" "$CONFIG" --run-dir "$RUN_DIR" "$@" \
            "${LAYOUT_OPTIONS[@]+"${LAYOUT_OPTIONS[@]}"}"
        failed=--failed
        exit_if_over
        if [[ -e $M6_ATTEMPT_DIR/mistake ]]; then
            give_up "$(<"$M6_ATTEMPT_DIR/mistake")"
        fi
        if [[ -e $M6_ATTEMPT_DIR/over ]]; then
            log "$(<"$M6_ATTEMPT_DIR/over")"
            echo "- stage over" >>"$RUN_DIR/slurm/attempts.txt" # the next stage starts to count anew
            exit 0
        fi
        if [[ -n $STOP_ASKED ]]; then
            hand_over
        fi
        log "the step failed; newest checkpoint: step $(newest_checkpoint)"
        describe_failure
    done
}

exit_if_over() {
    if [[ -e $RUN_DIR/DONE ]]; then
        log "finished at step $(<"$RUN_DIR/DONE"); m6 submit goes on with a run that became longer"
        exit 0
    elif [[ -e $RUN_DIR/FATAL ]]; then
        log "not worth another attempt: $(<"$RUN_DIR/FATAL")"
        exit 1
    elif [[ -e $RUN_DIR/STOP ]]; then
        log "$RUN_DIR/STOP: stopped at step $(newest_checkpoint); remove the file and submit again to go on"
        exit 0
    fi
}
