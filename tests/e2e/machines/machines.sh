#!/usr/bin/env bash
# Machines for the tests, all of them this one: a Slurm with N nodes, and N hosts with an sshd of their own. Needs root.
#
#   machines.sh up [N]   starts them (2 unless given); installs Debian's or Ubuntu's packages that are missing
#   machines.sh env      prints SLURM_CONF, MACHINES_HOSTS, MACHINES_SSH_CONFIG and MACHINES_SHARED, for eval
#   machines.sh down     ends them
set -euo pipefail
root=${MACHINES_STATE:-/var/tmp/mlbench-machines}
slurm=$root/slurm ssh=$root/ssh munge=$root/munge
controller_port=17400 ssh_port=2422

is_alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

install_packages() {
  local packages=()
  command -v slurmctld >/dev/null && command -v munged >/dev/null || packages+=(slurm-wlm munge)
  [ -x /usr/sbin/sshd ] && command -v ssh >/dev/null || packages+=(openssh-server openssh-client)
  [ ${#packages[@]} -eq 0 ] && return
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${packages[@]}" >/dev/null
}

start_munge() {
  mkdir -p "$munge"
  chmod 711 "$munge"
  [ -s "$munge/key" ] || (umask 077; head -c 1024 /dev/urandom >"$munge/key")
  is_alive "$munge/pid" || munged --force --key-file="$munge/key" --socket="$munge/socket" --pid-file="$munge/pid" \
    --log-file="$munge/log" --seed-file="$munge/seed"
}

write_slurm_configuration() {
  local number
  printf '%s\n' "ClusterName=machines" "SlurmctldHost=$(hostname)(127.0.0.1)" "SlurmctldPort=$controller_port" \
    "SlurmUser=root" "AuthType=auth/munge" "AuthInfo=socket=$munge/socket" "StateSaveLocation=$slurm/controller" \
    "SlurmdSpoolDir=$slurm/%n" "SlurmctldPidFile=$slurm/controller.pid" "SlurmdPidFile=$slurm/%n.pid" \
    "SlurmctldLogFile=$slurm/log/controller" "SlurmdLogFile=$slurm/log/%n" "ProctrackType=proctrack/linuxproc" \
    "TaskPlugin=task/none" "SelectType=select/cons_tres" "ReturnToService=2" "MpiDefault=none" "KillWait=5"
  for ((number = 1; number <= $1; number++)); do
    echo "NodeName=n$number NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((controller_port + number))" \
      "CPUs=1 RealMemory=2000 State=UNKNOWN"
  done
  echo "PartitionName=all Nodes=n[1-$1] Default=YES MaxTime=INFINITE State=UP"
  echo "PartitionName=short Nodes=n[1-$1] MaxTime=1 State=UP"
}

start_slurm() {
  local number
  mkdir -p "$slurm/controller" "$slurm/log"
  write_slurm_configuration "$1" >"$slurm/slurm.conf"
  export SLURM_CONF=$slurm/slurm.conf
  is_alive "$slurm/controller.pid" || slurmctld
  for ((number = 1; number <= $1; number++)); do
    mkdir -p "$slurm/n$number"
    is_alive "$slurm/n$number.pid" || slurmd -N "n$number"
  done
  for ((number = 0; number < 120; number++)); do
    [ "$(sinfo -h -p all -t idle -o %D 2>/dev/null)" = "$1" ] && return
    sleep 0.5
  done
  echo "machines: Slurm's nodes do not become idle" >&2
  sinfo -N -l >&2
  return 1
}

start_hosts() {
  local number address
  mkdir -p "$ssh" /run/sshd
  chmod 700 "$ssh"
  [ -s "$ssh/id" ] || ssh-keygen -q -t ed25519 -N '' -f "$ssh/id"
  : >"$ssh/config"; : >"$ssh/known_hosts"
  for ((number = 1; number <= $1; number++)); do
    address=127.0.1.$((10 + number))
    [ -s "$ssh/m$number.key" ] || ssh-keygen -q -t ed25519 -N '' -f "$ssh/m$number.key"
    printf '%s\n' "Port $ssh_port" "ListenAddress $address" "HostKey $ssh/m$number.key" "PidFile $ssh/m$number.pid" \
      "AuthorizedKeysFile $ssh/id.pub" "PasswordAuthentication no" "PermitRootLogin prohibit-password" \
      "StrictModes no" "UsePAM no" "SetEnv SLURM_CONF=$slurm/slurm.conf" >"$ssh/m$number.conf"
    printf 'Host m%s\n' "$number" >>"$ssh/config"
    printf '  %s\n' "HostName $address" "Port $ssh_port" "User $(id -un)" "IdentityFile $ssh/id" \
      "UserKnownHostsFile $ssh/known_hosts" "IdentitiesOnly yes" >>"$ssh/config"
    echo "[$address]:$ssh_port $(cut -d' ' -f1,2 "$ssh/m$number.key.pub")" >>"$ssh/known_hosts"
    is_alive "$ssh/m$number.pid" || /usr/sbin/sshd -f "$ssh/m$number.conf" -E "$ssh/m$number.log"
  done
}

case ${1:-help} in
  up)
    count=${2:-2}
    [[ $count =~ ^[1-8]$ ]] || { echo "machines: N is 1 to 8" >&2; exit 2; }
    install_packages
    mkdir -p "$root/shared"
    chmod 755 "$root"
    echo "$count" >"$root/count"
    start_munge
    start_slurm "$count"
    start_hosts "$count"
    ;;
  env)
    echo "export SLURM_CONF=$slurm/slurm.conf MACHINES_SSH_CONFIG=$ssh/config MACHINES_SHARED=$root/shared"
    echo "export MACHINES_HOSTS=$(seq -s, -f 'm%g' "$(cat "$root/count")")"
    ;;
  down)
    for file in "$ssh"/*.pid "$slurm"/*.pid "$munge"/pid; do
      if is_alive "$file"; then kill "$(cat "$file")"; fi
    done
    sleep 1
    rm -rf "$slurm"
    ;;
  *)
    sed -n 's/^# \{0,1\}//p' "$0" | sed -n 1,6p
    ;;
esac
