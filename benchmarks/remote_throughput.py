"""How much of the link becomes batches if the text is on the Hub?

A loopback Hub with 50 ms before each answer and 125 MB/s for all connections together. One epoch
over whole files, without a token cache and with nothing on disk. The rate counts the bytes of the
text column as they are in the files. The Hub's log says what was fetched.

Beside it the same loader from local disk, which only the cores limit, and a second Hub where 1 % of
all requests fail, are reset, stall or are late. The Hubs share the cores with the loader.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
from common import BATCH_SIZE, HUB_URL, MB, SEQ_LEN, Answer
from corpora import link, load_corpus, text_ranges
from report import Report

FAULTS = ("--fault-rate", "0.01", "--fault-kinds", "status,slow,reset,stall")
FAULTY = "in order, 1 % faults"
DISK = {"in order": "disk, in order", "shuffled": "disk, shuffled", FAULTY: "disk, in order"}
"""What reads from the Hub, and what does the same from disk."""


def contend(case: Answer) -> None:
    """Be one contender."""
    common.silence_warnings()
    with common.fresh_cache(case["endpoint"]) as cache:
        import torch  # noqa: F401 (as in a training script: batches are tensors)

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

        common.serve(measure)


def measure_files(report: Report, args: Any, repeats: int, compression: str) -> None:
    """Measure everything that reads one kind of files."""
    import pyarrow.parquet as pq

    corpus = load_corpus(args.quick)
    folder = corpus.hosted(compression, args.documents)
    file = folder / common.HOSTED
    column = sum(length for _, length in text_ranges(file))
    files = max(2, round(args.mb * MB / column))
    network = ["--latency-ms", str(args.latency_ms), "--bandwidth-mb", str(args.bandwidth_mb)]
    with ExitStack() as stack:
        hub = stack.enter_context(common.Hub(folder, files, *network))
        faulty = stack.enter_context(common.Hub(folder, files, *network, *FAULTS, "--seed", "1"))
        disk = stack.enter_context(tempfile.TemporaryDirectory())
        for number in range(files):
            link(file, Path(disk) / f"{number:05}.parquet")
        base: Answer = {
            "url": HUB_URL,
            "tokenizer": str(corpus.tokenizer) if args.tokenizer == "bpe" else args.tokenizer,
            "documents": pq.read_metadata(file).num_rows * files,
            "endpoint": hub.endpoint,
            "shuffle": False,
        }
        cases = {
            "in order": base,
            "shuffled": base | {"shuffle": True},
            FAULTY: base | {"endpoint": faulty.endpoint},
            "disk, in order": base | {"url": disk},
            "disk, shuffled": base | {"url": disk, "shuffle": True},
        }
        answers = common.measure_all(__file__, cases, repeats)
    seconds = {name: [a["ended"] - a["begun"] for a in told] for name, told in answers.items()}
    rates = {name: [column * files / s / MB for s in each] for name, each in seconds.items()}
    for name, told in answers.items():
        case = f"{compression}: {name}"
        cores = [a["cpu"] / s for a, s in zip(told, seconds[name], strict=True)]
        report.add(case, "text column", rates[name], "MB/s")
        report.add(case, "cores", cores, "")
        if name not in DISK:
            continue
        report.add(case, "/ link", [rate / args.bandwidth_mb for rate in rates[name]], "x")
        report.add(case, "/ local disk", common.ratios(rates[name], rates[DISK[name]]), "x")
        log = faulty if name == FAULTY else hub
        requests = [log.between(a["begun"], a["ended"]) for a in told]
        sent = [sum(r["sent"] for r in each if r["port"] == "cdn") for each in requests]
        fetched = [total / (column * files) for total in sent]
        report.add(case, "bytes fetched / text column", fetched, "x")
        report.add(case, "requests", [len(each) for each in requests], "")
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
