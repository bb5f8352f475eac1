#!/bin/sh
# Runs one worker's command: gives it the variables of the contract, packs its output folder when it has ended, and
# hands archive and log over to the run's keeper, which has a pod of its own. If there is no keeper, or it cannot be
# reached, a worker whose results are collected keeps its pod alive until they are fetched. POSIX sh with coreutils or
# busybox; tar and sha256sum are needed for the output folder only, mkfifo, tee and Python for the keeper only.
#
# In $work: output/ (MLBENCH_OUTPUT_DIR), resources.jsonl, log, then archive.tar and summary.json; a file "ack" ends the
# hold.
set -u

work=${MLBENCH_WORK_DIR:-/results}
termination_log=${MLBENCH_TERMINATION_LOG:-/dev/termination-log}
index=$((${JOB_COMPLETION_INDEX:-0} + ${MLBENCH_FIRST_UNIT:-0})) # parameter servers come after the workers
patience=10 # seconds between TERM and KILL
samples=300 # of resources that a worker which is not held tells at its end
log_bytes=${MLBENCH_LOG_BYTES:-268435456} # of the log that are kept for the keeper; the node keeps some of the rest
drain=5 # seconds in which the log is written to its end
keeper_patience=${MLBENCH_KEEPER_PATIENCE:-35} # seconds in which an unreachable keeper is tried; DNS may say for 30 that it is not
command=''
logger=''
python=''
stopper=''
terminated=''
replace() { # TEXT PLACEHOLDER VALUE -> $replaced
  replaced='' rest=$1
  while :; do
    case $rest in
      *"$2"*) replaced=$replaced${rest%%"$2"*}$3 rest=${rest#*"$2"} ;;
      *) break ;;
    esac
  done
  replaced=$replaced$rest
}

fill_in() { # ARGUMENTS... -> $@ of the caller by way of `eval`: with the placeholders of this rank replaced
  filled='set --'
  for argument in "$@"; do
    replace "$argument" '{hosts}' "$MLBENCH_HOSTS"
    replace "$replaced" '{rank}' "$RANK"
    replace "$replaced" '{run_id}' "$MLBENCH_RUN_ID"
    replace "$replaced" '{backend}' "$MLBENCH_BACKEND"
    replace "$replaced" '{master_port}' "$MASTER_PORT"
    replace "$replaced" "'" "'\\''"
    filled="$filled '$replaced'"
  done
}

if [ "${MLBENCH_ENTRY:-worker}" = rank ]; then # one of several processes: started by torchrun, which knows its rank
  unset MLBENCH_ENTRY
  # torchrun sets 1 if nobody chose a number; a task takes its share of the CPUs, quotas included.
  if [ "${MLBENCH_THREADS_OPEN:-}" = 1 ]; then unset OMP_NUM_THREADS; fi
  export MLBENCH_OUTPUT_DIR="$work/output/rank-$RANK"
  mkdir -p "$MLBENCH_OUTPUT_DIR"
  fill_in "$@"
  eval "$filled"
  exec "$@"
fi
add_libraries() { # FOLDER; last, so that the image's own libraries go first
  [ -d "$1" ] || return
  case ":${LD_LIBRARY_PATH:-}:" in
    *":$1:"*) ;;
    *) export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$1" ;;
  esac
}

