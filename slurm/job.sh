#!/usr/bin/env bash
# Runs one start of a Slurm job: checks the nodes, runs an agent on each, requeues, and returns the agents' exit code.
# Run: sbatch slurm/ddp.sbatch      (the last line of ddp.sbatch runs this file on the job's first node)
# Edit: nothing. The settings are environment variables that ddp.sbatch sets.
set -uo pipefail
say() { echo "slurm: $*" >&2; }
fail() { say "$*"; exit 2; }
for name in MAX_RESTARTS MAX_REQUEUES FIRST_STEP_S; do
  [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name must be a whole number, got '${!name}'"
done
[[ $DOCTOR =~ ^(1|only|)$ ]] || fail "DOCTOR must be 1, only or empty, got $DOCTOR"
[[ -z $SCRIPT || -z $DOCTOR ]] || fail "DOCTOR works only with train/main.py train, got SCRIPT=$SCRIPT"

# Find the run's folder from --name and --run-dir on the command line. A settings file is not read
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID} run_dir=runs name=slurm-$job previous=""
read -ra script <<< "$SCRIPT"
words=("$@")
[[ -z $SCRIPT ]] || words=("${script[@]}")
for word in "${words[@]}"; do
  case "$previous $word" in
    "--run-dir "* | "--run_dir "*) run_dir=$word ;;
    "--name "*) name=$word ;;
    *" --run-dir="* | *" --run_dir="*) run_dir=${word#*=} ;;
    *" --name="*) name=${word#*=} ;;
  esac
  previous=$word
done
[[ $run_dir != *://* ]] || run_dir=runs
run=$run_dir/$name

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#hosts[@]})) || fail "scontrol can't read the node list \"$SLURM_JOB_NODELIST\""
# The fewest CPUs of any node, because srun asks for equally many on each. "8(x2),4" describes three nodes
cpus=$(tr , '\n' <<< "${SLURM_JOB_CPUS_PER_NODE:-1}" | sort -n | head -n 1) cpus=${cpus%(*}
tasks=${SLURM_NTASKS:+$SLURM_TASKS_PER_NODE} # "2(x2)", or "3,1" if Slurm splits --ntasks=4 unevenly
[[ $tasks != *,* ]] || fail "the $SLURM_NTASKS tasks are spread unevenly over the nodes: give --ntasks-per-node"
nproc=${SLURM_GPUS_ON_NODE:-${tasks%(*}} nproc=${nproc:-${SLURM_NTASKS_PER_NODE:-1}}
((cpus >= nproc)) || say "$nproc processes share $cpus CPUs on each node: ask for more with --cpus-per-task"
# Each agent gets all GPUs of its node, even if each task was to get one or an --exclusive job asked for fewer
gpus=(${SLURM_GPUS_ON_NODE:+--gpus-per-node="$nproc"})
[[ -z ${SLURM_GPUS:-} ]] || gpus=() # with sbatch --gpus, nodes may have different numbers of GPUs
# These values describe the whole job, and srun would apply them to one step. MASTER_* may be left from an earlier job
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK \
  MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK=$cpus OMP_NUM_THREADS=$((cpus > nproc ? cpus / nproc : 1)) RANKUP
# The tasks end together with one exit code. After a task is lost, the others have 30 s to end (but not with NNODES).
# Without --export=ALL, the steps of a job with another --export would get none of the variables above
each=(--nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=30
  --export=ALL "${gpus[@]}")
container=()
if [[ -n $IMAGE && $IMAGE != *.sif ]]; then # each task starts an apptainer image itself
  container=(--container-image="$IMAGE" --container-mounts="$RANKUP:$RANKUP,$PWD:$PWD" --container-workdir="$PWD")
fi

step="" code=0 stopping="" ending="" restarts=${SLURM_RESTART_COUNT:-0}
# shellcheck disable=SC2317  # the traps call it
stop() { stopping=yes interrupted=yes; [[ -z $step ]] || kill -USR1 "$step"; } # srun forwards it to all tasks
# USR2 is for sites that use USR1 for something else: --signal=B:USR2@120
trap 'say "the time is almost up, or somebody sent the signal: saving, then requeueing"; stop' USR1 USR2
trap 'ending=yes; stop' TERM # from scancel, the time limit or a requeue: Slurm decides what follows
srun_each() { # WORDS...: run them as one task on each node, and set $code to the step's exit code
  local found
  code=143
  [[ -z $stopping ]] || return 0
  srun "${each[@]}" "$@" < /dev/null &
  step=$!
  while interrupted=""; wait "$step"; found=$?; do # a signal interrupts `wait`, not the step
    ((found == 127)) || code=$found
    [[ -n $interrupted ]] || break
  done
  step=""
}

requeue() { # WHERE: end this start, and make Slurm requeue the job unless it must not
  [[ -z $ending ]] || exit "$code"
  if ((restarts >= MAX_REQUEUES)); then say "not requeued: the limit is MAX_REQUEUES=$MAX_REQUEUES"; exit "$code"; fi
  # This process survives the death of its node's slurmd, but Slurm then restarts the job on another node
  shown=" $(scontrol show job "$job" | tr '\n' ' ')"
  [[ $shown == *" Restarts=$restarts "* && $shown == *" JobState=RUNNING "* ]] ||
    fail "Slurm has ended this job or restarted it elsewhere: this process ends"
  say "requeued$1; start $((restarts + 1)) is over"
  trap '' TERM # Slurm now sends SIGTERM to every process of this start, and SIGKILL after KillWait
  scontrol requeue "$job" || say "Slurm refused to requeue the job: resubmit it with --name $name"
  exit "$code"
}

# We saw Slurm 22.05 start a job on a node that had just come back, and then never run a step there
seen=$PWD/.slurm-$SLURM_JOB_ID # tests whether all nodes share the disk, not just the folder's name
touch "$seen" || fail "can't write to $PWD on $(hostname): submit from a folder on a disk that all nodes share"
# shellcheck disable=SC2016  # expanded on each node
look='for path; do [[ -e $path ]] || { hostname; break; }; done'
blind=$(timeout -k 5 "$FIRST_STEP_S" srun "${each[@]}" bash -c "$look" - "$seen" "$RANKUP/train/main.py" \
  2> /dev/null < /dev/null)
found=$?
rm -f "$seen"
if ((found)); then
  say "not every node of $SLURM_JOB_NODELIST ran a first step within $FIRST_STEP_S s (srun ended with $found)"
  code=143
  requeue ""
fi
[[ -z $blind ]] || fail "$PWD or $RANKUP does not exist on ${blind//$'\n'/ }: put the checkout and runs/ on a disk" \
  "that all nodes share"

words=("$@")
if [[ -z $SCRIPT ]]; then # each task of an array trains its own seed; your script reads SLURM_ARRAY_TASK_ID
  script=("$RANKUP/train/main.py" train)
  words=(${SLURM_ARRAY_TASK_ID:+--seed "$SLURM_ARRAY_TASK_ID"} "$@")
fi
task=("${container[@]}" "$RANKUP/slurm/task.sh" --nproc "$nproc")
if [[ -n $DOCTOR ]]; then
  MAX_RESTARTS=0 srun_each "${task[@]}" "$RANKUP/train/main.py" doctor "${words[@]}"
  [[ $DOCTOR != only ]] || exit "$code"
  if ((code != 0 && code != 10)) && [[ -z $stopping ]]; then
    say "the doctor ended with $code (20: nodes not fit, 30: check not completed): the job does not train"
    exit "$code"
  fi
fi
if [[ -n $NNODES ]]; then # srun's code may come from a lost node; an agent's code below 128 says how the job ended
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
fi
requeue " at step $at"
