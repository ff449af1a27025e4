#!/usr/bin/env bash
# Starts the long study on real CIFAR-10 in the background, or goes on with it, at the lowest priority:
#
#   benchmarks/long_runs.sh DATA FOLDER [flags of fedgkd-pl compare]
#
# DATA holds cifar-10-batches-py. FOLDER, outside the repository, keeps the runs, log.txt, pid, and the
# code of the commit that it runs, so that working on the repository does not disturb it.
# STUDY=studies/paper_seed7_screening.yaml runs another study; give it another FOLDER.
set -euo pipefail
data=$(realpath "${1:?usage: long_runs.sh DATA FOLDER [flags]}") folder=${2:?usage: long_runs.sh DATA FOLDER [flags]}
shift 2
top=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
folder=$(realpath "$folder")
if [ -f "$folder/pid" ] && kill -0 "$(cat "$folder/pid")" 2>/dev/null; then
  echo "already at work: process $(cat "$folder/pid"), $folder/log.txt"
  exit 0
fi
commit=$(git -C "$top" rev-parse --short HEAD)
code=$folder/code-$commit
[ -d "$code" ] || { mkdir "$code" && git -C "$top" archive HEAD | tar -x -C "$code"; }
study=${STUDY:-studies/paper_seed7.yaml}
[ $# -gt 0 ] || set -- --rounds 20 --only method=FedAvg,FedGKD,FedGKD-Vote
cd "$folder"
echo "== $(date -u +%FT%TZ) commit $commit: $*" >> log.txt
PYTHONPATH=$code nohup nice -n 19 "$top/.venv/bin/python" -m fedgkd_pl compare "$study" \
  --data.data_dir "$data" --data.download false --output_dir "$folder/runs" "$@" >> log.txt 2>&1 < /dev/null &
echo $! > pid
echo "process $!, $folder/log.txt"
