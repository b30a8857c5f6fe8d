"""Servers on loopback, with faults: a stand-in for the Hugging Face Hub, and a plain HTTP server of files.

For the tests and benchmarks. `python -m tests.servers --help`, from the repository's root, runs one as
a process of its own.
"""

from tests.servers.faults import Chaos, Fault
from tests.servers.files import FileServer
from tests.servers.hub import HubServer
from tests.servers.reply import Call
from tests.servers.repository import Repository

__all__ = ["Call", "Chaos", "Fault", "FileServer", "HubServer", "Repository"]
