"""How much of the link becomes batches if the text is on the Hub?

A loopback Hub with 50 ms before each answer and 125 MB/s for all connections together. One epoch
over whole files, without a token cache and with nothing on disk. The rate counts the bytes of the
text column as they are in the files. The Hub's log says what was fetched.

Beside it: a plain downloader of the same ranges with as many threads, which the Hub and the latency
limit; the same loader from local disk, which the cores limit; and a second Hub where 1 % of all
requests fail, are reset, stall or are late. The Hub shares the cores with the loader.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
from common import BATCH_SIZE, HUB_URL, MB, SEQ_LEN, Answer
from corpora import link, load_corpus, text_ranges
from report import Report

FAULTS = ("--fault-rate", "0.01", "--fault-kinds", "status,slow,reset,stall")
DOWNLOADER, FAULTY = "plain downloader", "in order, 1 % faults"
DISK = {"in order": "disk, in order", "shuffled": "disk, shuffled", FAULTY: "disk, in order"}
"""What reads from the Hub, and what does the same from disk."""


def loader_measure(case: Answer, cache: str) -> Callable[[], Answer]:
    from penstock import AsyncDataLoader, TextDataset

    data = TextDataset(case["url"], tokenizer=case["tokenizer"], seq_len=SEQ_LEN, cache=False)

    def measure() -> Answer:
        for folder in Path(cache).iterdir():  # no listing and no footer of an earlier run
            shutil.rmtree(folder)
        cpu, begun = time.process_time(), time.monotonic()
        with AsyncDataLoader(data, BATCH_SIZE, shuffle=case["shuffle"], epochs=1) as loader:
            for _ in loader:
                pass
            ended = time.monotonic()
            stats = loader.stats()
        if stats.documents != case["documents"]:
            raise RuntimeError(f"{stats.documents} documents instead of {case['documents']}")
        return {"begun": begun, "ended": ended, "cpu": time.process_time() - cpu}

    return measure


def downloader_measure(case: Answer) -> Callable[[], Answer]:
    """Fetch the same ranges into buffers that are thrown away."""
    import urllib3

    pool = urllib3.PoolManager(maxsize=case["fetches"] + 1)
    names, ranges = hosted_names(case["files"]), text_ranges(Path(case["file"]))

    def resolve(name: str) -> str:
        url = f"{case['endpoint']}/datasets/{REPOSITORY}/resolve/main/{name}"
        return str(pool.request("GET", url, redirect=False).headers["Location"])

    def fetch(address: Future[str], start: int, length: int) -> None:
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        got = len(pool.request("GET", address.result(), headers=headers).data)
        if got != length:
            raise RuntimeError(f"{address.result()}: {got} bytes instead of {length}")

    def measure() -> Answer:
        cpu, begun = time.process_time(), time.monotonic()
        with ThreadPoolExecutor(1) as ahead, ThreadPoolExecutor(case["fetches"]) as threads:
            addresses = [ahead.submit(resolve, name) for name in names]
            parts = [threads.submit(fetch, a, *span) for a in addresses for span in ranges]
            for part in parts:
                part.result()
        return {"begun": begun, "ended": time.monotonic(), "cpu": time.process_time() - cpu}

    return measure


def hosted_names(files: int) -> list[str]:
    """Return the names that the Hub gives to copies of its file."""
    return [f"data/train-{i:05d}-of-{files:05d}.parquet" for i in range(files)]


def contend(case: Answer) -> None:
    """Be one contender."""
    common.silence_warnings()
    with common.fresh_cache(case["endpoint"]) as cache:
        if "file" in case:
            common.serve(downloader_measure(case))
        else:
            import torch  # noqa: F401 (as in a training script: batches are tensors)

            common.serve(loader_measure(case, cache))


def measure_files(report: Report, args: Any, repeats: int, compression: str) -> None:
    """Measure everything that reads one kind of files."""
    import pyarrow.parquet as pq

    corpus = load_corpus(args.quick)
    folder = corpus.hosted(compression, args.documents)
    file = folder / common.HOSTED
    column = sum(length for _, length in text_ranges(file))
    files = max(2, round(args.mb * MB / column))
    network = ["--latency-ms", str(args.latency_ms), "--bandwidth-mb", str(args.bandwidth_mb)]
    answers: dict[str, list[Answer]] = {}
    with ExitStack() as stack:
        hub = stack.enter_context(common.Hub(folder, files, *network))
        faulty = stack.enter_context(common.Hub(folder, files, *network, *FAULTS, "--seed", "1"))
        disk = stack.enter_context(tempfile.TemporaryDirectory())
        for name in hosted_names(files):
            (Path(disk) / name).parent.mkdir(exist_ok=True)
            link(file, Path(disk) / name)
        base: Answer = {
            "url": HUB_URL,
            "tokenizer": str(corpus.tokenizer) if args.tokenizer == "bpe" else args.tokenizer,
            "documents": pq.read_metadata(file).num_rows * files,
            "endpoint": hub.endpoint,
            "shuffle": False,
        }
        cases = {
            DOWNLOADER: base | {"file": str(file), "files": files, "fetches": args.fetches},
            "in order": base,
            "shuffled": base | {"shuffle": True},
            FAULTY: base | {"endpoint": faulty.endpoint},
            "disk, in order": base | {"url": disk},
            "disk, shuffled": base | {"url": disk, "shuffle": True},
        }
        with ExitStack() as running:

            def measuring(name: str, process: common.Contender) -> Callable[[], float]:
                asked = faulty if name == FAULTY else hub

                def measure() -> float:
                    before = asked.cpu_s()
                    told = process.measure() | {"hub": asked}
                    told["seconds"] = told["ended"] - told["begun"]
                    told["hub_cpu"] = asked.cpu_s() - before
                    answers.setdefault(name, []).append(told)
                    return float(column * files / told["seconds"] / MB)

                return measure

            processes = {
                name: running.enter_context(common.Contender(__file__, case))
                for name, case in cases.items()
            }
            measures = {name: measuring(name, each.ready()) for name, each in processes.items()}
            rates = common.interleave(repeats, measures)
    for name, values in rates.items():
        case = f"{compression}: {name}"
        told = answers[name]
        report.add(case, "text column", values, "MB/s")
        report.add(case, "cores, its own", [a["cpu"] / a["seconds"] for a in told], "")
        if name in DISK.values():
            continue
        report.add(case, "cores, the Hub's", [a["hub_cpu"] / a["seconds"] for a in told], "")
        report.add(case, "/ link", [value / args.bandwidth_mb for value in values], "x")
        if name in DISK:
            report.add(case, "/ plain downloader", common.ratios(values, rates[DOWNLOADER]), "x")
            report.add(case, "/ local disk", common.ratios(values, rates[DISK[name]]), "x")
        requests = [a["hub"].between(a["begun"], a["ended"]) for a in told]
        sent = [sum(r["sent"] for r in each if r["port"] == "cdn") for each in requests]
        of_column = [total / (column * files) for total in sent]
        report.add(case, "bytes fetched / text column", of_column, "x")
        report.add(case, "requests", [len(each) for each in requests], "")
        if name == FAULTY:
            struck = [sum(bool(r["fault"]) for r in each) for each in requests]
            report.add(case, "requests with a fault", struck, "")


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--mb", type=float, help="of the text column in each measurement (400)")
    options.add_argument("--compression", nargs="+", default=["none", "snappy"])
    options.add_argument("--tokenizer", default="byte", help="byte, or bpe for the corpus's own")
    options.add_argument("--latency-ms", type=float, default=50.0, help="before each answer")
    options.add_argument("--bandwidth-mb", type=float, default=125.0, help="MB/s in all")
    options.add_argument("--documents", type=int, default=500, help="in a row group")
    options.add_argument("--fetches", type=int, default=8, help="of the plain downloader")
    args = options.parse_args()
    if args.contender is not None:
        contend(args.contender)
        return
    repeats = args.repeats or (1 if args.quick else 3)
    args.mb = args.mb or (20 if args.quick else 400)
    settings = {name: value for name, value in vars(args).items() if name != "contender"}
    report = Report("remote_throughput", args.quick, settings | {"repeats": repeats})
    for compression in args.compression:
        measure_files(report, args, repeats, compression)
    report.close()


if __name__ == "__main__":
    main()