# GKE mounts the driver here and sets no variable.
driver=${MLBENCH_DRIVER_DIR:-/usr/local/nvidia}
add_libraries "$driver/lib64"
[ ! -d "$driver/lib64" ] || export PATH="$PATH:$driver/bin"
# Libraries of the machine's fast network, and NCCL's settings for it, a script for bash. What the run sets goes first.
add_libraries "${MLBENCH_FABRIC_LIBRARIES:-}"
if [ -r "${MLBENCH_NCCL_PROFILE:-}" ] && command -v bash >/dev/null 2>&1; then
  settings=$(bash --posix -c '. "$1" >/dev/null 2>&1; export -p' bash "$MLBENCH_NCCL_PROFILE")
  while IFS= read -r line; do
    case $line in 'export NCCL_DEBUG'*) continue ;; 'export NCCL_'*=*) ;; *) continue ;; esac
    name=${line#export }
    name=${name%%=*}
    eval "[ -n \"\${$name+given}\" ]" || eval "$line"
  done <<END
$settings
END
fi
export NODE_RANK="$index" LOCAL_RANK=0 RANK=$((index * LOCAL_WORLD_SIZE)) MLBENCH_OUTPUT_DIR="$work/output"
if [ "$index" -ge "${MLBENCH_WORKERS:-1}" ]; then
  export MLBENCH_ROLE=server RANK=$((WORLD_SIZE + index - MLBENCH_WORKERS))
fi
mkdir -p "$MLBENCH_OUTPUT_DIR"

# The names of all workers' pods, by the run's headless service. In the pod template each pod would carry all of them.
job=$MLBENCH_RUN_ID
MLBENCH_HOSTS=$job-0.$MLBENCH_RUN_ID count=1
while [ "$count" -lt "$MLBENCH_WORKERS" ]; do
  MLBENCH_HOSTS=$MLBENCH_HOSTS,$job-$count.$MLBENCH_RUN_ID count=$((count + 1))
done
export MLBENCH_HOSTS

signal_command() { # NAME; to the whole group if there is one
  kill -s "$1" -- "-$command" 2>/dev/null || kill -s "$1" "$command" 2>/dev/null
}

stop() {
  left=$patience
  signal_command TERM
  while [ "$left" -gt 0 ] && kill -0 "$command" 2>/dev/null; do
    sleep 1
    left=$((left - 1))
  done
  signal_command KILL
}

# shellcheck disable=SC2317
on_term() {
  terminated=1
  [ -n "$command" ] && [ -z "$stopper" ] && { stop >/dev/null 2>&1 & stopper=$!; }
}
trap on_term TERM

now() { # -> $ms, milliseconds since boot
  read -r uptime rest </proc/uptime
  ms=${uptime%.*}${uptime#*.}0
}

number() { # FILE -> $value, or nothing
  value=''
  [ -r "$1" ] && read -r value <"$1"
  case $value in '' | *[!0-9]*) value='' ;; esac
}

cpu_time() { # -> $cpu_us, microseconds of this container
  cpu_us=''
  if [ -r /sys/fs/cgroup/cpu.stat ]; then
    while read -r key value; do
      [ "$key" = usage_usec ] && cpu_us=$value && break
    done </sys/fs/cgroup/cpu.stat
  else
    number /sys/fs/cgroup/cpuacct/cpuacct.usage
    [ -n "$value" ] && cpu_us=$((value / 1000))
  fi
}

memory() { # -> $rss, bytes in use that cannot be dropped at once (what the kubelet calls the working set)
  rss=''
  folder=/sys/fs/cgroup name=memory.current droppable=inactive_file
  [ -r "$folder/$name" ] || folder=/sys/fs/cgroup/memory name=memory.usage_in_bytes droppable=total_inactive_file
  number "$folder/$name"
  [ -n "$value" ] || return
  rss=$value
  while read -r key value; do
    [ "$key" = "$droppable" ] && [ "$value" -le "$rss" ] && rss=$((rss - value)) && break
  done <"$folder/memory.stat"
}

memory_kills() { # -> $kills, how often the kernel killed in this container for want of memory
  kills=0
  for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
    [ -r "$file" ] || continue
    while read -r key value; do
      [ "$key" = oom_kill ] && kills=$value
    done <"$file"
  done
}

network() { # -> $received $sent, bytes of all interfaces but the loopback
  received=0 sent=0
  [ -r /proc/net/dev ] || return
  while read -r name into rest; do
    case $name in
      lo: | lo:*) continue ;;
      *:) ;;
      *:[0-9]*) rest="$into $rest" into=${name#*:} ;;
      *) continue ;;
    esac
    # shellcheck disable=SC2086
    set -- $into $rest
    received=$((received + $1)) sent=$((sent + $9))
  done </proc/net/dev
}

machine_counters() { # -> $busy, hundredths of a second of all CPUs of the node; $cores
  busy=0 cores=0
  [ -r /proc/stat ] || return
  # shellcheck disable=SC2034
  while read -r name user nice system idle iowait irq softirq rest; do
    case $name in
      cpu) busy=$((user + nice + system + irq + softirq)) ;;
      cpu[0-9]*) cores=$((cores + 1)) ;;
      *) break ;;
    esac
  done </proc/stat
}

