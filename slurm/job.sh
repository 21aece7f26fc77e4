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
[[ -z $SCRIPT || -z $DOCTOR ]] || fail "DOCTOR is of train/main.py train, not of SCRIPT=$SCRIPT"

# The run's folder, as far as the command line names it: a file of settings is not read
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
# Of the node with the fewest CPUs: "8(x2),4" is three nodes, and srun asks as much of each
cpus=$(tr , '\n' <<< "${SLURM_JOB_CPUS_PER_NODE:-1}" | sort -n | head -n 1) cpus=${cpus%(*}
tasks=${SLURM_NTASKS:+$SLURM_TASKS_PER_NODE} # "2(x2)"; "3,1" is what Slurm may make of --ntasks=4 on two nodes
[[ $tasks != *,* ]] || fail "the $SLURM_NTASKS tasks are spread unevenly over the nodes: give --ntasks-per-node"
nproc=${SLURM_GPUS_ON_NODE:-${tasks%(*}} nproc=${nproc:-${SLURM_NTASKS_PER_NODE:-1}}
((cpus >= nproc)) || say "$nproc processes share $cpus CPUs on each node: ask for more with --cpus-per-task"
# Each agent gets all GPUs of its node, also where each task was to get one, or an --exclusive job asked for fewer
gpus=(${SLURM_GPUS_ON_NODE:+--gpus-per-node="$nproc"})
[[ -z ${SLURM_GPUS:-} ]] || gpus=() # sbatch --gpus: each node may have another number
# srun would read these of the whole job, but they mean something else in a step; an address is that of an earlier job
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK \
  MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK=$cpus OMP_NUM_THREADS=$((cpus > nproc ? cpus / nproc : 1)) RANKUP
# The tasks end together, with one code. When one of them is lost, the others have 30 s (not so with NNODES). Without
# --export=ALL, a step of a job with another --export would get none of the variables above
each=(--nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=30
  --export=ALL "${gpus[@]}")
container=()
if [[ -n $IMAGE && $IMAGE != *.sif ]]; then # an apptainer image is started by each task
  container=(--container-image="$IMAGE" --container-mounts="$RANKUP:$RANKUP,$PWD:$PWD" --container-workdir="$PWD")
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

requeue() { # WHERE: has Slurm start the job anew, if it may, and ends this start
  [[ -z $ending ]] || exit "$code"
  if ((restarts >= MAX_REQUEUES)); then say "not requeued: MAX_REQUEUES=$MAX_REQUEUES"; exit "$code"; fi
  # This process lives on when its node's slurmd has died, but Slurm starts the job anew on another node then
  shown=" $(scontrol show job "$job" | tr '\n' ' ')"
  [[ $shown == *" Restarts=$restarts "* && $shown == *" JobState=RUNNING "* ]] ||
    fail "Slurm has ended this job, or started it anew elsewhere: this process ends"
  say "requeued$1; start $((restarts + 1)) is over"
  trap '' TERM # Slurm ends every process of this start now, and kills after KillWait
  scontrol requeue "$job" || say "could not be requeued: resubmit it with --name $name"
  exit "$code"
}

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
  script=("$RANKUP/train/main.py" train)
  words=(${SLURM_ARRAY_TASK_ID:+--seed "$SLURM_ARRAY_TASK_ID"} "$@")
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
fi
requeue " at step $at"
