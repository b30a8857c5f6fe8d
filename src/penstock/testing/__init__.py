"""Servers on loopback, with faults: a stand-in for the Hugging Face Hub, and a plain HTTP server of files.

For this project's tests, demos and benchmarks, and for the tests of whoever reads text over a network.
Nothing here is needed to load data. See docs/testing.md; `python -m penstock.testing --help` runs one
as a process of its own.
"""

from penstock.testing.faults import Chaos, Fault
from penstock.testing.files import FileServer
from penstock.testing.hub import HubServer
from penstock.testing.reply import Request
from penstock.testing.repository import Repository

__all__ = ["Chaos", "Fault", "FileServer", "HubServer", "Repository", "Request"]