throttling() { # -> $periods $paused_us: how often and how long the kernel paused this container for its CPU limit
  periods=0 paused_us=0
  file=/sys/fs/cgroup/cpu.stat
  [ -r "$file" ] || file=/sys/fs/cgroup/cpu/cpu.stat
  [ -r "$file" ] || return
  while read -r key value; do
    case $key in
      nr_throttled) periods=$value ;;
      throttled_usec) paused_us=$value ;;
      throttled_time) paused_us=$((value / 1000)) ;;
    esac
  done <"$file"
}

begin_machine() { # what the counters of the node were before the command
  machine_counters
  throttling
  cpu_time
  busy_0=$busy periods_0=$periods paused_us_0=$paused_us cpu_us_0=${cpu_us:-0}
}

seconds() { # COUNT UNIT -> $value: COUNT divided by UNIT (a power of ten), at least 0
  [ "$1" -ge 0 ] && value=$(printf "%d.%0$((${#2} - 1))d" $(($1 / $2)) $(($1 % $2))) || value=0.0
}

sample_machine() { # load of the node since begin_machine; what the fields are is said in agent/load.py
  machine_counters
  throttling
  cpu_time
  now
  [ "$cores" -gt 0 ] && [ -n "$cpu_us" ] || return
  stamp=$((epoch_ms + ms - began_ms))
  line=$(printf '"time":%d.%03d,"kind":"machine","worker":%d,"cores":%d' $((stamp / 1000)) $((stamp % 1000)) "$index" "$cores")
  seconds $((ms - began_ms)) 1000 && line=$line,\"elapsed_seconds\":$value
  seconds $((busy - busy_0)) 100 && line=$line,\"busy_seconds\":$value
  seconds $((cpu_us - cpu_us_0)) 1000000 && line=$line,\"own_seconds\":$value
  seconds $((paused_us - paused_us_0)) 1000000 && line=$line,\"throttled_seconds\":$value
  # One write: the minder may be killed between two.
  printf '{%s,"throttled_periods":%d}\n' "$line" $((periods - periods_0))
}

sample() {
  now
  cpu_time
  memory
  network
  stamp=$((epoch_ms + ms - began_ms))
  line=$(printf '"time":%d.%03d,"rank":%d' $((stamp / 1000)) $((stamp % 1000)) "$RANK")
  [ -n "$cpu_us" ] && line=$line$(printf ',"cpu_seconds":%d.%06d' $((cpu_us / 1000000)) $((cpu_us % 1000000)))
  [ -n "$rss" ] && line=$line$(printf ',"rss_bytes":%d' "$rss")
  printf '{%s,"received_bytes":%d,"sent_bytes":%d}\n' "$line" "$received" "$sent"
}

mind() { # beside the command: one line of resources a second, one of the node's load a minute, and the deadline
  count=0
  while kill -0 "$command" 2>/dev/null; do
    [ $((count % 60)) = 0 ] && sample_machine >>"$work/resources.jsonl"
    count=$((count + 1))
    sample >>"$work/resources.jsonl"
    if [ $((ms - began_ms)) -ge $((MLBENCH_TIMEOUT * 1000)) ] && [ ! -e "$work/deadline" ]; then
      : >"$work/deadline"
      stop
    fi
    sleep 1
  done
}

find_python() { # -> $python, or nothing
  for python in python3 python; do
    command -v "$python" >/dev/null 2>&1 && "$python" -I -S -c 'import http.client' >/dev/null 2>&1 && return
  done
  python=''
}

open_log() { # -> $logger: copies standard input of the pipe $work/pipe to the container's log and to $work/log
  rm -f "$work/pipe" "$work/copy" "$work/log"
  [ -n "${MLBENCH_KEEPER:-}" ] && command -v tee >/dev/null 2>&1 || return
  mkfifo "$work/pipe" "$work/copy" 2>/dev/null || return
  { head -c "$log_bytes" >"$work/log"; cat >/dev/null; } <"$work/copy" 2>/dev/null &
  copier=$!
  tee "$work/copy" <"$work/pipe" &
  logger=$!
}

close_log() { # when all of it is written; what somebody left behind may write later is not waited for
  left=$((drain * 10))
  while [ "$left" -gt 0 ] && kill -0 "$logger" 2>/dev/null; do
    sleep 0.1 2>/dev/null || { sleep 1; left=$((left - 9)); }
    left=$((left - 1))
  done
  kill "$logger" 2>/dev/null
  wait "$logger" "$copier" 2>/dev/null
}

