"""Two hosts, as far as a rank can tell: two network namespaces with a cable between them, and a torchrun in each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.train import checkpoint
from tests.distributed.launch import SMALL, Ran, Run, positions, prepare, results, session

# The runs are made for the first test that needs one of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PORT = 29400
"""The first host has all of its ports to itself."""
FORMS = ["ddp", "fsdp"]
QUIET = ["OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore::FutureWarning"]


@dataclass(frozen=True)
class Host:
    """A network namespace: its name, its end of the cable, its address."""

    name: str
    cable: str
    address: str


def ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=20
    ).stdout


def stop(host: Host) -> None:
    """End what still runs on a host."""
    for pid in map(int, ip("netns", "pids", host.name).split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove(host: Host) -> None:
    """Take a host away. The cable goes with the hosts that its ends are in."""
    stop(host)
    ip("netns", "delete", host.name)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two of them, connected with each other and with nothing else; gone when the tests are over."""
    if shutil.which("ip") is None:
        pytest.skip("the ip command is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces that can be entered by name")
    own = os.getpid()
    made = [Host(f"penstock-{own}-{n}", f"ps{own}-{n}", f"10.213.7.{n + 1}") for n in range(2)]
    with ExitStack() as stack:
        for host in made:
            try:
                ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace may be made here: {error.stderr.strip()}")
            stack.callback(remove, host)
        first, second = made
        try:
            ip("link", "add", first.cable, "netns", first.name, "type", "veth", "peer", "name", second.cable, "netns", second.name)  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no pair of connected interfaces may be made here: {error.stderr.strip()}")
        for host in made:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", host.name, "link", "set", host.cable, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield made


@pytest.fixture(scope="module")
def runs(corpus: Path) -> list[Run]:
    usual = ["--dataset", str(corpus / "many"), *SMALL, "--steps", "6", "--save-every", "3"]
    return [Run("ddp", usual), Run("fsdp", [*usual, "--fsdp"])]


@pytest.fixture(scope="module")
def apart(
    hosts: list[Host], runs: list[Run], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ran]:
    """Runs of both hosts, with a launcher on each."""
    place = tmp_path_factory.mktemp("hosts") / "session"
    script = prepare(place, runs)
    processes, told = [], [place / f"host-{n}.txt" for n in range(2)]
    for n, host in enumerate(hosts):
        variables = [f"GLOO_SOCKET_IFNAME={host.cable}", *QUIET]
        command = ["ip", "netns", "exec", host.name, "env", *variables, sys.executable, "-m", "torch.distributed.run",
                   "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(n), "--local-addr", host.address,
                   "--master_addr", hosts[0].address, "--master_port", str(PORT), *map(str, script)]  # fmt: skip
        # Not pipes: a launcher whose pipe is full would keep the other waiting.
        with told[n].open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file))
    try:
        codes = [process.wait(110) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError("\n".join(each.read_text()[-4000:] for each in told)) from None
    finally:
        for host in hosts:
            stop(host)
        for process in processes:
            process.wait(20)
    assert codes == [0, 0], [each.read_text()[-3000:] for each in told]
    return results(place, runs, 2)


@pytest.fixture(scope="module")
def together(
    apart: dict[str, Ran], runs: list[Run], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ran]:
    """The same runs on one host."""
    return session(tmp_path_factory.mktemp("host") / "session", runs)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_on_two_hosts_train_as_on_one_and_write_one_checkpoint(
    apart: dict[str, Ran], together: dict[str, Ran], form: str
) -> None:
    far, near = apart[form], together[form]
    assert far.codes == near.codes == [0, 0], far.told + near.told
    assert f"2 ranks ({form}) on cpu" in far.told[0]
    assert "[train]" not in far.told[1], "one rank prints for all"
    assert [*far.losses()] == [*range(1, 7)]
    for rank in (0, 1):
        assert far.losses(rank) == near.losses(rank)
    for step in (3, 6):
        saved = [
            checkpoint.read(run.folder / "checkpoints" / f"step-{step:08}") for run in (far, near)
        ]
        assert len(saved[0].ranks) == 2
        assert positions(saved[0]) == positions(saved[1])
