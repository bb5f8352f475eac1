#!/usr/bin/env bash
# Machines for the tests, all of them this one: a Slurm with N nodes, and N hosts with an sshd of their own. Needs root.
#
#   machines.sh up [N]   starts them (2 unless given); installs Debian's or Ubuntu's packages that are missing
#   machines.sh env      prints SLURM_CONF, MACHINES_HOSTS, MACHINES_SSH_CONFIG and MACHINES_SHARED, for eval
#   machines.sh database starts MariaDB and slurmdbd for the munge of SLURM_CONF; prints what a slurm.conf needs for them
#   machines.sh down     ends all of it
set -euo pipefail
root=${MACHINES_STATE:-/var/tmp/mlbench-machines}
slurm=$root/slurm ssh=$root/ssh munge=$root/munge database=$root/database
first_port=${MACHINES_PORT:-17400}  # another one lets a second fleet run beside the first, with a MACHINES_STATE of its own
controller_port=$first_port ssh_port=$((first_port + 20)) database_port=$((first_port + 21)) accounting_port=$((first_port + 22))

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

# SLURM_CONF names a Slurm that is up; its munge is used. The database is empty each time.
start_database() {
  local packages=() socket number
  command -v slurmdbd >/dev/null || packages+=(slurmdbd slurm-wlm-mysql-plugin)
  command -v mariadbd >/dev/null && command -v my_print_defaults >/dev/null || packages+=(mariadb-server-core mariadb-client-core)
  if [ ${#packages[@]} -gt 0 ]; then
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${packages[@]}" >/dev/null
  fi
  socket=$(sed -n 's/^AuthInfo=socket=//p' "$SLURM_CONF")
  stop_daemons "$database"/dbd.pid "$database"/mariadb.pid
  rm -rf "$database"
  mkdir -p "$database"
  mariadb-install-db --no-defaults --user=root --datadir="$database/data" --basedir=/usr \
    --auth-root-authentication-method=normal --skip-test-db >"$database/install.log" 2>&1 ||
    { cat "$database/install.log" >&2; return 1; }
  mariadbd --no-defaults --user=root --datadir="$database/data" --socket="$database/socket" --port="$database_port" \
    --bind-address=127.0.0.1 --pid-file="$database/mariadb.pid" --log-error="$database/mariadb.log" --skip-log-bin \
    --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 </dev/null >/dev/null 2>&1 &
  (umask 077; printf '%s\n' "AuthType=auth/munge" "AuthInfo=socket=$socket" "DbdHost=$(hostname)" "DbdAddr=127.0.0.1" \
    "DbdPort=$accounting_port" "SlurmUser=root" "StorageType=accounting_storage/mysql" "StorageHost=127.0.0.1" \
    "StoragePort=$database_port" "StorageUser=root" "StorageLoc=slurm" "PidFile=$database/dbd.pid" \
    "LogFile=$database/dbd.log" >"$database/slurmdbd.conf")
  cp "$SLURM_CONF" "$database/slurm.conf"
  for ((number = 0; number < 240; number++)); do
    [ -S "$database/socket" ] && break
    sleep 0.5
  done
  SLURM_CONF=$database/slurm.conf slurmdbd
  for ((number = 0; number < 240; number++)); do
    if grep -q "slurmdbd version .* started" "$database/dbd.log" 2>/dev/null; then
      printf '%s\n' "AccountingStorageType=accounting_storage/slurmdbd" "AccountingStorageHost=127.0.0.1" \
        "AccountingStoragePort=$accounting_port" "AccountingStoragePass=$socket"
      return
    fi
    sleep 0.5
  done
  echo "machines: slurmdbd does not start" >&2
  cat "$database"/*.log >&2
  return 1
}

stop_daemons() {
  local file
  for file; do
    if is_alive "$file"; then kill "$(cat "$file")"; fi
  done
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
  database)
    start_database
    ;;
  down)
    stop_daemons "$ssh"/*.pid "$slurm"/*.pid "$database"/*.pid "$munge"/pid
    sleep 1
    rm -rf "$slurm" "$database"
    ;;
  *)
    sed -n 's/^# \{0,1\}//p' "$0" | sed -n 1,7p
    ;;
esac
