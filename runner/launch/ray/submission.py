"""Hands a job to a Ray cluster from elsewhere, by its Jobs API, and follows it to its end.

spec ─▶ parcel: spec.yaml, arrival.py, files of this folder ─▶ Ray's head ─▶ arrival ─▶ run --spec spec.yaml
                                                 its log, its exit code ◀── jobs ◀───────┘
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, proxy_bypass, urlopen

from packaging.version import InvalidVersion, Version

from runner import __version__
from runner.carried import carried
from runner.errors import EnvironmentProblem
from runner.launch.ray.config import RayConfig
from runner.launch.ray.parcel import Parcel, in_words, packed
from runner.launch.stages import TRUSTED
from runner.spec.job import JobSpec

HOME = "~/posttrain-run"  # on the cluster, where launch.folder says nothing
KNOCK_S = 10.0
SAVE_S = 600  # that a job which is asked to stop has to save, before Ray kills it
OLDEST = Version("2.60")
INSTALL = "pip install 'posttrain-run[ray-jobs]'"
MISLEADING = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")  # Ray would take these for the address
NAMES = "KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH|AUTHORIZATION|BEARER|HEADERS?|COOKIES?"
SECRET = re.compile(rf"(^|_)(API|ACCESS)?_?({NAMES})(_|$)", re.IGNORECASE)
LOGIN = re.compile(r"://[^/]*@|\b(Bearer|Basic)(\s|%20)+\S{6}", re.IGNORECASE)
OF_HERE = ("PYTHONPATH", "RUNNER_CACHE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy")


def is_handed_over(spec: JobSpec) -> bool:
    """Whether the job is for a cluster that is reached by its web address."""
    return isinstance(spec.launch, RayConfig) and spec.launch.handed_over


def refuse_resume(spec: JobSpec) -> None:
    """Raise EnvironmentProblem where a run that is here is to go on over there."""
    if is_handed_over(spec):
        text = "goes on where its folder is: on a node of the cluster, in the folder that the job's first lines name"
        raise EnvironmentProblem(f"launch.address: a run {text}, type run resume latest; here leave launch.address out")


def submit(spec: JobSpec, typed: Sequence[str], where: Path | None) -> int:
    """Hand the job over, and follow it; returns 0 where it ends well.

    where: --folder, which a job of a cluster does not have. Raises SpecError and DataError for what is wrong here,
    EnvironmentProblem where the cluster does not take it, JobFailed with its exit code, Interrupted at Ctrl-C.
    """
    assert isinstance(spec.launch, RayConfig) and spec.launch.address is not None
    if where is not None:
        raise EnvironmentProblem(
            "--folder is a folder of this machine; launch.folder says where the cluster runs the job"
        )
    address, folder = spec.launch.address.rstrip("/"), spec.launch.folder or HOME
    parcel = packed(spec)
    need_client()
    version = knock(address)
    prepare()
    from runner.launch.ray import jobs

    goes, stays = fit_to_travel(os.environ)
    trust = [word for word in typed if word.lstrip("+") == TRUSTED]
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch, "job.zip")
        parcel.write(package)
        client = jobs.connect(address)
        words = ["python", "arrival.py", __version__, folder, parcel.key, *trust]
        patience = {"RAY_JOB_STOP_WAIT_TIME_S": str(SAVE_S)}
        job = client.submit("exec " + shlex.join(words), package, {**goes, **patience})
    print(_said(job, address, version, parcel, goes, stays), flush=True)
    return client.follow(job, folder)


def _said(
    job: str, address: str, version: str, parcel: Parcel, goes: Mapping[str, str], stays: Mapping[str, str]
) -> str:
    files = f"{len(parcel.files)} file{'' if len(parcel.files) == 1 else 's'}, {in_words(parcel.size)}"
    lines = [f"ray      job {job} is with Ray {version} at {address}; with it: {files if parcel.files else 'no files'}"]
    lines.append(f"carried  of this environment: {', '.join(sorted(goes)) or 'nothing'}")
    if stays:
        lines.append("left     " + "; ".join(f"{name} ({why})" for name, why in sorted(stays.items())))
    logs = f"ray job logs --follow --address {address} {job}"
    lines.append(f"Ctrl-C   ends the job, which saves; a second one leaves it to itself: {logs}")
    return "\n".join(lines)


def fit_to_travel(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What of an environment goes to the cluster, and why of the rest of the allow-list each does not.

    Ray writes what it carries into its logs, which every user of its machine may read, and shows it on its dashboard.
    """
    goes, stays = {}, {}
    for name, value in carried(environment).items():
        if SECRET.search(name) or LOGIN.search(value):
            stays[name] = "a secret; set it where the nodes of the cluster have theirs"
        elif name in OF_HERE or name.lower() in OF_HERE or os.path.isabs(os.path.expanduser(value)):
            stays[name] = "of this machine"
        else:
            goes[name] = value
    return goes, stays


def prepare() -> None:
    """Set what Ray reads when it is imported: the address that was typed counts, and a token that is there is used."""
    for name in MISLEADING:
        os.environ.pop(name, None)
    if token() is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def need_client() -> None:
    """Raise EnvironmentProblem where what speaks with Ray's Jobs API is not installed."""
    missing = [name for name in ("ray", "aiohttp") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(f"launch.address=http://… needs {' and '.join(missing)}: {INSTALL}")


def knock(address: str) -> str:
    """The version of the Ray whose dashboard answers at an address.

    Raises EnvironmentProblem where nobody or somebody else does, where it wants a password, and where it is too old.
    """
    there = f"Ray at {address}{_on_the_way(address)}"
    password = token()
    headers = {"Authorization": f"Bearer {password}"} if password else {}
    try:
        with urlopen(Request(f"{address}/api/version", headers=headers), timeout=KNOCK_S) as answer:
            version = json.loads(answer.read(1 << 16))["ray_version"]
            found = Version(version)
    except HTTPError as error:
        if error.code in (401, 403):
            raise EnvironmentProblem(f"{there}: {_about_password(password)}") from error
        raise EnvironmentProblem(f"{there}: {_somebody_else(f'HTTP {error.code}')}") from error
    except (HTTPException, ValueError, KeyError, TypeError, InvalidVersion) as error:
        raise EnvironmentProblem(f"{there}: {_somebody_else('no version of Ray')}") from error
    except OSError as error:
        advice = "the head needs ray[default], and to be heard `ray start --head --dashboard-host=ITS-ADDRESS`"
        reason = getattr(error, "reason", error)
        raise EnvironmentProblem(f"{there}: nobody answers ({reason}); {advice}") from error
    if found < OLDEST:
        raise EnvironmentProblem(f"{there} is Ray {version}, and {OLDEST} or newer is needed: {INSTALL} on its nodes")
    return str(version)


def _on_the_way(address: str) -> str:
    """Who is asked first, as who types an address does not think of it."""
    found = urlsplit(address)
    if found.scheme not in getproxies() or proxy_bypass(found.netloc):
        return ""
    return f" (by way of {found.scheme}_proxy; no_proxy={found.hostname} goes around it)"


def _somebody_else(what: str) -> str:
    return f"who answers is not Ray's dashboard ({what}); its port is 8265 unless `ray start` was told otherwise"


def _about_password(password: str | None) -> str:
    said = "does not take this machine's token" if password else "wants a token"
    return f"{said}: type export RAY_AUTH_TOKEN=… with what `ray get-auth-token` says on its head node"


def token() -> str | None:
    """The password that Ray's programs would use here."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    said = os.environ.get("RAY_AUTH_TOKEN") or (path.read_text(encoding="utf-8") if path.is_file() else "")
    return said.strip() or None
