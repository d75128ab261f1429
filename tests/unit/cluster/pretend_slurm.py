"""Slurm's commands as far as submitit calls them: jobs are processes of this machine. Linked under each one's name.

Their folder has a file for each job (`12_0.json`: state, process). While a file `hold` is there,
jobs stay pending.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PLACE = Path(sys.argv[0]).absolute().parent
COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def put(job, **what):
    """Note the state of a job, atomically."""
    (PLACE / f".{job}").write_text(json.dumps({"JobID": job, "NodeList": "here", **what}))
    (PLACE / f".{job}").replace(PLACE / f"{job}.json")


def state(job):
    return json.loads((PLACE / f"{job}.json").read_text())


def sbatch(script):
    """Take a job or an array in, and leave a process that does it."""
    text = Path(script).read_text()
    number = str(len([*PLACE.glob("*.sbatch")]) + 1)
    (PLACE / f"{number}.sbatch").write_text(text)
    array = re.search(r"--array=0-(\d+)%(\d+)", text)
    tasks = [f"{number}_{n}" for n in range(int(array[1]) + 1)] if array else [number]
    for job in tasks:
        put(job, State="PENDING")
    command = [sys.executable, __file__, "serve", array[2] if array else "1", *tasks]
    with open(PLACE / "log", "a") as log:
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    print(f"Submitted batch job {number}")


def serve(at_once, *tasks):
    """Do the tasks of an array, some at a time."""
    waiting, running = list(tasks), {}
    while waiting or running:
        if not (PLACE / "hold").exists():
            while waiting and len(running) < int(at_once):
                job = waiting.pop(0)
                if state(job)["State"] == "PENDING":
                    running[job] = start(job)
        for job, process in [*running.items()]:
            if process.poll() is not None:
                del running[job]
                if (found := state(job)["State"]) == "RUNNING":
                    put(job, State="FAILED" if process.returncode else "COMPLETED")
                elif found == "REQUEUED":
                    put(job, State="PENDING")
                    waiting.append(job)
        time.sleep(0.05)


def start(job):
    number, _, task = job.partition("_")
    more = {"ARRAY_JOB_ID": number, "ARRAY_TASK_ID": task} if task else {}
    more |= {
        "JOB_ID": job.replace("_", "0000"),
        "NTASKS": "1",
        "JOB_NUM_NODES": "1",
        "JOB_NODELIST": "here",
    }
    more |= {"NODEID": "0", "PROCID": "0", "LOCALID": "0"}
    environment = os.environ | {f"SLURM_{key}": value for key, value in more.items()}
    put(job, State="RUNNING")
    process = subprocess.Popen(
        ["bash", PLACE / f"{number}.sbatch"], env=environment, start_new_session=True
    )
    put(job, State="RUNNING", process=process.pid)
    return process


def srun(*words):
    """Run the command after the options, with its output in the files named."""
    words, files = list(words), {}
    while words[0].startswith("--"):
        option = words.pop(0)
        if option != "--unbuffered":
            files[option] = words.pop(0)
    own = {"%A": "ARRAY_JOB_ID", "%a": "ARRAY_TASK_ID", "%j": "JOB_ID", "%t": "PROCID"}
    for option, name in files.items():
        for mark, key in own.items():
            name = name.replace(mark, os.environ.get(f"SLURM_{key}", ""))
        os.dup2(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1 if option == "--output" else 2
        )
    os.execvp(words[0], words)


def sacct(*words):
    asked = {words[n + 1].partition("_")[0] for n, word in enumerate(words) if word == "-j"}
    print("JobID|State|NodeList")
    for path in sorted(PLACE.glob("*.json")):
        job = json.loads(path.read_text())
        if job["JobID"].partition("_")[0] in asked:
            print(f"{job['JobID']}|{job['State']}|{job['NodeList']}")


def scancel(job, option="", name=""):
    """End a job; or send a signal to what it started, as when its time is over."""
    found = state(job)
    if option == "--signal":
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _, parent, group = path.read_text().rpartition(")")[2].split()[:3]
                if (
                    int(group) == found["process"]
                    and int(path.parent.name) != int(group)
                    and parent == group
                ):
                    os.kill(int(path.parent.name), signal.Signals[f"SIG{name}"])
        return
    put(job, State="CANCELLED by 0")
    if "process" in found:
        os.killpg(found["process"], signal.SIGKILL)


def scontrol(verb, job):
    """Put a job back into the queue, where it waits until its process has ended."""
    assert verb == "requeue"
    put(job, State="REQUEUED")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        globals()[Path(sys.argv[0]).name](*sys.argv[1:])
