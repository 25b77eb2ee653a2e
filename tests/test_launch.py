# SPDX-License-Identifier: Apache-2.0
"""Jobs on one machine: whose line is whose, one end for all, signals, nothing left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxsparse import launch as launching
from jaxsparse.cli import main
from jaxsparse.launch import launch
from tests import job

FAST_S = 20
"""No more than this may pass where a job is to end at once; these processes do not import jax."""


def run(program, num_processes=2, devices=1):
    """Exit code, stdout and stderr of a Python program in several processes."""
    out, err = io.BytesIO(), io.BytesIO()
    start = time.monotonic()
    code = launch([sys.executable, "-c", program], num_processes, devices, out=out, err=err)
    assert time.monotonic() - start < FAST_S
    return code, out.getvalue().decode(), err.getvalue().decode()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_lines_say_whose_they_are_and_the_result_is_process_0s():
    code, out, err = run(
        "import os, sys; me = os.environ['JAXSPARSE_PROCESS_ID']\n"
        "print('[Gloo] Rank 0 is connected to 1 peer ranks.')\n"
        "print('result of', me); print('progress of', me, file=sys.stderr)\n"
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[1] result of 1", "result of 0"]
    assert sorted(err.splitlines()) == ["[0] progress of 0", "[1] progress of 1"]


def test_every_process_is_told_its_place_and_its_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_other=1")
    names = ("JAXSPARSE_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS", "XLA_FLAGS")
    code, out, _ = run(f"import os; print(*(os.environ[n] for n in {names}))", 3, 2)
    assert code == 0
    wanted = ["3 2 0,1 --xla_other=1", "[1] 3 2 2,3 --xla_other=1", "[2] 3 2 4,5 --xla_other=1"]
    assert sorted(out.splitlines()) == wanted


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_process_failing_ends_the_others_and_what_they_started(culprit, monkeypatch):
    monkeypatch.setattr(launching, "LAST_WORDS_S", 0.5)
    code, out, err = run(
        "import os, subprocess, sys, time\n"
        f"if os.environ['JAXSPARSE_PROCESS_ID'] == '{culprit}':\n"
        "    time.sleep(.5); sys.exit('the disk is full')\n"
        "print('child', subprocess.Popen(['sleep', '60']).pid)\n"
        "time.sleep(60)\n"
    )
    assert code == 1
    assert f"[{culprit}] the disk is full" in err
    told = f"jaxsparse launch: process {culprit} ended with code 1; ended the 1 still running"
    assert told in err
    child = int(out.split("child ")[1])
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_process_killed_by_a_signal_is_named_so():
    code, _, err = run(
        "import os, signal, time\n"
        "if os.environ['JAXSPARSE_PROCESS_ID'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1)\n"
    )
    assert code == 128 + signal.SIGKILL
    assert "jaxsparse launch: process 1 ended with signal SIGKILL\n" in err


def test_a_process_deaf_to_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(launching, "LAST_WORDS_S", 0.2)
    monkeypatch.setattr(launching, "TERM_S", 0.5)
    code, _, _ = run(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['JAXSPARSE_PROCESS_ID'] == '1': time.sleep(.5); sys.exit(2)\n"
        "time.sleep(60)\n"
    )
    assert code == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded_and_the_job_ends_as_its_processes_do(number):
    program = (
        "import signal, sys, time\n"
        "def end(*_): print('saved', file=sys.stderr); sys.exit(0)\n"
        f"signal.signal({int(number)}, end)\n"
        "print('ready', file=sys.stderr)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", job.LAUNCH, "2", "1", sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        lines = {launcher.stderr.readline() for _ in range(2)}
        assert lines == {"[0] ready\n", "[1] ready\n"}
        launcher.send_signal(number)
        assert sorted(launcher.stderr.read().splitlines()) == ["[0] saved", "[1] saved"]
        assert launcher.wait(FAST_S) == 0


def test_a_signal_reaches_a_process_that_is_being_started(monkeypatch):
    """It may write that it is ready before the launcher has listed it."""
    program = (
        "import signal, sys, time\n"
        "def end(*_): print('saved', file=sys.stderr); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "time.sleep(60)\n"
    )
    start, err = launching._start, io.BytesIO()

    def start_and_be_signalled(command, index, *args):
        child = start(command, index, *args)
        while b"[%d] ready" % index not in err.getvalue():
            time.sleep(0.01)
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(launching, "_start", start_and_be_signalled)
    begun = time.monotonic()
    assert launch([sys.executable, "-c", program], 2, 1, out=io.BytesIO(), err=err) == 0
    assert time.monotonic() - begun < FAST_S
    words = sorted(err.getvalue().decode().splitlines())
    assert words == ["[0] ready", "[0] saved", "[1] ready", "[1] saved"]


@pytest.mark.parametrize(("counts", "name"), [((0, 1), "num_processes"), ((1, 0), "devices_per")])
def test_counts_below_one_are_refused(counts, name):
    with pytest.raises(ValueError, match=f"launch: {name}.* must be at least 1, got 0"):
        launch(["true"], *counts)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["launch", "-n", "2"], "launch: what to run is missing; write it behind --"),
        (["launch", "--", "plan"], "launch: runs one of train, eval, check, got 'plan'"),
        (["launch", "-n", "0", "--", "train"], "launch: num_processes must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_of_the_command_exit_2(capsys, arguments, text):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


# ---- the whole command ------------------------------------------------------------------------


def jaxsparse(*arguments, timeout=150):
    return subprocess.run(
        [sys.executable, "-m", "jaxsparse", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )


@pytest.mark.slow
def test_the_collectives_are_checked_by_the_command():
    done = jaxsparse(
        "launch", "-n", "2", "--devices-per-process", "2", "--", "check", "--set", *job.SMALL_LOG
    )
    assert done.returncode == 0, done.stderr
    assert "[0] collectives between 4 devices of 2 processes are right" in done.stderr
    assert "[1]" not in done.stderr


@pytest.mark.slow
def test_bad_input_is_told_by_process_and_exits_2(tmp_path):
    """The first to tell ends the job, which may leave the other no time to join and tell too."""
    missing = str(tmp_path / "none.toml")
    done = jaxsparse("launch", "-n", "2", "--", "train", missing)
    assert done.returncode == 2
    told = [line for line in done.stderr.splitlines() if "no such file" in line]
    both = [f"[{i}] jaxsparse: process {i}: error: {missing}: no such file" for i in (0, 1)]
    assert told and set(told) <= set(both), done.stderr


@pytest.mark.slow
def test_sigterm_saves_a_job_at_one_step_and_it_goes_on_from_there(tmp_path):
    arguments = ["launch", "-n", "2", "--", "train", "--run-dir", str(tmp_path)]
    arguments += ["--set", *job.SMALL_LOG]
    command = [sys.executable, "-m", "jaxsparse", *arguments]
    root = os.path.dirname(os.path.dirname(__file__))
    with subprocess.Popen(
        [*command, "train.epochs=1000", "train.log_every=2"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stderr is not None
        told = []
        for line in launcher.stderr:
            told.append(line)
            if "[0] train step" in line:
                break
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, "".join(told) + err
    first = json.loads(out.splitlines()[-1])
    assert first["interrupted"]
    again = jaxsparse(*arguments, f"train.steps={first['step'] + 3}", "--resume", "must")
    assert again.returncode == 0, again.stderr
    assert f"[0] resumed at step {first['step']}" in again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["step"] == first["step"] + 3
