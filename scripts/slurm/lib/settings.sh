# What a site may set (see cluster.env.example), and what the trainer finds in its environment.
#
# shellcheck shell=bash disable=SC2034  # the other parts read them

find_config() { # CONFIG is a file, or the name of a shipped one
    local shipped
    [[ ! -f $CONFIG ]] || return 0
    for shipped in "$M6_ROOT"/m6/configs/{,papers/,finetune/,parallel/}"$CONFIG.json"; do
        if [[ $CONFIG != */* && -f $shipped ]]; then
            CONFIG=$shipped
            return 0
        fi
    done
    log "error: $CONFIG: no such file, and no shipped configuration"
    exit 2
}

settings() {
    SRUN_OPTIONS=()
    START_TIMEOUT_S=1800 STEP_TIMEOUT_S=900 COMPLETING_TIMEOUT_S=600 WATCH_INTERVAL_S=15 EVIDENCE_S=5
    MIN_DISK_GB=1 MIN_INODES=1000
    export PREFLIGHT_TIMEOUT_S=300
    MASTER_ADDR=$(patiently scontrol show node "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)" --oneliner |
        sed 's/.* NodeAddr=\([^ ]*\).*/\1/')
    local site=${M6_CLUSTER_ENV:-$M6_ROOT/scripts/slurm/cluster.env} name
    [[ -d $SLURM_SUBMIT_DIR/.venv ]] && PATH=$SLURM_SUBMIT_DIR/.venv/bin:$PATH
    if [[ -e $site ]]; then
        # shellcheck source=scripts/slurm/cluster.env.example
        source "$site"
    fi
    name=${CONFIG##*/}
    RUN_DIR=${RUN_DIR:-runs/${name%.json}}
    mkdir -p "$RUN_DIR/slurm/attempts"
    RUN_DIR=$(cd "$RUN_DIR" && pwd)
    # Else `python -m` looks in the working folder first, which may be the checkout that M6_ROOT is a copy of.
    export RUN_DIR PYTHONPATH="$M6_ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

    export MASTER_ADDR

    RANKS_PER_NODE=${M6_RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))}}
    # A job of any number of nodes asks for one task on each.
    if [[ -n ${M6_RANKS_PER_NODE:-} && -z ${SLURM_NTASKS_PER_NODE:-} && -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        SLURM_CPUS_PER_TASK=$((SLURM_CPUS_PER_TASK / RANKS_PER_NODE))
    fi
    # srun stopped taking this over from the job in Slurm 22.05.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false PYTHONFAULTHANDLER=1
    # A collective that fails ends its rank; the flight recorder keeps the last ones.
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=3 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=20000
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    ulimit -c 0
    ulimit -l unlimited 2>/dev/null || true # pinned memory
}
