# Who goes on when this job may not: itself once more, a job that waits in the queue, or a new one on other nodes.
#
# shellcheck shell=bash

hand_over() {
    local waiting
    if stalled; then
        give_up "two attempts in a row were stopped before they could save anything beyond step $(newest_checkpoint);" \
            "is the time limit shorter than the start and the signal's lead?"
    fi
    if may_requeue; then
        log "saved at step $(newest_checkpoint): requeueing"
        # Once more after an answer that got lost does no harm: the job is pending then, and Slurm ends this script.
        patiently scontrol requeue "$SLURM_JOB_ID"
        sleep 600 & # Slurm ends this script
        wait "$!" || true
        exit 0
    fi
    waiting=$(waiting_jobs)
    if [[ -n $waiting ]]; then
        log "saved at step $(newest_checkpoint): job ${waiting%%$'\n'*} goes on"
    else
        log "saved at step $(newest_checkpoint), and no job of this run is waiting: submit again to go on"
    fi
    exit 0
}

may_requeue() { # also if Slurm does not say: then the job can but try
    [[ $(patiently scontrol show job "$SLURM_JOB_ID" --oneliner) != *' Requeue=0 '* ]]
}

waiting_jobs() { # jobs that `m6 submit` or a predecessor has queued for this run
    patiently squeue --noheader --user="$(id -un)" --states=PENDING --format='%A %k' | awk -v run="$RUN_DIR" '
        { job = $1; sub(/^[^ ]+ /, "") } $0 == run { print job }' | sort -un
}

replace_nodes() { # goes on without the nodes in SICK_NODES; a running job cannot give back single nodes
    local excluded job node waiting options=()
    for node in "${SICK_NODES[@]}"; do
        echo "$node $(date +%s) $(paste -sd ';' "$M6_ATTEMPT_DIR/preflight/$node.txt")" >>"$RUN_DIR/slurm/sick_nodes.txt"
    done
    # A day later a node may have been repaired.
    excluded=$(awk -v oldest="$(($(date +%s) - 86400))" '$2 >= oldest { print $1 }' "$RUN_DIR/slurm/sick_nodes.txt" |
        sort -u | paste -sd ,)
    waiting=$(waiting_jobs)
    if [[ -n $waiting ]]; then
        for job in $waiting; do
            patiently scontrol update JobId="$job" ExcNodeList="$excluded"
        done
        log "the jobs that wait for this run leave out $excluded"
    else
        # What was given on the command line of sbatch would be lost: only the header is in the script.
        if [[ -e $RUN_DIR/slurm/sbatch_options ]]; then
            mapfile -t options <"$RUN_DIR/slurm/sbatch_options"
        else
            options=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="$RANKS_PER_NODE"
                --job-name="$SLURM_JOB_NAME" --partition="$SLURM_JOB_PARTITION")
        fi
        # If only the answer was lost, there are two: the later one waits for its turn, and finds the run over.
        job=$(patiently sbatch --parsable "${options[@]}" --dependency=singleton --comment="$RUN_DIR" --exclude="$excluded" \
            "$0" "${SCRIPT_ARGUMENTS[@]}")
        log "job $job goes on without $excluded"
    fi
    exit 0
}