run() { # COMMAND... -> $code
  own=''
  command -v setsid >/dev/null 2>&1 && own=setsid
  open_log
  begin_machine
  if [ -n "$logger" ]; then $own "$@" >"$work/pipe" 2>&1 & else $own "$@" & fi
  command=$!
  mind >/dev/null 2>&1 &
  minder=$!
  while :; do # a trap cuts `wait` short
    wait "$command" 2>/dev/null
    code=$?
    kill -0 "$command" 2>/dev/null || break
  done
  [ -n "$own" ] && signal_command KILL # what it left behind
  # shellcheck disable=SC2086
  kill "$minder" $stopper 2>/dev/null
  sample_machine >>"$work/resources.jsonl"
  sample >>"$work/resources.jsonl"
  command=''
  [ -z "$logger" ] || close_log
}

unpack_code() { # the task's code, which the run brings: -> $trouble, or PYTHONPATH
  trouble='' zip=${MLBENCH_CODE_ZIP:-/mlbench-code/code.zip}
  [ -n "${MLBENCH_CODE:-}" ] || return
  find_python
  if [ -z "$python" ]; then trouble='This image has no Python, which the task needs.' && return; fi
  sum=$(sha256sum <"$zip" 2>/dev/null)
  if [ "${sum%% *}" != "$MLBENCH_CODE" ]; then trouble="The code in $zip is not that of this run." && return; fi
  rm -rf "$work/code"
  "$python" -I -m zipfile -e "$zip" "$work/code" || trouble='The code of the task cannot be unpacked.'
  export PYTHONPATH="$work/code"
  # Images of distributions have python3 alone; the tasks' command is "python".
  command -v python >/dev/null 2>&1 || { mkdir -p "$work/bin" && ln -sf "$(command -v python3)" "$work/bin/python" && export PATH="$PATH:$work/bin"; }
}

wait_for_end() { # a worker that has no command of its own: until the run is stopped, which is no failure
  code=0
  now
  end=$((ms + MLBENCH_TIMEOUT * 1000))
  while [ -z "$terminated" ] && [ "$ms" -lt "$end" ]; do
    sleep 1 &
    wait $!
    now
  done
  terminated=''
}

tell_sample() { # LINE
  [ -z "$1" ] || printf '@mlbench-sample {"worker":%d,"sample":%s}\n' "$index" "$1"
}

tell_samples() { # into the log, so that they come home without this worker being held: SAMPLES of them, evenly spread, and
  # the first and the last line of the node's load
  count=0 first='' last=''
  while read -r line; do
    case $line in
      *'"kind"'*) [ -n "$first" ] && last=$line || first=$line ;;
      *) count=$((count + 1)) ;;
    esac
  done <"$work/resources.jsonl"
  tell_sample "$first"
  tell_sample "$last"
  every=$(((count + samples - 1) / samples)) number=0
  while read -r line; do
    case $line in *'"kind"'*) continue ;; esac
    [ $((number % every)) = 0 ] && tell_sample "$line"
    number=$((number + 1))
  done <"$work/resources.jsonl"
}

pack() { # -> $archive, JSON
  archive=null
  # 1 means that a file changed while it was read: packed all the same.
  tar -cf "$work/archive.part" -C "$work" output resources.jsonl >&2 || [ $? -eq 1 ] || return
  sum=$(sha256sum <"$work/archive.part") || return
  size=$(wc -c <"$work/archive.part")
  mv "$work/archive.part" "$work/archive.tar"
  archive=$(printf '{"size":%d,"sha256":"%s"}' "$size" "${sum%% *}")
}

pack_log() { # -> $log $sampled, JSON: what the keeper takes beside the archive, or if there is none
  log=null sampled=null
  [ -n "$logger" ] && [ -r "$work/log" ] || return
  sum=$(sha256sum <"$work/log") || return
  size=$(wc -c <"$work/log")
  truncated=false
  [ "$size" -ge "$log_bytes" ] && truncated=true
  log=$(printf '{"size":%d,"sha256":"%s","truncated":%s}' "$size" "${sum%% *}" "$truncated")
  [ "$held" = true ] && return
  sum=$(sha256sum <"$work/resources.jsonl") || return
  size=$(wc -c <"$work/resources.jsonl")
  sampled=$(printf '{"size":%d,"sha256":"%s"}' "$size" "${sum%% *}")
}

