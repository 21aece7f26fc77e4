# shellcheck shell=sh disable=SC2012
# What `rankup submit` does in the folder of a job, here or over ssh: sh -s with ACTION FOLDER WORDS as arguments.
# FOLDER/.rankup/NAME is a snapshot. What it lacks, such as runs/, .venv and data, it has as links into FOLDER.
action=$1 folder=$2
shift 2

whole() { (cd "$1" && sha256sum --quiet -c .rankup.sum) > /dev/null 2>&1; }

written() { # SNAPSHOT: files that a job wrote beside its code
  (cd "$1" && { # the lines that come once are those of files that the list lacks
    find . -name __pycache__ -prune -o -type f ! -name .rankup.sum ! -name '.slurm-*' -print | cut -c3-
    cut -c67- .rankup.sum .rankup.sum
  } | LC_ALL=C sort | uniq -u)
}

link() { # SNAPSHOT: link what it lacks
  (cd "$folder" && top=$(pwd -P) && cd ".rankup/$1" || exit
    find . -type d | while IFS= read -r place; do
      for each in "$top/$place"/* "$top/$place"/.[!.]*; do
        name=${each##*/}
        case $name in .git | .rankup | .slurm-* | slurm-*.out | __pycache__) continue ;; esac
        [ ! -e "$each" ] || [ -e "$place/$name" ] || [ -L "$place/$name" ] || printf '%s\0' "$each"
      done | xargs -0r ln -s -t "$place" || exit
    done)
}

prune() { # keep the newest five snapshots, those of jobs, and those that jobs have written to
  find . -maxdepth 1 -name '.sending-*' -mtime +0 -exec rm -rf {} +
  used=
  ! command -v squeue > /dev/null || used=$(squeue -h -t all -u "$(id -un)" -o %Z) || return 0
  ls -td [0-9a-f]*/ | tail -n +6 | while IFS=/ read -r name; do
    # shellcheck disable=SC3067 # dash, bash and busybox have -O
    [ -O "$name" ] || continue # squeue was not asked for the jobs of another user of this folder
    case $used in *"/.rankup/$name"*) continue ;; esac
    ! whole "$name" || [ -n "$(written "$name")" ] || rm -rf "$name"
  done
}

case $action in
  find) # NAME OUTPUTS...: say where the folder is, under which name the snapshot is or will be there, and how to send it
    mkdir -p "$folder" && cd "$folder" && folder=$(pwd -P) || exit
    name=$1 && shift && mkdir -p runs .rankup "$@" && cd .rankup || exit
    [ -e .gitignore ] || echo '*' > .gitignore
    number=1 first=$name
    while [ -e "$name" ] && ! whole "$name"; do # a job has changed files of its snapshot
      number=$((number + 1)) name=$first-$number
    done
    echo "$folder"
    echo "$name"
    [ ! -e "$name" ] || { touch "$name" && link "$name"; exit; }
    command -v rsync > /dev/null && echo rsync || echo tar
    ls -td [0-9a-f]*/ 2> /dev/null | head -1
    ;;
  name) # SENT NAME: the last step, so that nobody finds a part of a snapshot
    cd "$folder/.rankup" || exit
    whole "$1" || { echo "it did not arrive whole." >&2; exit 1; }
    # Another submit may have been faster
    touch "$1" && mv -T "$1" "$2" 2> /dev/null || { rm -rf "$1"; whole "$2"; } && link "$2"
    ;;
  sbatch) # NAME WORDS...: print the job's id, then what Slurm knows of it
    cd "$folder/.rankup/$1" && shift && job=$(sbatch --parsable "$@") || exit
    job=${job%%;*}
    echo "$job"
    scontrol show job "$job"
    cd "$folder/.rankup" && prune
    true # the job is submitted
    ;;
  prune) cd "$folder/.rankup" && prune ;;
  look) # JOB OUTPUT OFFSET ASK: the job's state if ASK is 1, then what its output file has from OFFSET on
    state=
    [ "$4" = 0 ] || state=$(squeue -h -t all -j "$1" -o '%T %r' 2>&1) ||
      case $state in *'Invalid job id'*) state= ;; *) state=UNKNOWN ;; esac # slurmctld may be restarting
    echo "$state"
    [ ! -e "$2" ] || tail -c "+$3" "$2"
    ;;
  end) # JOB SNAPSHOT: what Slurm knows of the job, then the files that it wrote beside its code
    scontrol show job "$1"
    echo "written="
    cd "$folder/.rankup" && written "$2" | head -20
    ;;
esac
