"""What a measured number depends on besides the code under test: a part of every row."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "triton")


def commit() -> str:
    """Of this checkout, with a + for changes; "unknown" outside of one."""
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _output("git", "status", "--porcelain") else "")


def of_cpu() -> dict[str, Any]:
    """The row's part for what ran on this machine's processor."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "host_kind": f"cpu-{platform.machine()}-{os.cpu_count()}cores",
        **_software(commit()),
    }


def of_gpu(device: torch.device, commit_name: str) -> dict[str, Any]:
    """The row's part for what ran on a GPU. `commit_name`: what to call the code."""
    properties = torch.cuda.get_device_properties(device)
    gigabytes = round(properties.total_memory / 2**30)
    return {
        "machine": f"{properties.name}, {gigabytes} GiB, {_processor()}, {os.cpu_count()} cores",
        "host_kind": gpu_kind(properties.name),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
        "cuda": torch.version.cuda or torch.version.hip,
        **_software(commit_name),
    }


def gpu_kind(name: str) -> str:
    """The stem of the file that has the rows of GPUs of this name."""
    return "gpu-" + re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _software(commit_name: str) -> dict[str, Any]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {
        "python": platform.python_version(),
        **{name: installed.get(name) for name in PACKAGES},
        "commit": commit_name,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].split(":", 1)[1].strip()
    return platform.processor()


def _output(*command: str) -> str:
    """The first line that a command prints; "" if it fails or does not exist."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines and done.returncode == 0 else ""
