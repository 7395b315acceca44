# Before every attempt: is there room for checkpoints, and is every node fit? A report per node goes to the
# attempt's folder; its first line is "ok", or each line says what is wrong.
#
# shellcheck shell=bash

preflight() { # preflight [OPTIONS OF m6 pretrain]: fails if nodes are sick; SICK_NODES names them
    SICK_NODES=()
    check_disk
    local reports=$M6_ATTEMPT_DIR/preflight node
    mkdir "$reports"
    date +%s >"$reports/clock"
    on_every_node python -m m6.slurm.preflight "$CONFIG" "$@" "$reports"
    [[ -z $STOP_ASKED ]] || return 0
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        if [[ ! -e $reports/$node.txt ]]; then
            echo "no report within ${PREFLIGHT_TIMEOUT_S} s" >"$reports/$node.txt"
        fi
    done
    find_unmounted "$reports"
    if ((${SLURM_GPUS_ON_NODE:-0} > 0)) && [[ $(cat "$reports"/*.txt | sort -u) == ok ]]; then
        sniff "$reports"
    fi
    [[ -z $STOP_ASKED ]] || return 0
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        [[ $(head -n 1 "$reports/$node.txt") == ok ]] || SICK_NODES+=("$node")
    done
    for node in "${SICK_NODES[@]}"; do
        log "preflight: $node: $(paste -sd ';' "$reports/$node.txt")"
    done
    if ((${#SICK_NODES[@]} == SLURM_NNODES && SLURM_NNODES > 1)); then
        give_up "preflight found every node sick, which is no matter of the nodes; see $reports"
    fi
    ((${#SICK_NODES[@]} == 0))
}

find_unmounted() { # find_unmounted REPORTS: blames nodes that lack a folder of the run which most nodes see
    local reports=$1 path node lacking
    while IFS= read -r path; do
        lacking=()
        for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
            grep -qsFx -- "$path" "$reports/$node.seen" || lacking+=("$node")
        done
        # Where half of the nodes lack it, it is a mistake of the configuration, which the training names.
        ((2 * ${#lacking[@]} < SLURM_NNODES)) || continue
        for node in "${lacking[@]}"; do
            [[ $(head -n 1 "$reports/$node.txt") != ok ]] || : >"$reports/$node.txt"
            echo "$path is not there, as it is on other nodes" >>"$reports/$node.txt"
        done
    done < <(cat "$reports"/*.seen 2>/dev/null | sort -u)
}

sniff() { # sniff REPORTS: compares the nodes' GPUs and links
    local reports=$1 node try
    for try in 1 2; do
        mkdir -p "$reports/products"
        rm -f "$reports/products"/*
        # A rank that fails ends no other, which may need longer for the file that clears its GPU.
        on_every_rank --kill-on-bad-exit=0 python -m m6.slurm.sniff "$reports"
        [[ ! -e $reports/sniffed && -z $STOP_ASKED ]] || return 0
        # All ranks wait for the one that does not come. A rank whose own GPU works has left a file before it waits.
        if (($(find "$reports/products" -type f | wc -l) > 0)); then
            for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
                if (($(find "$reports/products" -name "$node.*" | wc -l) < RANKS_PER_NODE)); then
                    echo "a rank did not come through the matrix product, see the job's log" >"$reports/$node.txt"
                fi
            done
            [[ $(cat "$reports"/*.txt | sort -u) == ok ]] || return 0
        fi
        log "preflight: the sniff test did not end (try $try of 2)"
    done
    tee "$reports"/*.txt >/dev/null <<<"the sniff test did not end within $PREFLIGHT_TIMEOUT_S s, twice, see the job's log"
}

check_disk() {
    local free_gb free_inodes
    free_gb=$(df --output=avail -BG "$RUN_DIR" | tail -n 1 | tr -dc '0-9')
    free_inodes=$(df --output=iavail "$RUN_DIR" | tail -n 1 | tr -dc '0-9') # empty where there is no such number
    ((free_gb >= MIN_DISK_GB)) || give_up "$RUN_DIR: $free_gb GiB of disk are left, $MIN_DISK_GB are asked for"
    ((${free_inodes:-0} == 0 || free_inodes >= MIN_INODES)) ||
        give_up "$RUN_DIR: $free_inodes inodes are left, $MIN_INODES are asked for"
}

# --overlap: a step that was killed keeps its part of a node until its last process has gone, which may never be.
on_every_node() { bounded srun --overlap --ntasks="$SLURM_NNODES" --ntasks-per-node=1 "${SRUN_OPTIONS[@]}" "$@"; }

on_every_rank() { bounded srun --overlap --ntasks="$((SLURM_NNODES * RANKS_PER_NODE))" --ntasks-per-node="$RANKS_PER_NODE" "${SRUN_OPTIONS[@]}" "$@"; }

bounded() { # ends with the command, at its time limit, or when Slurm asks to stop
    [[ -z $STOP_ASKED ]] || return 0 # `timeout` can leave its command behind if a signal meets its first instructions
    timeout --kill-after=10 "$PREFLIGHT_TIMEOUT_S" "$@" &
    CHECK_PID=$!
    end_check # a stop that came before the line above
    while kill -0 "$CHECK_PID" 2>/dev/null; do # `wait` returns whenever a trap has run
        wait "$CHECK_PID" || true
    done
    CHECK_PID=
}

end_check() { [[ -z $STOP_ASKED || -z $CHECK_PID ]] || kill "$CHECK_PID" 2>/dev/null || true; }
