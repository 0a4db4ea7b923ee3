"""The mistakes of an NPU's environment: how each is made, and the check that has to name it with what fixes it."""

from __future__ import annotations

import dataclasses
import shutil

from runner.tools.doctor.cann import KERNELS
from runner.tools.doctor.report import CheckStatus
from runner.tools.doctor.system_info import CommandResult
from tests.tools.doctor.changes import (
    answering,
    asked,
    both,
    built_for,
    installed,
    removed,
    variables,
    without,
    written,
)
from tests.tools.doctor.machines import GB, commands

PROBLEM, WARNING, UNKNOWN = CheckStatus.PROBLEM, CheckStatus.WARNING, CheckStatus.UNKNOWN
NO_LIBRARY = """Traceback (most recent call last):
  File "torch/__init__.py", line 3020, in _import_device_backends
ImportError: libhccl.so: cannot open shared object file: No such file or directory

The above exception was the direct cause of the following exception:

RuntimeError: Failed to load the backend extension: torch_npu.
"""
HOME = "/usr/local/Ascend/cann-9.1.0"
SERVING = {"vllm": "0.23.0", "vllm_ascend": "0.23.0"}

MISTAKES = {
    "torch and torch_npu of two releases": (
        installed(torch="2.13.0+cpu"),
        ("torch, torch_npu", PROBLEM, "must be the same release", "torch==2.10.0 torch_npu==2.10.0.post4"),
    ),
    "torch_npu is missing on x86_64": (
        both(
            installed(torch_npu=None),
            lambda machine: dataclasses.replace(machine, arch="x86_64"),
        ),
        ("torch, torch_npu", PROBLEM, "without torch_npu", "torch==2.10.0+cpu torch_npu==2.10.0.post4"),
    ),
    "torch_npu is missing": (
        installed(torch_npu=None),
        ("torch, torch_npu", PROBLEM, "without torch_npu", "torch_npu==2.10.0.post4"),
    ),
    "torch_npu for another CANN": (
        installed(torch_npu="2.10.0.post2"),
        ("torch_npu, CANN", PROBLEM, "built for CANN 9.0.1 or 9.0.0", "torch_npu==2.10.0.post4"),
    ),
    "a CANN that no table has": (
        both(
            written(f"{HOME}/aarch64-linux/ascend_toolkit_install.info", "version=9.2.0\n"),
            written(f"{HOME}/aarch64-linux/ascend_ops_install.info", "version=9.2.0\n"),
        ),
        ("torch_npu, CANN", UNKNOWN, "does not have this CANN", ""),
    ),
    "torch_npu that no table has": (
        installed(torch="2.13.0", torch_npu="2.13.0"),
        ("torch_npu, CANN", UNKNOWN, "does not have this torch_npu", ""),
    ),
    "vllm of another number than vllm-ascend": (
        installed(vllm="0.33.0", vllm_ascend="0.23.0"),
        ("vllm, vllm-ascend", PROBLEM, "needs vllm 0.23.0", "vllm==0.23.0"),
    ),
    "vllm-ascend without vllm": (
        installed(vllm_ascend="0.23.0"),
        ("vllm, vllm-ascend", PROBLEM, "without vllm", "vllm==0.23.0"),
    ),
    "vllm-ascend beside another torch_npu": (
        installed(torch_npu="2.10.0.post2", **SERVING),
        ("vllm, vllm-ascend", WARNING, "torch_npu 2.10.0.post4, not 2.10.0.post2", ""),
    ),
    "vllm-ascend that no table has": (
        installed(vllm="0.31.0", vllm_ascend="0.31.0"),
        ("vllm, vllm-ascend", UNKNOWN, "not in the table", ""),
    ),
    "a wheel for A3 on A2": (
        both(installed(**SERVING), built_for("A3")),
        ("wheel, chip", PROBLEM, "built for A3, and this is a Ascend910B3", "SOC_VERSION=ascend910b3"),
    ),
    "vllm-ascend without ATB": (
        both(
            installed(**SERVING),
            without("ATB_HOME_PATH"),
            lambda machine: shutil.rmtree(machine.path("/usr/local/Ascend/nnal")) or machine,
        ),
        ("ATB", PROBLEM, "no ATB in /usr/local/Ascend/nnal/atb", "Ascend-cann-nnal"),
    ),
    "the ATB of vllm-ascend was not sourced": (
        both(installed(**SERVING), without("ATB_HOME_PATH")),
        ("ATB", PROBLEM, "ATB_HOME_PATH is not set", "source /usr/local/Ascend/nnal/atb/set_env.sh"),
    ),
    "ATB of the old C++ ABI": (
        variables(ATB_HOME_PATH="/usr/local/Ascend/nnal/atb/9.1.0/atb/cxx_abi_0"),
        ("ATB", PROBLEM, "undefined symbols", "--cxx_abi=1"),
    ),
    "an engine is asked for, and vllm-ascend is missing": (
        asked(sampler="vllm"),
        ("vllm, vllm-ascend", PROBLEM, "vllm-ascend is not installed", "vllm-ascend==0.23.0 -c constraints/npu-vllm"),
    ),
    "a vLLM with holes": (
        installed(vllm="0.13.0", vllm_ascend="0.13.0"),
        ("vLLM", WARNING, "CVE-2026-22807", "vllm-ascend==0.23.0"),
    ),
    "a vLLM with holes is asked for": (
        both(installed(vllm="0.13.0", vllm_ascend="0.13.0"), asked(sampler="vllm")),
        ("vLLM", PROBLEM, "older than 0.14", "vllm-ascend==0.23.0"),
    ),
    "a vLLM of transformers 4": (
        both(installed(vllm="0.18.0", vllm_ascend="0.18.0"), asked(sampler="vllm")),
        ("vLLM", PROBLEM, "sampler=server", "vllm-ascend==0.23.0"),
    ),
    "a vLLM of tomorrow": (
        both(installed(vllm="0.40.0"), asked(sampler="vllm")),
        ("vLLM", UNKNOWN, "newer than 0.33", ""),
    ),
    "weights of an engine in another layout": (
        both(installed(**SERVING), asked(sampler="vllm"), variables(VLLM_ASCEND_ENABLE_NZ="1")),
        ("engine on NPU", PROBLEM, "VLLM_ASCEND_ENABLE_NZ=1 is exported", "unset VLLM_ASCEND_ENABLE_NZ"),
    ),
    "an engine whose workers would be forked": (
        both(installed(**SERVING), asked(sampler="vllm"), variables(VLLM_WORKER_MULTIPROC_METHOD="fork")),
        ("engine on NPU", PROBLEM, "cannot fork", "unset VLLM_WORKER_MULTIPROC_METHOD"),
    ),
    "an engine that is to sleep in segments that grow": (
        both(
            installed(**SERVING),
            asked(sampler="vllm"),
            variables(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"),
        ),
        ("engine on NPU", PROBLEM, "cannot sleep with it", "unset PYTORCH_NPU_ALLOC_CONF, or sampler.sleep=0"),
    ),
    "too little shared memory for an engine's weights": (
        both(asked(sampler="vllm"), lambda machine: dataclasses.replace(machine, total_bytes=lambda path: 8 * GB)),
        ("shared memory", WARNING, "8.0 GB; weights for engines", "size=64G /dev/shm"),
    ),
    "Ray is asked for, and is missing": (
        asked(launch="ray"),
        ("Ray", PROBLEM, "ray is not installed", "posttrain-run[ray]"),
    ),
    "an older Ray": (
        both(installed(ray="2.40.0"), asked(launch="ray")),
        ("Ray", PROBLEM, "it must be at least 2.60", "posttrain-run[ray]"),
    ),
    "a Ray that shows every process all chips": (
        both(installed(ray="2.60.0"), variables(RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES="1")),
        ("Ray", WARNING, "would use the same chips", "unset RAY_EXPERIMENTAL_NOSET"),
    ),
    "a Python that torch_npu has no wheel for": (
        lambda machine: dataclasses.replace(installed(torch="2.10.0")(machine), python=(3, 14, 0)),
        ("Python", PROBLEM, "torch-npu 2.10.0.post4 needs 3.10 to 3.13", "python3.11"),
    ),
    "a Python that a later wheel of the same release has": (
        lambda machine: dataclasses.replace(installed(torch="2.7.1", torch_npu="2.7.1")(machine), python=(3, 12, 0)),
        ("Python", PROBLEM, "torch-npu 2.7.1 needs 3.9 to 3.11", "python3.11"),
    ),
    "two allocator variables": (
        variables(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="expandable_segments:True"),
        ("allocator", PROBLEM, "are both set", "unset PYTORCH_NPU_ALLOC_CONF"),
    ),
    "allocator settings that exclude one another": (
        variables(PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:128,expandable_segments:True"),
        ("allocator", PROBLEM, "excludes max_split_size_mb", "export"),
    ),
    "an allocator setting twice": (
        variables(PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:128,max_split_size_mb:64"),
        ("allocator", PROBLEM, "max_split_size_mb is listed twice", "export"),
    ),
    "an allocator setting without a value": (
        variables(PYTORCH_ALLOC_CONF="expandable_segments"),
        ("allocator", PROBLEM, "not key:value", "expandable_segments:True"),
    ),
    "EVENT below EXEC": (
        variables(HCCL_EXEC_TIMEOUT="3600", HCCL_EVENT_TIMEOUT="1868"),
        ("HCCL timeouts", PROBLEM, "must be above", "export HCCL_EVENT_TIMEOUT=3672"),
    ),
    "EXEC raised, EVENT left at its default": (
        variables(HCCL_EXEC_TIMEOUT="7200"),
        ("HCCL timeouts", PROBLEM, "HCCL_EVENT_TIMEOUT=1868", "export HCCL_EVENT_TIMEOUT"),
    ),
    "EVENT above EXEC, but not above what EXEC is counted as": (
        variables(HCCL_EXEC_TIMEOUT="1800", HCCL_EVENT_TIMEOUT="1830"),
        ("HCCL timeouts", PROBLEM, "up to 1836", "export HCCL_EVENT_TIMEOUT=1904"),
    ),
    "CONNECT out of range": (
        variables(HCCL_CONNECT_TIMEOUT="60"),
        ("HCCL timeouts", PROBLEM, "outside 120", "export HCCL_CONNECT_TIMEOUT=600"),
    ),
    "a time-out that is no number": (
        variables(HCCL_CONNECT_TIMEOUT="10min"),
        ("HCCL timeouts", PROBLEM, "not an integer", "unset HCCL_CONNECT_TIMEOUT"),
    ),
    "EXEC = for ever": (
        variables(HCCL_EXEC_TIMEOUT="0"),
        ("HCCL timeouts", WARNING, "not support 0 (wait forever)", "HCCL_EXEC_TIMEOUT=7208"),
    ),
    "EVENT equal to EXEC": (
        variables(HCCL_EXEC_TIMEOUT="3604", HCCL_EVENT_TIMEOUT="3604"),
        ("HCCL timeouts", PROBLEM, "must be above", "export HCCL_EVENT_TIMEOUT"),
    ),
    "a network interface that is not there": (
        both(written("/sys/class/net/eth0/mtu", "1500"), variables(HCCL_SOCKET_IFNAME="enp7")),
        ("HCCL network", PROBLEM, "matches no network interface here (eth0)", "ip -brief address"),
    ),
    "an address that is none": (
        variables(HCCL_IF_IP="10.0.0"),
        ("HCCL network", PROBLEM, "HCCL_IF_IP=10.0.0 is not an address", "unset HCCL_IF_IP"),
    ),
    "a buffer of no size": (
        variables(HCCL_BUFFSIZE="200M"),
        ("other variables", PROBLEM, "HCCL_BUFFSIZE=200M is not an integer", "unset HCCL_BUFFSIZE"),
    ),
    "a queue that there is not": (
        variables(TASK_QUEUE_ENABLE="3"),
        ("other variables", PROBLEM, "known: 0, 1, 2", "unset TASK_QUEUE_ENABLE"),
    ),
    "blocking launches left on": (
        variables(ASCEND_LAUNCH_BLOCKING="1"),
        ("other variables", WARNING, "only for debugging", "unset ASCEND_LAUNCH_BLOCKING"),
    ),
    "a lost peer that nobody notices": (
        variables(TORCH_HCCL_ASYNC_ERROR_HANDLING="0"),
        ("other variables", WARNING, "waits forever", "unset TORCH_HCCL_ASYNC_ERROR_HANDLING"),
    ),
    "torch_npu not loaded by torch": (
        variables(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        ("other variables", WARNING, "import torch_npu themselves", "unset TORCH_DEVICE_BACKEND_AUTOLOAD"),
    ),
    "a value HCCL does not document": (
        variables(HCCL_DETERMINISTIC="1"),
        ("other variables", WARNING, "known: true, false, strict", "unset HCCL_DETERMINISTIC"),
    ),
    "numbers that saturate": (
        variables(INF_NAN_MODE_ENABLE="0"),
        ("other variables", WARNING, "no check detects an overflow", "unset INF_NAN_MODE_ENABLE"),
    ),
    "two names of one switch": (
        variables(HCCL_ASYNC_ERROR_HANDLING="0", TORCH_HCCL_ASYNC_ERROR_HANDLING="1"),
        ("other variables", WARNING, "the older name", "unset HCCL_ASYNC_ERROR_HANDLING"),
    ),
    "visible devices beyond the count": (
        variables(ASCEND_RT_VISIBLE_DEVICES="0,1,3,4"),
        ("visible devices", PROBLEM, "the devices here are 0 to 3, so 4 is silently ignored", "=0,1,3"),
    ),
    "a visible device twice": (
        variables(ASCEND_RT_VISIBLE_DEVICES="0,0"),
        ("visible devices", PROBLEM, "0 is listed twice", "export"),
    ),
    "a visible device that is no number": (
        variables(ASCEND_RT_VISIBLE_DEVICES="0-3"),
        ("visible devices", PROBLEM, "'0-3' is not a device number", "export"),
    ),
    "no visible device": (
        variables(ASCEND_RT_VISIBLE_DEVICES=""),
        ("visible devices", PROBLEM, "no device is visible", "unset ASCEND_RT_VISIBLE_DEVICES"),
    ),
    "visible devices in a variable that nobody reads": (
        variables(NPU_VISIBLE_DEVICES="2,3"),
        ("visible devices", PROBLEM, "NPU_VISIBLE_DEVICES=2,3 hides no card", "export ASCEND_RT_VISIBLE_DEVICES=2,3"),
    ),
    "no CANN": (
        both(
            lambda machine: shutil.rmtree(machine.path("/usr/local/Ascend/cann-9.1.0")) or machine,
            without("ASCEND_HOME_PATH"),
        ),
        ("CANN", PROBLEM, "2.10.0.post4 was built for CANN 9.1.0", "Ascend-cann-toolkit_9.1.0_linux-aarch64.run"),
    ),
    "no operators": (
        both(
            lambda machine: shutil.rmtree(machine.path(f"{HOME}/{KERNELS}")) or machine,
            removed(f"{HOME}/aarch64-linux/ascend_ops_install.info"),
        ),
        ("CANN operators", PROBLEM, "has no operators", "Ascend-cann-910b-ops_9.1.0_linux-aarch64.run"),
    ),
    "operators of another release than the toolkit": (
        written(f"{HOME}/aarch64-linux/ascend_ops_install.info", "version=9.0.0\n"),
        ("CANN operators", PROBLEM, "operators 9.0.0 and toolkit 9.1.0", "Ascend-cann-910b-ops_9.1.0"),
    ),
    "operators of another chip": (
        lambda machine: (
            machine.path(f"{HOME}/{KERNELS}/ascend910b").rename(machine.path(f"{HOME}/{KERNELS}/ascend910_93"))
            and machine
        ),
        ("CANN operators", PROBLEM, "are for ascend910_93, but this is Ascend910B3", "Ascend-cann-910b-ops"),
    ),
    "a package that CANN's compiler imports": (
        installed(decorator=None, attrs=None),
        (
            "CANN's Python",
            PROBLEM,
            "needs attrs, decorator: not installed",
            "pip install attrs 'decorator>=4.4.0'",
        ),
    ),
    "CANN's compiler is not on PYTHONPATH": (
        variables(PYTHONPATH="/somewhere/else"),
        ("CANN's Python", PROBLEM, "is not on PYTHONPATH", f"source {HOME}/set_env.sh"),
    ),
    "two CANNs named": (
        both(written("/opt/cann-8/set_env.sh", ""), variables(ASCEND_TOOLKIT_HOME="/opt/cann-8")),
        ("CANN environment", WARNING, "ASCEND_TOOLKIT_HOME=/opt/cann-8: two CANNs are mixed", "set_env.sh"),
    ),
    "the folder of operators is not named": (
        without("ASCEND_OPP_PATH"),
        ("CANN environment", WARNING, "ASCEND_OPP_PATH is not set", f"source {HOME}/set_env.sh"),
    ),
    "set_env.sh was not sourced": (
        without("ASCEND_HOME_PATH", "LD_LIBRARY_PATH"),
        ("CANN environment", PROBLEM, "was not sourced", "source /usr/local/Ascend/cann-9.1.0/set_env.sh"),
    ),
    "the libraries are not on LD_LIBRARY_PATH": (
        variables(LD_LIBRARY_PATH="/usr/local/Ascend/driver/lib64"),
        ("CANN environment", PROBLEM, "no folder of LD_LIBRARY_PATH has libhccl.so", "set_env.sh"),
    ),
    "ASCEND_HOME_PATH is empty": (
        variables(ASCEND_HOME_PATH=""),
        ("CANN environment", PROBLEM, "was not sourced", "source /usr/local/Ascend/cann-9.1.0/set_env.sh"),
    ),
    "ASCEND_HOME_PATH leads nowhere": (
        variables(ASCEND_HOME_PATH="/opt/cann"),
        ("CANN environment", PROBLEM, "/opt/cann is not a folder", "set_env.sh"),
    ),
    "two CANNs mixed": (
        both(
            written("/opt/cann-8/lib64/libhccl.so", ""),
            variables(LD_LIBRARY_PATH="/opt/cann-8/lib64:/usr/local/Ascend/cann-9.1.0/lib64"),
        ),
        ("CANN environment", WARNING, "two CANNs are mixed", "set_env.sh"),
    ),
    "torch_npu cannot be loaded": (
        answering(CommandResult(1, "", NO_LIBRARY)),
        ("import torch", PROBLEM, "ImportError: libhccl.so", "source /usr/local/Ascend/cann-9.1.0/set_env.sh"),
    ),
    "torch_npu of another ABI": (
        answering(CommandResult(1, "", "ImportError: libtorch_npu.so: undefined symbol: _ZN3c10")),
        ("import torch", PROBLEM, "undefined symbol", "docs/npu-versions.md"),
    ),
    "import torch aborts": (
        answering(CommandResult(-6, "", "Fatal Python error: Aborted")),
        ("import torch", PROBLEM, "Aborted", "run doctor device=npu --no-trial"),
    ),
    "torch_npu without torch": (
        installed(torch=None),
        ("torch, torch_npu", PROBLEM, "torch is not installed", "pip install"),
    ),
    "a user outside the group": (
        lambda machine: dataclasses.replace(machine, may=lambda path, mode: "davinci" not in path.name),
        ("device files", PROBLEM, "only for root and group HwHiAiUser", "sudo usermod -aG HwHiAiUser $USER"),
    ),
    "a user outside the group that the driver was installed for": (
        both(
            written("/etc/ascend_install.info", "UserName=HwHiAiUser\nUserGroup=npuusers\n"),
            lambda machine: dataclasses.replace(machine, may=lambda path, mode: path.name != "devmm_svm"),
        ),
        ("device files", PROBLEM, "no permission for /dev/devmm_svm", "sudo usermod -aG npuusers $USER"),
    ),
    "a container whose user is not in the group": (
        both(
            written("/.dockerenv", ""),
            lambda machine: dataclasses.replace(machine, may=lambda path, mode: "davinci" not in path.name),
        ),
        ("device files", PROBLEM, "this container's user is not in it", "docker run --group-add"),
    ),
    "no device files": (
        removed(*(f"/dev/davinci{number}" for number in range(4))),
        ("device files", PROBLEM, "no /dev/davinci0", "npu-driver"),
    ),
    "a container without a manager device": (
        both(written("/.dockerenv", ""), removed("/dev/devmm_svm")),
        ("device files", PROBLEM, "no /dev/devmm_svm", "--device /dev/devmm_svm"),
    ),
    "a container without mounts": (
        both(written("/.dockerenv", ""), written("/etc/ascend_install.info", "")),
        ("container mounts", PROBLEM, "without /usr/local/dcmi", "-v /usr/local/dcmi:/usr/local/dcmi"),
    ),
    "firmware that the driver does not take": (
        written("/usr/local/Ascend/firmware/version.info", "Version=9.1.0.1.100\n"),
        ("driver, firmware", PROBLEM, "supports firmware 6.4.0 to 6.4.99 or 7.0.0 to 8.9.9", "npu-firmware"),
    ),
    "no driver": (
        removed("/usr/local/Ascend/driver/version.info"),
        ("driver, firmware", PROBLEM, "no /usr/local/Ascend/driver/version.info", "npu-driver"),
    ),
    "npu-smi cannot reach the driver": (
        lambda machine: dataclasses.replace(machine, run=commands("unreachable")),
        ("npu-smi", PROBLEM, "-8005", "HwHiAiUser"),
    ),
    "fewer device files than chips": (
        removed("/dev/davinci3"),
        ("numbering", WARNING, "npu-smi lists 4 chips, /dev has 3", ""),
    ),
    "a disk that is full": (
        lambda machine: dataclasses.replace(machine, free_bytes=lambda path: 10**6),
        ("disk", PROBLEM, "not enough for any checkpoint", "free some space"),
    ),
    "Docker's shared memory": (
        both(
            written("/.dockerenv", ""),
            lambda machine: dataclasses.replace(machine, total_bytes=lambda path: 64 * 10**6),
        ),
        ("shared memory", WARNING, "64 MB", "--shm-size=16g"),
    ),
    "a variable of W&B that the job overrules": (
        variables(WANDB_MODE="online", WANDB_DIR="/data"),
        ("W&B", WARNING, "WANDB_MODE=online, WANDB_DIR=/data: no effect", "unset WANDB_MODE WANDB_DIR"),
    ),
    "the antlr of math-verify's extra": (
        installed(antlr4_python3_runtime="4.13.2"),
        ("antlr", PROBLEM, "Hydra needs 4.9", "antlr4-python3-runtime==4.9.3"),
    ),
}
