#!/usr/bin/env bash
# One start of a Slurm job: checks its nodes, runs an agent on each, saves and requeues, ends with the agents' code.
# Run: sbatch slurm/ddp.sbatch      (its last line starts this file, on the job's first node)
# Edit: nothing; the settings are environment variables, which ddp.sbatch sets.
set -uo pipefail
say() { echo "slurm: $*" >&2; }
fail() { say "$*"; exit 2; }
for name in MAX_RESTARTS MAX_REQUEUES FIRST_STEP_S; do
  [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name must be a whole number, got '${!name}'"
done
[[ $DOCTOR =~ ^(1|only|)$ ]] || fail "DOCTOR must be 1, only or empty, got $DOCTOR"
[[ -z $SCRIPT || -z $DATA$DOCTOR ]] || fail "DATA and DOCTOR are of train/main.py train, not of SCRIPT=$SCRIPT"

# The run's folder, as far as the command line names it: a file of settings is not read
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID} run_dir=runs name=slurm-$job previous=""
read -ra script <<< "$SCRIPT"
words=("$@")
[[ -z $SCRIPT ]] || words=("${script[@]}")
for word in "${words[@]}"; do
  case $previous in
    --run-dir | --run_dir) run_dir=$word ;;
    --name) name=$word ;;
  esac
  case $word in
    --run-dir=* | --run_dir=*) run_dir=${word#*=} ;;
    --name=*) name=${word#*=} ;;
  esac
  previous=$word
done
[[ $run_dir != *://* ]] || run_dir=runs
run=$run_dir/$name

# The code ------------------------------------------------------------------------------------------------------------

copy_code() { # TO: our code, and of the current folder, where it is a git checkout, what git tracks and new Python files
  local mine=$1
  [[ $PWD -ef $RANKUP ]] || mine=$1/here
  rm -rf "$1"
  mkdir -p "$mine" && cp -rp "$RANKUP"/{rankup,train,slurm} "$1" || return
  [[ ! -e $RANKUP/.venv ]] || ln -s "$RANKUP/.venv" "$1/.venv"
  if git -c safe.directory='*' rev-parse 2> /dev/null; then
    { git -c safe.directory='*' ls-files -z; git -c safe.directory='*' ls-files -zo --exclude-standard -- '*.py'; } |
      grep -zvE '(^|/)(code/slurm-|site-packages/)' | tar -c --null -T - --ignore-failed-read 2> /dev/null | tar -x -C "$mine"
  elif [[ $mine != "$1" ]]; then
    say "the code in $PWD is not kept: it is no git checkout. Each start runs it as it is then"
  fi
}
differences() { # OLD NEW: the first files that differ, on one line
  diff -rq --no-dereference -x __pycache__ "$1" "$2" | sed "s#$2#the new#g; s#$1#the old#g" | head -n 5 | paste -sd ';'
}
in_copy() { # PATH: what it is called in the copy of the current folder, or as it is where that has no such thing
  local path
  path=$(realpath -m -- "$1")
  if [[ $path/ == "$PWD"/* && -e $here${path#"$PWD"} ]]; then echo "$here${path#"$PWD"}"; else echo "$1"; fi
}
if [[ -n $KEEP_CODE && $DOCTOR != only ]]; then
  kept=$(realpath -m "$run/code/slurm-$job") last=$(find "$run/code" -maxdepth 1 -name 'slurm-*[0-9]' \
    -printf '%T@ %p\n' 2> /dev/null | sort -n | tail -n 1)
  if copy_code "$kept.new"; then
    if [[ -d $kept ]]; then
      changed=$(differences "$kept" "$kept.new")
      [[ -z $changed ]] || say "this start runs the code of the first, $kept; not what is there by now: $changed"
      rm -rf "$kept.new"
    else
      [[ -z $last ]] || changed=$(differences "$(realpath "${last#* }")" "$kept.new")
      [[ -z ${changed:-} ]] || say "the run was at last trained by ${last##*/}, with other code: $changed"
      mv "$kept.new" "$kept"
      say "every start of this job runs the code that is here now, kept in $kept"
    fi
    here=$kept
    [[ $PWD -ef $RANKUP ]] || here=$kept/here
    if [[ -n $(ls "$here") ]]; then
      for at in "${!script[@]}"; do
        [[ ${script[at]} != *.py ]] || script[at]=$(in_copy "${script[at]}")
      done
      IFS=: read -ra folders <<< "${PYTHONPATH:-}"
      for at in "${!folders[@]}"; do folders[at]=$(in_copy "${folders[at]}"); done
      PYTHONPATH=$(IFS=:; echo "${folders[*]}")
      export PYTHONPATH RANKUP_CODE=$here SCRIPT="${script[*]}"
    fi
    export RANKUP=$kept KEEP_CODE=""
    exec bash "$RANKUP/slurm/job.sh" "$@"
  fi
  say "the code can't be kept in $run/code: each start runs the checkout as it is then"
fi

# Steps ----------------------------------------------------------------------------------------------------------------

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#hosts[@]})) || fail "scontrol can't read the node list \"$SLURM_JOB_NODELIST\""
nproc=${SLURM_GPUS_ON_NODE:-${SLURM_NTASKS_PER_NODE:-1}} cpus=${SLURM_CPUS_ON_NODE:-1}
((cpus >= nproc)) || say "$nproc processes share $cpus CPUs on each node: ask for more with --cpus-per-task"
# srun would read these of the whole job, but they mean something else in a step; an address is that of an earlier job
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK=$cpus OMP_NUM_THREADS=$((cpus > nproc ? cpus / nproc : 1)) RANKUP
# The tasks end together, with one code. When one of them is lost, the others have 30 s (not so with NNODES)
each=(--nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=30)
container=()
if [[ -n $IMAGE && $IMAGE != *.sif ]]; then # an apptainer image is started by each task
  mounts=$RANKUP:$RANKUP,$PWD:$PWD${DATA:+,/tmp:/tmp}
  container=(--container-image="$IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
fi

step="" code=0 stopping="" ending="" restarts=${SLURM_RESTART_COUNT:-0}
# shellcheck disable=SC2317  # the traps call it
stop() { stopping=yes interrupted=yes; [[ -z $step ]] || kill -USR1 "$step"; } # srun passes it on to every task
# USR2 for sites where USR1 means something else: then --signal=B:USR2@120
trap 'say "the time is almost up, or a signal says so: saving, then requeued"; stop' USR1 USR2
trap 'ending=yes; stop' TERM # scancel, the time limit or a requeue: Slurm itself decides what follows
srun_each() { # WORDS...: one task on each node; afterwards $code is the step's
  local found
  code=143
  [[ -z $stopping ]] || return 0
  srun "${each[@]}" "$@" < /dev/null &
  step=$!
  while interrupted=""; wait "$step"; found=$?; do # a signal ends `wait`, not the step
    ((found == 127)) || code=$found
    [[ -n $interrupted ]] || break
  done
  step=""
}

# Requeues -------------------------------------------------------------------------------------------------------------

requeue() { # WHERE: has Slurm start the job anew, if it may, and ends this start
  [[ -z $ending ]] || exit "$code"
  if ((restarts >= MAX_REQUEUES)); then say "not requeued: MAX_REQUEUES=$MAX_REQUEUES"; exit "$code"; fi
  # This process lives on when its node's slurmd has died, but Slurm starts the job anew on another node then
  shown=" $(scontrol show job "$job" | tr '\n' ' ')"
  [[ $shown == *" Restarts=$restarts "* && $shown == *" JobState=RUNNING "* ]] ||
    fail "Slurm has ended this job, or started it anew elsewhere: this process ends"
  say "requeued$1; start $((restarts + 1)) is over"
  trap '' TERM # Slurm ends every process of this start now, and kills after KillWait
  if scontrol requeue "$job"; then exclude; else say "could not be requeued: resubmit it with --name $name"; fi
  exit "$code"
}

note_suspect() { # the host of the rank that most others lost, in the newest attempt that says so
  local folder rank
  while read -r folder; do
    rank=$(cat "$folder"/rank-*.json | grep -o '"suspect": *[0-9]*' | grep -o '[0-9]*$' | sort | uniq -c | sort -rn |
      awk 'NR == 1 {print $2}')
    [[ -z $rank ]] || break
  done < <(find "$run/status" -mindepth 1 -maxdepth 1 -type d -printf '%T@ %p\n' 2> /dev/null | sort -rn | head -n 3 |
    cut -d ' ' -f 2-)
  ((${rank:-${#hosts[@]} * nproc} < ${#hosts[@]} * nproc)) || return 0
  echo "${hosts[rank / nproc]}" >> "$run/.slurm-suspects"
  say "rank $rank was lost on ${hosts[rank / nproc]}, suspected" \
    "$(grep -cx "${hosts[rank / nproc]}" "$run/.slurm-suspects") times by now"
}

exclude() { # leaves out hosts that were suspected twice. Slurm takes a change of its nodes only while a job is pending
  local shown named partition ours theirs
  ours=$(sort "$run/.slurm-suspects" 2> /dev/null | uniq -d)
  [[ -n $ours || -s $run/.slurm-excluded ]] || return 0
  shown=$(scontrol show job "$job")
  [[ $shown =~ ExcNodeList=([^[:space:]]+) ]] && named=${BASH_REMATCH[1]}
  [[ $shown =~ Partition=([^[:space:]]+) ]] && partition=${BASH_REMATCH[1]}
  theirs=""
  [[ ${named:-(null)} == "(null)" ]] || # what the user excludes stays excluded
    theirs=$(scontrol show hostnames "$named" | grep -vxF "$(cat "$run/.slurm-excluded" 2> /dev/null)")
  if (($(sinfo -h -N -o %N -t idle,alloc,mix,comp ${partition:+--partition "$partition"} | sort -u |
    grep -cvxF "$theirs"$'\n'"$ours") < ${#hosts[@]})); then
    say "${ours//$'\n'/ }: suspected twice, but not excluded: fewer than ${#hosts[@]} other nodes are there"
    ours=""
  fi
  list() { grep . | paste -sd, -; }
  if ! scontrol update "JobId=$job" "ExcNodeList=$(list <<< "$theirs"$'\n'"$ours")"; then
    say "the nodes to exclude could not be changed: the next start may get any"
    return
  fi
  [[ -z $ours ]] || say "the next start excludes ${ours//$'\n'/ }, suspected twice: scontrol update JobId=$job" \
    "ExcNodeList=$(list <<< "$theirs") gives that up"
  echo "$ours" | grep . > "$run/.slurm-excluded"
}

# The job --------------------------------------------------------------------------------------------------------------

# Slurm 22.05 was seen to start a job on a node that had just come back, and never to run a step there
seen=$PWD/.slurm-$SLURM_JOB_ID # a file of this job: another node may have a folder of the same name on its own disk
touch "$seen" || fail "can't write to $PWD on $(hostname): submit from a folder on a disk that all nodes share"
# shellcheck disable=SC2016  # expanded on each node
look='for path; do [[ -e $path ]] || { hostname; break; }; done'
blind=$(timeout -k 5 "$FIRST_STEP_S" srun "${each[@]}" bash -c "$look" - "$seen" "$RANKUP/train/main.py" \
  2> /dev/null < /dev/null)
found=$?
rm -f "$seen"
if ((found)); then
  say "not every node of $SLURM_JOB_NODELIST runs a step within $FIRST_STEP_S s (srun: $found)"
  code=143
  requeue ""
fi
[[ -z $blind ]] || fail "$PWD or $RANKUP is not there on ${blind//$'\n'/ }: put the checkout and runs/ on a disk that" \
  "all nodes share"

words=("$@")
if [[ -z $SCRIPT ]]; then # an array trains one seed in each of its tasks; a script reads SLURM_ARRAY_TASK_ID itself
  words=(${SLURM_ARRAY_TASK_ID:+--seed "$SLURM_ARRAY_TASK_ID"} "$@")
fi
if [[ -n $DATA ]]; then
  copy=/tmp/rankup-$SLURM_JOB_ID
  trap 'srun "${each[@]}" rm -rf "$copy" < /dev/null' EXIT
  # Nodes may share /tmp, as those of local.sh do: cp fails where another one makes the same file at that moment
  # shellcheck disable=SC2016  # expanded on each node
  srun_each bash -c 'mkdir -p "$2" && flock "$2" cp -r "$1/." "$2"' - "$DATA" "$copy"
  [[ -n $stopping ]] || ((code == 0)) || fail "DATA=$DATA can't be copied to $copy of every node"
  words+=(--data-dir "$copy")
fi
task=("${container[@]}" "$RANKUP/slurm/task.sh" --nproc "$nproc")
if [[ -n $DOCTOR ]]; then
  MAX_RESTARTS=0 srun_each "${task[@]}" "$RANKUP/train/main.py" doctor "${words[@]}"
  [[ $DOCTOR != only ]] || exit "$code"
  if ((code != 0 && code != 10)) && [[ -z $stopping ]]; then
    say "the doctor says no, exit code $code (20 not fit, 30 could not be completed): nothing was trained"
    exit "$code"
  fi
fi
if [[ -z $SCRIPT ]]; then script=("$RANKUP/train/main.py" train); fi
if [[ -n $NNODES ]]; then # srun's code may be that of a lost node; an agent that ends below 128 knows how the job ended
  each+=(--no-kill --wait=0)
  task+=(--nnodes "$NNODES")
  export ENDED=$seen
fi
srun_each "${task[@]}" "${script[@]}" "${words[@]}"
[[ -z $NNODES || ! -s $ENDED ]] || code=$(head -n 1 "$ENDED")
rm -f "$seen"
[[ -z $stopping ]] || ((code < 128)) || code=143

at=$(find "$run/checkpoints" -name 'step-*' 2> /dev/null | sed -n 's/.*step-0*\([0-9][0-9]*\)$/\1/p' | sort -n |
  tail -n 1)
say "start $((restarts + 1)) ended with $code at step ${at:=0}"
((code >= 128)) || exit "$code"
if ((code != 143)) && [[ -z $ending ]]; then
  mkdir -p "$run"
  if [[ $(cat "$run/.slurm-failed" 2> /dev/null) == "$at" ]]; then
    say "failed again without a new checkpoint since step $at: not requeued"
    exit "$code"
  fi
  echo "$at" > "$run/.slurm-failed"
  note_suspect
fi
requeue " at step $at"
