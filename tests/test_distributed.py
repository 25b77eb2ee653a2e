# SPDX-License-Identifier: Apache-2.0
"""How a process finds its job: from whose variables, and with which errors."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys

import pytest
import yaml

from jaxsparse import distributed
from jaxsparse.distributed import Job, job_of
from tests import job

ROOT = pathlib.Path(__file__).parent.parent
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[001-004]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OWN = {"JAXSPARSE_COORDINATOR": "a:1", "JAXSPARSE_NUM_PROCESSES": "4", "JAXSPARSE_PROCESS_ID": "3"}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        (OWN, Job(3, 4, "a:1")),
        (without(OWN, "JAXSPARSE_PROCESS_ID") | {"JOB_COMPLETION_INDEX": "0"}, Job(0, 4, "a:1")),
        ({"JOB_COMPLETION_INDEX": "3"}, None),  # an indexed job of runs that are each on their own
        (SLURM, Job(5, 8, None)),
        (SLURM | OWN, Job(3, 4, "a:1")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (without(SLURM, "SLURM_STEP_NODELIST"), None),  # in a batch script, outside of srun
    ],
)
def test_whose_variables_count(environment, job):
    assert job_of(environment) == job


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (without(OWN, "JAXSPARSE_COORDINATOR"), "is set but JAXSPARSE_COORDINATOR is not"),
        (without(OWN, "JAXSPARSE_NUM_PROCESSES"), "is set but JAXSPARSE_NUM_PROCESSES is not"),
        (without(OWN, "JAXSPARSE_PROCESS_ID"), "is set but JOB_COMPLETION_INDEX is not"),
        (OWN | {"JAXSPARSE_PROCESS_ID": "x"}, "JAXSPARSE_PROCESS_ID must be a number, got 'x'"),
        (OWN | {"JAXSPARSE_PROCESS_ID": "4"}, "must be below JAXSPARSE_NUM_PROCESSES, got 4 and 4"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID must be below SLURM_NTASKS, got 8 and 8"),
    ],
)
def test_a_job_told_in_part_or_wrongly_is_an_error(environment, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        job_of(environment)


def test_a_process_on_its_own_joins_nothing_and_speaks_for_itself():
    assert distributed.initialize() is None
    assert distributed.joined() is None
    assert distributed.is_first()
    assert distributed.exit_from_job(1) == 1


# ---- the start scripts, with a stand-in for the scheduler -------------------------------------

SRUN = """#!{python}
import os, subprocess, sys
options = [a for a in sys.argv[1:] if a.startswith("--")]
assert options[:2] == ["--kill-on-bad-exit=1", "--label"], options
command = [a for a in sys.argv[1:] if a not in options[:2]]
tasks = []
for index in range(2):
    variables = dict(SLURM_PROCID=str(index), SLURM_LOCALID=str(index), SLURM_NTASKS="2",
                     SLURM_STEP_NODELIST="localhost", SLURM_STEP_NUM_NODES="1")
    tasks.append(subprocess.Popen(command, env={{**os.environ, **variables}}))
sys.exit(max(task.wait() for task in tasks))
"""


def program(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def cluster(tmp_path):
    """The environment of a node: `jaxsparse` and a stand-in for `srun` on its PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs / "srun", SRUN.format(python=sys.executable))
    program(programs / "jaxsparse", f'#!/bin/sh\nexec {sys.executable} -m jaxsparse "$@"\n')
    python_path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return {
        **without(os.environ, "XLA_FLAGS"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": python_path,
    }


ARGUMENTS = ["--set", *job.SMALL_LOG]


def check_run(stdout, stderr, folder):
    result = json.loads(stdout.splitlines()[-1])
    assert (result["step"], result["num_samples"]) == (3, 1000)
    assert "2 features on 4 devices" in stderr
    assert (folder / "config.toml").exists()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["num_samples"] for row in rows if row["kind"] == "train") == 3000


@pytest.mark.slow
def test_the_slurm_script_trains_under_a_stand_in_for_slurm(cluster, tmp_path):
    run_dir = tmp_path / "run"
    done = subprocess.run(
        ["bash", str(ROOT / "examples/cluster/slurm.sh"), *ARGUMENTS, "--run-dir", str(run_dir)],
        env={**cluster, "SLURM_JOB_ID": str(os.getpid())},  # jax takes its port from it
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    check_run(done.stdout, done.stderr, run_dir)


@pytest.mark.slow
def test_the_kubernetes_job_finds_itself_with_a_stand_in_for_its_pods(cluster):
    text = (ROOT / "examples/cluster/kubernetes.yaml").read_text()
    service, batch = yaml.safe_load_all(text)
    container = batch["spec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    # What ties the pieces together.
    assert batch["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": batch["metadata"]["name"]}
    name = f"{batch['metadata']['name']}-0.{service['metadata']['name']}"
    assert variables["JAXSPARSE_COORDINATOR"].split(":")[0] == name
    count = int(variables["JAXSPARSE_NUM_PROCESSES"])
    assert batch["spec"]["completions"] == batch["spec"]["parallelism"] == count
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        variables["JAXSPARSE_COORDINATOR"] = f"127.0.0.1:{probe.getsockname()[1]}"
    # `train` as a whole is the SLURM script's test; to join and exchange is all that differs here.
    assert container["command"][:2] == ["jaxsparse", "train"]
    pods = [
        subprocess.Popen(
            [shutil.which("jaxsparse", path=cluster["PATH"]), "check"],
            env={**cluster, **variables, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    told = [pod.communicate(timeout=200) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], told
    right = "collectives between 4 devices of 2 processes are right"
    assert [right in stderr for _, stderr in told] == [True, False]
