# RUN/slurm/attempts.txt has a line for each attempt that got past preflight or was stopped in it: the newest checkpoint
# at its beginning, its number, its job, and "stopped" in the latter case. RUN/slurm/attempts/NUMBER is the attempt's folder:
# provenance, logs, evidence.
#
# shellcheck shell=bash

newest_checkpoint() { # the step of the newest complete checkpoint, 0 without one
    local manifest step newest=0
    # Of other names, such as those of copies, the trainer takes no notice either (m6/checkpoints/discovery.py).
    for manifest in "$RUN_DIR"/checkpoints/step_*/manifest.json; do
        [[ -f $manifest && ${manifest%/manifest.json} =~ /step_([0-9]{8,18})$ ]] || continue
        step=$((10#${BASH_REMATCH[1]}))
        # The trainer does not use a folder that holds the checkpoint of another step, as after cp -r or a wrong mv.
        if ((step > newest)) && grep -qE "\"step\": *$step([^0-9.]|\$)" "$manifest"; then newest=$step; fi
    done
    echo "$newest"
}

# Whether two attempts in a row got past preflight and ended without a checkpoint beyond the newest so far, or the last two
# were stopped in preflight. One that was stopped may have had bad luck, and is no reason to give up after one that failed.
# A checkpoint that was set aside and written again is no progress: else an attempt that damages it would never be the last.
stalled() {
    cat "$RUN_DIR/slurm/attempts.txt" 2>/dev/null | awk -v newest="$(newest_checkpoint)" '
        BEGIN { best = -1 }
        $1 == "-" { best = -1; started = stopped = 0; next }
        $1 + 0 > best { best = $1 + 0; started = stopped = 0 }
        $4 == "stopped" { stopped++; next }
        { started++; stopped = 0 }
        END { exit !(newest + 0 <= best && (started >= 2 || stopped >= 2)) }'
}

give_up() { # give_up REASON...
    log "giving up: $*"
    printf '%s\n' "$*" >"$RUN_DIR/.FATAL.$SLURM_JOB_ID"
    mv "$RUN_DIR/.FATAL.$SLURM_JOB_ID" "$RUN_DIR/FATAL"
    echo "- gave up" >>"$RUN_DIR/slurm/attempts.txt" # whoever removes FATAL starts to count anew
    exit 1
}

check_only_job() { # two jobs in one folder would overwrite each other
    local owner state waited=0
    owner=$(cat "$RUN_DIR/slurm/job" 2>/dev/null || true)
    if [[ -n $owner && $owner != "$SLURM_JOB_ID" ]]; then
        # A job that is over stays "completing" while one of its nodes cannot end a process or an epilog. Then its
        # successor has begun on other nodes, and is the only one that can go on. The run's lock keeps the two apart.
        while state=$(state_of "$owner") && [[ $state == COMPLETING && -z $STOP_ASKED ]] &&
            ((waited < COMPLETING_TIMEOUT_S)); do
            ((waited)) || log "job $owner, which had the run before, is completing: waiting"
            sleep "$WATCH_INTERVAL_S"
            waited=$((waited + WATCH_INTERVAL_S))
        done
        if [[ $state == RUNNING || $state == SUSPENDED ]]; then
            log "job $owner is training in $RUN_DIR"
            exit 1
        fi
    fi
    echo "$SLURM_JOB_ID" >"$RUN_DIR/slurm/job"
}

state_of() { # of a job that has nodes; nothing of any other. squeue --jobs fails for one that Slurm has forgotten
    patiently squeue --noheader --states=RUNNING,SUSPENDED,COMPLETING --format='%A %T' |
        awk -v job="$1" '$1 == job { print $2 }'
}

open_attempt() { # the next attempt's folder, and what it runs on and with
    local last
    last=$(newest_attempt)
    ATTEMPT=$(printf '%04d' $((10#${last:-0} + 1)))
    M6_ATTEMPT_DIR=$RUN_DIR/slurm/attempts/$ATTEMPT
    MASTER_PORT=$(free_port)
    export MASTER_PORT M6_ATTEMPT_DIR TORCH_FR_DUMP_TEMP_FILE=$M6_ATTEMPT_DIR/nccl_timeout_ NCCL_DEBUG_FILE=${M6_ATTEMPT_DIR//%/%%}/nccl.%h.%p.log
    mkdir "$M6_ATTEMPT_DIR"
    log "attempt $ATTEMPT on $SLURM_JOB_NODELIST, $RANKS_PER_NODE ranks each, from step $(newest_checkpoint), config $CONFIG"
    # Patiently, for while the controller is away preflight's srun would fail as if every node were sick.
    patiently scontrol show job "$SLURM_JOB_ID" >"$M6_ATTEMPT_DIR/job.txt" || true
    cp "$0" "$M6_ATTEMPT_DIR/script.sh"
    cp "$CONFIG" "$M6_ATTEMPT_DIR/config.json"
    packages >"$M6_ATTEMPT_DIR/packages.txt" & # takes a second, and nobody waits for it
}

packages() { # without what names a user in an address, and without its query: either may be a token
    python -m pip freeze 2>/dev/null | sed -E 's#(://)[^/@[:space:]]*@#\1#g; s#(://[^?[:space:]]*)\?[^\#[:space:]]*#\1#g'
}

record_attempt() { echo "$(newest_checkpoint) $ATTEMPT $SLURM_JOB_ID${STOP_ASKED:+ stopped}" >>"$RUN_DIR/slurm/attempts.txt"; }

newest_attempt() { # its number; nothing before the first
    find "$RUN_DIR/slurm/attempts" -mindepth 1 -maxdepth 1 -regextype posix-extended -regex '.*/[0-9]{4,9}' -printf '%f\n' |
        sort -n | tail -n 1
}

# A port at which nobody listens on this node, which is that of rank 0. Until rank 0 takes it, another job on the node may
# look for one: jobs with ids less than 100 apart begin to look at different ports in all of their first 50 attempts, and so
# does an attempt after the one before it, of which something may be left. Linux gives none of these ports to connections.
free_port() {
    local first=$(((SLURM_JOB_ID + 7888 * 10#$ATTEMPT) % 12763))
    python - "$first" <<'END' || echo $((20000 + first))
import socket, sys
family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
for number in range(12763):
    port = 20000 + (int(sys.argv[1]) + number) % 12763
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except OSError:
        continue
    print(port)
    break
else:
    sys.exit(1)
END
}

describe_failure() { describe_ranks last_words; } # as far as the rank that failed can be told from the others

# What one rank said: its own error, else one that may be of a lost connection, else where a rank was that did not wait.
likely_cause() {
    describe_failure | sed 's/^ *[0-9]* *//' | awk '
        /: error: / { own = own ? own : $0 }
        /[Ee]rror/ { any = any ? any : $0 }
        /: last stack: / && !/, waits for other ranks$/ { behind = behind ? behind : $0 }
        END { print own ? own : any ? any : behind }' || true
}

# describe_ranks WORDS: what WORDS says of the ranks' logs, of how many it says the same, and one of them; eight lines at most.
# It never fails, for neither the job nor the watchdog may end by it. `head` would leave `sort` writing to nobody.
describe_ranks() {
    local rank_log place words
    for rank_log in "$RUN_DIR/slurm/attempts/$(newest_attempt)"/rank_*.log; do
        words=$("$1" "$rank_log" | tr '\t' ' ')
        # The stages of a rank, which it says at the start of a run with a pipeline.
        place=$(sed -n 's/^place: rank [0-9]*, \(.*\)/ (\1)/p' "$rank_log" 2>/dev/null | tail -n 1 || true)
        [[ -z $words ]] || printf '%s%s\t%s\n' "${rank_log##*/}" "$place" "$words"
    done | awk -F '\t' '!count[$2]++ { first[$2] = $1 }
        END { for (words in count) printf "%7d     %s: %s\n", count[words], first[words], words }' | sort -k 2 |
        awk 'NR <= 8' || true
}

last_words() { # of a rank that was ended where it had just told its stacks: where that was
    local words
    words=$(grep -Ev '^ *$|slurmstepd' "$1" 2>/dev/null | tail -n 1 | cut -c 1-300 || true)
    [[ ! $words =~ ^\ \ File\ .*,\ line\ [0-9]+\ in\  ]] || words="last stack: $(position "$1")"
    echo "$words"
}

# The innermost line of the project in the newest stack of a rank's main thread, which is the last of its threads; and whether
# the rank waits there for other ranks: in torch.distributed, or in a wait of our own. The stopwatch of such waits
# (m6/training/reporting/ranks.py) is not where it stands.
position() {
    awk -v root="$M6_ROOT/" '/most recent call first/ { told = innermost = 1; found = waits = ""; next }
        innermost && /\/reporting\/ranks\.py", line [0-9]+ in (<lambda>|_?timed)$/ { waits = 1; next }
        innermost && waits { innermost = 0 }
        innermost { waits = /\/torch\/distributed\// || (index($0, root) && / in _?(wait|exchange)/); innermost = 0 }
        told && found == "" && (start = index($0, root "m6/")) { found = substr($0, start + length(root)) }
        END { sub("\", line ", ":", found)
            print !told ? "told no stacks" : (found == "" ? "not in m6" : found) (waits ? ", waits for other ranks" : "") }' "$1" || true
}
