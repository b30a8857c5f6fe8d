"""What the surroundings say: the only file that reads the environment.

In:    environment variables, and the cores that this process may use.
Out:   defaults for the loader; what else every part needs: checks of settings, and a file written whole.
Where: the thread that creates a loader.
State: none.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.types import Shard

OTHER_VARIABLES = frozenset(
    {"PENSTOCK_CACHE", "PENSTOCK_CONFIG", "PENSTOCK_BENCH_DIR", "PENSTOCK_BENCH_DATA"}
)
"""Variables of ours that are no setting of the loader; any other `PENSTOCK_…` is one, or a mistake."""


def environment() -> Mapping[str, str]:
    """The environment, for those who look for settings in it."""
    return os.environ


def whole_number(name: str, value: Any, least: int) -> int:
    """A setting that counts something, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ConfigError(f"{name}={value!r}: needs a whole number, at least {least}")
    return number


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """A setting that names one of a few things."""
    if not isinstance(value, str | None) or value not in allowed:
        raise ConfigError(f"{name}={value!r}: needs one of {', '.join(map(repr, allowed))}")


def available_cores() -> int:
    """Cores this process may use: its affinity, and its cgroup's quota where there is one."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cgroup_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_cores(
    told: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Cores that this process's cgroup may use, or one that it lies in; None where nothing bounds them.

    Within a container the path that the kernel tells may be the host's, and only the mount's root is there to be read.
    """
    folders = [mounted, mounted / "cpu"]
    try:
        for line in told.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(
                ","
            ):  # the second version has one tree for everything
                tree = mounted / "cpu" if controllers else mounted
                folders += [
                    tree / part
                    for part in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents)
                ]
    except (OSError, ValueError):
        pass  # no Linux, or nothing that tells
    quotas = [quota for folder in folders if (quota := _cpu_quota(folder)) is not None]
    return min(quotas, default=None)


def _cpu_quota(folder: Path) -> float | None:
    """What one cgroup allows, by either version's files."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


def installed_version(package: str) -> str | None:
    """What is installed of a package, by the name of the folder beside it: to ask `importlib.metadata`, which is left to
    unusual installations, takes 15 ms, for which the first batch would have to wait."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    beside = Path(spec.origin).parent.parent if spec.origin else Path(os.devnull)
    found = (
        [name for name in os.listdir(beside) if name.startswith(f"{package}-")]
        if beside.is_dir()
        else []
    )
    if len(found) == 1 and found[0].endswith(".dist-info"):
        return found[0].removeprefix(f"{package}-").removesuffix(".dist-info")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def default_workers() -> int:
    """Worker threads for one rank: its share of the host's cores, 16 at most."""
    local_ranks = max(1, _int("LOCAL_WORLD_SIZE", 1))
    return max(1, min(16, available_cores() // local_ranks))


def current_shard() -> Shard:
    """This rank's shard, from `torch.distributed` if it is initialised, else from the launcher."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Shard(distributed.get_world_size(), distributed.get_rank())
    world = _int("WORLD_SIZE", 1)
    if world > 1 and not os.environ.get("RANK"):
        # Some launchers set the one and not the other: every process would read the same part.
        raise ConfigError(
            f"WORLD_SIZE={world} is in the environment and RANK is not, so this process does not know its part. "
            "Start with torchrun, call init_process_group before making the loader, or give shard=…"
        )
    rank = _int("RANK", 0)
    if not 0 <= rank < world:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world} in the environment do not fit together: a rank is at least 0 and "
            "below the world size. Start with torchrun, or unset both."
        )
    return Shard(world, rank)


def local_rank() -> int:
    """Which of the ranks on this host this is, as the launcher counts them."""
    return _int("LOCAL_RANK", 0)


def gpu_is_here() -> bool:
    """Whether the kernel knows an accelerator that torch calls cuda: to find out without importing torch."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def launched() -> bool:
    """Whether a launcher such as torchrun has told this process where to meet the others."""
    return all(
        os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )


def cache_dir() -> Path:
    """Where things are kept between runs: our own place if it is named, else beside what the Hub's tools keep.

    Whoever has moved those to a larger disk wants ours there too.
    """
    named = os.environ.get("PENSTOCK_CACHE")
    if named:
        return Path(named).expanduser()
    for name in ("HF_DATASETS_CACHE", "HF_HOME"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser() / "penstock"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "penstock"


def hub_endpoint() -> str:
    """Where the Hub is."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_token() -> str | None:
    """The Hub's token, where its own tools look for it. Read here because those take 0.2 s to import."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token
    named = os.environ.get("HF_TOKEN_PATH")
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    try:
        return Path(named or Path(home) / "token").expanduser().read_text().strip() or None
    except OSError:
        return None


def offline() -> bool:
    """Whether the network is not to be used."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(
        os.environ.get(name, "").strip().upper() in {"1", "ON", "YES", "TRUE"} for name in names
    )


ACCESS = (
    "HF_",
    "HUGGING_FACE_",
    "AWS_",
    "GOOGLE_",
    "AZURE_",
    "SSL_CERT_",
    "XDG_CACHE_HOME",
    "HOME",
)


def access_variables() -> dict[str, str]:
    """What the environment says of where data is and who we are: endpoints, tokens, proxies."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ACCESS) or name.lower().endswith("_proxy") or name == "PENSTOCK_CACHE"
    }


def adopt(variables: Mapping[str, str]) -> None:
    """Take over another process's access variables: a worker is born of a server with an older environment."""
    for name in access_variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def proxy_for(scheme: str, host: str) -> str | None:
    """The proxy that the environment names for a host, if it does."""
    if host in ("localhost", "127.0.0.1", "::1") or not any(
        name.lower().endswith("_proxy") for name in os.environ
    ):
        return None
    from urllib.request import getproxies, proxy_bypass

    return None if proxy_bypass(host) else getproxies().get(scheme)


def write_atomically(path: Path, text: str, *, best_effort: bool = False) -> None:
    """Write a file that others may read: under another name first, flushed, then renamed."""
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = f"{path.parent}/.{path.name}.{os.urandom(8).hex()}"
        # Not a temporary file of the library's, which nobody but its owner may read, whatever the umask says.
        with open(
            os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "w", encoding="utf-8"
        ) as file:
            name = aside
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except (
        BaseException
    ) as error:  # also text that cannot be encoded, and Ctrl-C: no half file is left
        if name is not None and os.path.exists(name):
            os.unlink(name)
        if not (best_effort and isinstance(error, OSError)):
            raise


def _int(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} in the environment is not a whole number") from None
