"""What begins on a cluster's head for a job that was handed over: the command as it would be typed there.

    python arrival.py VERSION FOLDER KEY WORDS…        in the folder to which Ray has unpacked what came with the job

It travels with the job, and imports nothing of ours but to see whether it is there. Exit code 2: the cluster is not
ready for the job; else the command's own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

FILES, SPEC = "files", "spec.yaml"
KEPT = os.path.join("outputs", ".carried")  # <key>: the files that came with jobs, for them and for their resumes
OF_RAY = "RAY_JOB_CONFIG_JSON_ENV_VAR"
NOT_READY = 2


def main(version: str, folder: str, key: str, words: Sequence[str]) -> None:
    """Become `run` in a folder of the cluster. `version`: of the runner that handed it over; `key`: of the files."""
    refuse_other_runner(version)
    parcel = os.getcwd()
    root = os.path.abspath(os.path.expanduser(folder))
    try:
        os.makedirs(root, exist_ok=True)
        os.chdir(root)
        keep(os.path.join(parcel, FILES), os.path.join(KEPT, key))
    except OSError as error:
        refuse(f"{root}: {error.strerror}; set launch.folder to a folder of the cluster in which Ray's user may write")
    tidy(parcel)
    print(f"arrived  {os.uname().nodename}, in {root}", flush=True)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "runner", "--spec", os.path.join(parcel, SPEC), *words])


def refuse_other_runner(version: str) -> None:
    """End where this Python has no runner, or another one."""
    needed = f"pip install 'posttrain-run[ray-jobs]=={version}' for this Python, on each node"
    try:
        import runner
    except ImportError as error:
        refuse(f"{sys.executable}: {error}: the runner has to be installed on the cluster: {needed}")
    if runner.__version__ != version:
        refuse(f"the cluster has runner {runner.__version__}, and the job comes from {version}: {needed}")


def keep(files: str, place: str) -> None:
    """Copy what came with the job to where its processes and a resume find it; the same files are there only once."""
    if not os.path.isdir(files) or os.path.isdir(place):
        return
    unfinished = f"{place}.{os.getpid()}"
    shutil.copytree(files, unfinished)
    try:
        os.rename(unfinished, place)
    except OSError:  # another job with the same files was faster
        shutil.rmtree(unfinished)
        if not os.path.isdir(place):
            raise


def tidy(parcel: str) -> None:
    """Leave to the job's processes nothing of Ray's own: its parcel is on this node alone, its threads are one."""
    config = json.loads(os.environ.get(OF_RAY, "{}"))
    given = config.get("runtime_env", {}).get("env_vars", {})
    os.environ[OF_RAY] = json.dumps({**config, "runtime_env": {}})
    if "OMP_NUM_THREADS" not in given:
        os.environ.pop("OMP_NUM_THREADS", None)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != parcel]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def refuse(why: str) -> NoReturn:
    """End with a word on what the cluster lacks."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    sys.exit(NOT_READY)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
