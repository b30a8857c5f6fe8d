"""The environment of the process: variables, cores and cgroups.

The only module that reads environment variables. Also has two argument checks and an atomic write
for all packages.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.options import Option
from penstock.types import Shard

OTHER_VARIABLES = frozenset(
    {"PENSTOCK_CACHE", "PENSTOCK_CONFIG", "PENSTOCK_BENCH_DIR", "PENSTOCK_BENCH_DATA"}
)
"""Variables that are not loader settings. Any other `PENSTOCK_…` must be one."""
ACCESS = re.compile(
    r"(HF|HUGGING_FACE|AWS|GOOGLE|AZURE|SSL_CERT)_|HOME$|XDG_CACHE_HOME$|PENSTOCK_CACHE$|.*_proxy$",
    re.IGNORECASE,
)
"""Variables for the location of data and for credentials."""


def environment() -> Mapping[str, str]:
    """Return the environment."""
    return os.environ


# Checks


def whole_number(name: str, value: Any, least: int) -> int:
    """Return an integer argument. Raise ConfigError if it is not an integer or below `least`."""
    return int(Option(name, int, None, "", minimum=least).read(value))


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ConfigError unless an argument is one of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


# Cores


def available_cores() -> int:
    """Return the number of cores that affinity and cgroup quota allow."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = cgroup_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_cores(mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU quota of this container from cgroup v2 or v1, or None."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max" is no limit
            quota, period = " ".join((mount / name).read_text() for name in names).split()
            if int(quota) > 0:
                return int(quota) / int(period)
    return None


def default_workers() -> int:
    """Return the default number of workers per rank: its share of the cores, at most 16."""
    local_ranks = max(1, _int("LOCAL_WORLD_SIZE", 1))
    return max(1, min(16, available_cores() // local_ranks))


# Ranks


def torch_distributed() -> Any:
    """Return torch.distributed if it is initialised, else None. Never imports it."""
    distributed = sys.modules.get("torch.distributed")
    ready = distributed and distributed.is_available() and distributed.is_initialized()
    return distributed if ready else None


def current_shard() -> Shard:
    """Return this rank's shard, from torch.distributed if initialised, else from the launcher."""
    if (distributed := torch_distributed()) is not None:
        return Shard(distributed.get_world_size(), distributed.get_rank())
    world, rank = _int("WORLD_SIZE", 1), _int("RANK", 0)
    if not 0 <= rank < world or (world > 1 and not os.environ.get("RANK")):
        raise ConfigError(
            f"RANK={os.environ.get('RANK')} and WORLD_SIZE={world} in the environment do not fit: "
            "a rank must be set, ≥ 0 and below the world size. Start with torchrun, call "
            "init_process_group before creating the loader, or pass shard=…"
        )
    return Shard(world, rank)


def local_rank() -> int:
    """Return the local rank."""
    return _int("LOCAL_RANK", 0)


def launched() -> bool:
    """Return True if a launcher such as torchrun set the rendezvous variables."""
    return os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def gpu_is_here() -> bool:
    """Return True if there is a CUDA or ROCm device, without importing torch."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


# Locations and credentials


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    # Folders of installed packages are named after their versions. `importlib.metadata` says the
    # same, but its import takes 12 ms.
    pattern = f"{package}-*.dist-info"
    found = (path.stem for folder in sys.path for path in Path(folder).glob(pattern))
    return next((name.partition("-")[2] for name in found), None)


def cache_dir() -> Path:
    """Return PENSTOCK_CACHE, else a folder next to the caches of the Hugging Face tools."""
    if named := os.environ.get("PENSTOCK_CACHE"):
        return Path(named).expanduser()
    names = ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    home = next((os.environ[name] for name in names if os.environ.get(name)), "~/.cache")
    return Path(home).expanduser() / "penstock"


def hub_endpoint() -> str:
    """Return the Hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_token() -> str | None:
    """Return the Hub token from where Hugging Face tools keep it. Importing those takes 0.2 s."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
        path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
        with suppress(OSError):
            token = path.expanduser().read_text()
    return (token or "").strip() or None


def offline() -> bool:
    """Return True if the environment forbids the network."""
    values = [os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")]
    return any(value.strip().upper() in ("1", "ON", "YES", "TRUE") for value in values)


def access_variables() -> dict[str, str]:
    """Return the variables for endpoints, credentials, proxies and caches."""
    return {name: value for name, value in os.environ.items() if ACCESS.match(name)}


def adopt(variables: Mapping[str, str]) -> None:
    """Replace this process's access variables, because a fork server's may be outdated."""
    for name in access_variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def proxy_for(scheme: str, host: str) -> str | None:
    """Return the proxy that the environment names for a host, or None."""
    from urllib.request import getproxies, proxy_bypass

    local = host in ("localhost", "127.0.0.1", "::1")
    return None if local or proxy_bypass(host) else getproxies().get(scheme)


def write_atomically(path: Path, content: str | Sequence[Any]) -> None:
    """Write a text, or parts of bytes, to a temporary dot file, then rename it."""
    parts: Sequence[Any] = [content.encode()] if isinstance(content, str) else content
    # Not tempfile, whose files ignore the umask and are readable only by their owner.
    temporary = path.parent / f".{path.name}.{os.urandom(8).hex()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:  # also after Ctrl-C, so that no partial file remains
        temporary.unlink(missing_ok=True)


def _int(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} in the environment must be an integer") from None
