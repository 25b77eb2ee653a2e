#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One process a GPU on all nodes of a SLURM job:
#
#   sbatch --nodes=4 examples/cluster/slurm.sh RUN.toml --run-dir /shared/runs/a
#
# The processes find each other by SLURM's variables. The run folder and the data have to be on a
# disk that every node sees. `jaxsparse` has to be on the PATH: activate its environment before.

#SBATCH --job-name=jaxsparse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --output=jaxsparse-%j.log
# SIGTERM to the processes two minutes before the time is up.
#SBATCH --signal=TERM@120

set -euo pipefail

# --kill-on-bad-exit: one process failing ends the job. --label: whose line it is.
exec srun --kill-on-bad-exit=1 --label jaxsparse train "$@"