write_summary() { # HANDOVER: null, or why the keeper has not taken the results, or "kept"
  summary=$(printf '{"worker":%d,"told_begin":true,"exit_code":%d,"reason":"%s","started":%s,"ended":%s,"memory_kills":%d,"held":%s,"archive":%s,"log":%s,"samples":%s,"handover":%s,"resources":%s}' \
    "$index" "$code" "$reason" "$started" "$ended" "$kills" "$held" "$archive" "$log" "$sampled" "$1" "${resources:-null}")
  printf '%s\n' "$summary" >"$work/summary.part" && mv "$work/summary.part" "$work/summary.json"
  printf '%s' "$summary" >"$termination_log" 2>/dev/null
}

hand_over() { # SECONDS in which an unreachable keeper is tried -> 0 if the keeper has taken all
  [ -n "${MLBENCH_KEEPER:-}" ] || return 1
  if [ -z "$python" ]; then write_summary '"no_python"'; return 1; fi
  if trouble=$("$python" -I -S "${MLBENCH_KEEPER_SCRIPT:-/mlbench/keeper.py}" send "$1" 2>/dev/null); then
    write_summary '"kept"'
    return
  fi
  write_summary "\"${trouble:-failed}\""
  return 1
}

hold() { # until the results are fetched, or the keeper can be reached after all, or the time is up
  now
  end=$((ms + MLBENCH_HOLD * 1000)) again=$((ms + 10000))
  while [ ! -e "$work/ack" ] && [ "$ms" -lt "$end" ]; do
    sleep 0.2 2>/dev/null || sleep 1
    now
    if [ "$ms" -ge "$again" ] && [ -n "$python" ]; then
      hand_over 0 && return
      now
      again=$((ms + 10000))
    fi
  done
}

if [ "$LOCAL_WORLD_SIZE" -gt 1 ] && [ "${MLBENCH_ROLE:-}" != server ]; then
  export MLBENCH_ENTRY=rank
  if [ -z "${OMP_NUM_THREADS:-}" ]; then export MLBENCH_THREADS_OPEN=1; fi
  set -- torchrun --nnodes "$MLBENCH_WORKERS" --node-rank "$NODE_RANK" --nproc-per-node "$LOCAL_WORLD_SIZE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --no-python sh "$0" "$@"
else
  fill_in "$@"
  eval "$filled"
fi

unpack_code
# shellcheck disable=SC2016
[ -z "$trouble" ] || set -- sh -c 'echo "$1" >&2; exit 1' sh "$trouble"
now
began_ms=$ms
epoch_ms=$(date +%s%N) # who failed first is told by milliseconds; busybox has seconds only
case $epoch_ms in
  *[!0-9]* | ??????????) epoch_ms=$(date +%s)000 ;;
  *) epoch_ms=${epoch_ms%??????} ;;
esac
started=$(printf '%d.%03d' $((epoch_ms / 1000)) $((epoch_ms % 1000)))
# Who copies the log knows by this line that it has the beginning.
printf '@mlbench-worker {"worker":%d,"began":%s}\n' "$index" "$started"
rm -f "$work/deadline" "$work/ack"
: >"$work/resources.jsonl"
if [ "$MLBENCH_RUN_ON_ALL" = 1 ] || [ "$index" = 0 ]; then
  run "$@"
else
  wait_for_end
fi

now
stamp=$((epoch_ms + ms - began_ms))
ended=$(printf '%d.%03d' $((stamp / 1000)) $((stamp % 1000)))
reason=exited
[ -n "$terminated" ] && reason=terminated
[ -e "$work/deadline" ] && reason=deadline code=124
held=false archive=null
if [ "$index" = 0 ] || { [ "$MLBENCH_COLLECT" = all ] && [ "${MLBENCH_ROLE:-}" != server ]; }; then
  pack
  [ "$archive" != null ] && held=true
fi
pack_log
resources=$(tail -n 1 "$work/resources.jsonl" 2>/dev/null)
[ "$held" = true ] || tell_samples
memory_kills
write_summary null
# The client takes these lines out of the log again, wherever in a line they stand.
printf '@mlbench-worker %s\n' "$summary"
[ -z "${MLBENCH_KEEPER:-}" ] || find_python
if [ "$held" = true ]; then
  hand_over "$keeper_patience" || hold
elif [ "$log" != null ]; then
  hand_over "$keeper_patience"
fi
exit "$code"
