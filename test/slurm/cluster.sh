#!/usr/bin/env bash
# A real SLURM of several nodes on this machine, for tests.
#   bash test/slurm/cluster.sh FOLDER NODES COMMAND...
# brings up munge, slurmctld and a slurmd for each of the nodes node1, node2, ..., runs COMMAND in the midst of them,
# and ends with its exit code. Needs root and Debian's slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins, munge,
# iproute2. Logs and spool directories are in FOLDER; so is `pid`, the process to enter: nsenter -a -r -t PID COMMAND.
#   CLUSTER_RATE=20mbit  limits what each node sends
#   CLUSTER_CPUS=2       CPUs that each node claims to have; there are two GPUs, which are none
#
# The cluster has process, mount, network and host names of its own. So it needs no free port, it cannot meet another
# SLURM, and when its first process ends, however that happens, the kernel ends all others and undoes every mount and
# interface: there is nothing to clean up. Each node has a network interface, a host name
# and a /dev/shm of its own.
set -eu

if [ "${CLUSTER_INSIDE:-}" != 1 ]; then
  [ $# -ge 3 ] || { sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0" | head -n -1 >&2; exit 2; }
  [ "$(id -u)" = 0 ] || { echo "cluster.sh: only root can start a SLURM cluster" >&2; exit 2; }
  mkdir -p "$1"
  folder=$(cd "$1" && pwd)
  shift
  export CLUSTER_INSIDE=1
  exec unshare --pid --fork --kill-child --mount --net --uts --ipc bash "$0" "$folder" "$@"
fi

folder=$1 nodes=$2
shift 2
unset CLUSTER_INSIDE
read -r pid _ </proc/self/stat # what the world outside calls this process
mount -t proc proc /proc
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
hostname control
export SLURM_CONF=$folder/slurm.conf
network=10.77.0

# ---------------------------------------------------------------------------------------------------------- the network
echo "127.0.0.1 localhost" >"$folder/hosts"
echo "$network.254 control" >>"$folder/hosts"
ip link set lo up
ip link add nodes type bridge
ip addr add "$network.254/24" dev nodes
ip link set nodes up
for i in $(seq "$nodes"); do
  echo "$network.$i node$i" >>"$folder/hosts"
  ip netns add "node$i"
  ip link add "to$i" type veth peer name eth0 netns "node$i"
  ip link set "to$i" master nodes up
  ip -n "node$i" addr add "$network.$i/24" dev eth0
  ip -n "node$i" link set lo up
  ip -n "node$i" link set eth0 up
  [ -z "${CLUSTER_RATE:-}" ] || tc -n "node$i" qdisc add dev eth0 root tbf rate "$CLUSTER_RATE" burst 64kb latency 50ms
done
mount --bind "$folder/hosts" /etc/hosts

# ---------------------------------------------------------------------------------------------------- the configuration
mkdir -p "$folder/munge" "$folder/state" "$folder/log" "$folder/gpus"
for i in $(seq "$nodes"); do
  mkdir -p "$folder/tmp-node$i"
done
chmod 711 "$folder/munge"
head -c 128 /dev/urandom >"$folder/munge/key"
chmod 600 "$folder/munge/key"
for g in 0 1; do
  [ -e "$folder/gpus/gpu$g" ] || mknod "$folder/gpus/gpu$g" c 1 3
done
echo "NodeName=node[1-$nodes] Name=gpu File=$folder/gpus/gpu[0-1]" >"$folder/gres.conf"
# Newer versions ask for control groups, which a container may not have, unless told not to.
version=$(slurmd -V | sed 's/slurm[^0-9]*\([0-9]*\)\.0*\([0-9]*\).*/\1 \2/')
if [ "${version% *}" -gt 23 ] || [ "$version" = "23 11" ]; then
  echo "CgroupPlugin=disabled" >"$folder/cgroup.conf"
fi
# cred_expire: a job that was requeued waits for as long as the old one's credentials are valid, by default 2 minutes.
cat >"$SLURM_CONF" <<SLURM
ClusterName=test
SlurmctldHost=control($network.254)
SlurmUser=root
AuthInfo=socket=$folder/munge/socket,cred_expire=${CLUSTER_CREDENTIALS:-5}
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
TmpFS=$folder/tmp-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=pmix
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout=${CLUSTER_TIMEOUT:-30}
KillWait=10
GresTypes=gpu
NodeName=node[1-$nodes] NodeAddr=$network.[1-$nodes] CPUs=${CLUSTER_CPUS:-2} Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
SLURM

# ---------------------------------------------------------------------------------------------------------- the daemons
munged --force --foreground --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
  --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
  >"$folder/log/munged.out" 2>&1 &
for _ in $(seq 100); do
  [ ! -S "$folder/munge/socket" ] || break
  sleep 0.05
done
slurmctld -D -c >"$folder/log/slurmctld.out" 2>&1 &
for i in $(seq "$nodes"); do
  nsenter --net="/run/netns/node$i" unshare --uts --mount bash -c "
    hostname node$i
    mount -t tmpfs tmpfs /dev/shm
    exec slurmd -D -c -N node$i" >"$folder/log/slurmd-node$i.out" 2>&1 &
done
up=0
for _ in $(seq 300); do
  up=$(sinfo -hN -o %T 2>/dev/null | grep -c '^idle$' || true)
  [ "$up" != "$nodes" ] || break
  sleep 0.1
done
if [ "$up" != "$nodes" ]; then
  echo "cluster.sh: $up of $nodes nodes are up" >&2
  tail -n 5 "$folder"/log/* >&2
  exit 1
fi
# The scheduler reads its parameters with its first job, and may take a minute for that if it is asked only once. From
# then on it looks at the queue every second.
for _ in $(seq 60); do
  sbatch --quiet --output=/dev/null --wrap=true >/dev/null
  sleep 0.5
  [ -n "$(squeue -h --states=PENDING)" ] || break
done
for _ in $(seq 300); do
  [ -n "$(squeue -h)" ] || break
  sleep 0.1
done
echo "$pid" >"$folder/pid.new"
mv "$folder/pid.new" "$folder/pid"

# What the command leaves behind dies with this process.
status=0
"$@" || status=$?
exit $status
