# Who goes on when this job may not: itself once more, a job that waits in the queue, or a new one on other nodes.
#
# shellcheck shell=bash

hand_over() {
    if stalled; then
        give_up "two attempts in a row were stopped before they could save anything beyond step $(newest_checkpoint);" \
            "is the time limit shorter than the start and the signal's lead?"
    fi
    if may_requeue; then
        log "saved at step $(newest_checkpoint): requeueing"
        scontrol requeue "$SLURM_JOB_ID"
        sleep 600 & # Slurm ends this script
        wait "$!" || true
    elif [[ -n $(waiting_jobs) ]]; then
        log "saved at step $(newest_checkpoint): job $(waiting_jobs | sed -n 1p) goes on"
    else
        log "saved at step $(newest_checkpoint), and no job of this run is waiting: submit again to go on"
    fi
    exit 0
}

may_requeue() { [[ $(scontrol show job "$SLURM_JOB_ID" --oneliner) == *' Requeue=1 '* ]]; }

waiting_jobs() { # jobs that `m6 submit` or a predecessor has queued for this run
    squeue --noheader --user="$(id -un)" --states=PENDING --format='%A %k' | awk -v run="$RUN_DIR" '
        { job = $1; sub(/^[^ ]+ /, "") } $0 == run { print job }' | sort -un
}

replace_nodes() { # goes on without the nodes in SICK_NODES; a running job cannot give back single nodes
    local excluded job node options=()
    for node in "${SICK_NODES[@]}"; do
        echo "$node $(date +%s) $(paste -sd ';' "$M6_ATTEMPT_DIR/preflight/$node.txt")" >>"$RUN_DIR/slurm/sick_nodes.txt"
    done
    # A day later a node may have been repaired.
    excluded=$(awk -v oldest="$(($(date +%s) - 86400))" '$2 >= oldest { print $1 }' "$RUN_DIR/slurm/sick_nodes.txt" |
        sort -u | paste -sd ,)
    if [[ -n $(waiting_jobs) ]]; then
        for job in $(waiting_jobs); do
            scontrol update JobId="$job" ExcNodeList="$excluded"
        done
        log "the jobs that wait for this run leave out $excluded"
    else
        # What was given on the command line of sbatch would be lost: only the header is in the script.
        if [[ -e $RUN_DIR/slurm/sbatch_options ]]; then
            mapfile -t options <"$RUN_DIR/slurm/sbatch_options"
        else
            options=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="$SLURM_NTASKS_PER_NODE"
                --job-name="$SLURM_JOB_NAME" --partition="$SLURM_JOB_PARTITION")
        fi
        job=$(sbatch --parsable "${options[@]}" --dependency=singleton --comment="$RUN_DIR" --exclude="$excluded" \
            "$0" "${SCRIPT_ARGUMENTS[@]}")
        log "job $job goes on without $excluded"
    fi
    exit 0
}
