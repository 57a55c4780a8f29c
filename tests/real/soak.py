"""Mixed load on a cluster of two ranks for as long as it is told to, and what must be so during and after it:

- every request is answered, refused as it must be, turned away with 429, or dropped by its own client: clients leave while they
  are queued, while their prompt is read and in the middle of a reply; requests are over-long, malformed or cut
- memory is flat: each rank's resident memory, from the end of the warm-up (a fifth of the time) to the end, within 1 %
- no slot is stuck: nothing runs or waits when the load is over, and no connection is left
- no hash is wrong: a share of the conversations, repeated one at a time without drafts and cache, gives the same token_sha
- both ranks end in order afterwards

Standard library only. Exit code 0: all of it holds; 1: what does not; 77: no program.
"""
import json
import os
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cluster"))

from cluster import Checks, Cluster, arguments, finish, wait_until  # noqa: E402

PERIOD = 1.0  # seconds between two looks at memory
# Seconds. A background request may wait for as many turns of 30 seconds as there are requests before it (8 lanes, 14
# places in the queue), and then answers among seven others.
LONGEST_WAIT = 30 * (8 + 14) + 300


def resident_kib(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmRSS"].split()[0])


class Memory:
    """Looks at the ranks' resident memory until it is stopped; `looks` is [(seconds since the start, KiB by rank)]."""

    def __init__(self, cluster):
        self.pids = {number: rank.process.pid for number, rank in cluster.ranks.items()}
        self.looks, self.start, self.over = [], time.monotonic(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while not self.over.wait(PERIOD):
            try:
                kib = {number: resident_kib(pid) for number, pid in self.pids.items()}
            except (OSError, KeyError):
                return  # a rank is gone: the load's own errors say so
            self.looks.append((time.monotonic() - self.start, kib))

    def stop(self):
        self.over.set()
        self.thread.join(10)

    def between(self, rank, begin, end):
        return [kib[rank] for at, kib in self.looks if begin <= at < end]


def check_memory(checks, memory, seconds, tolerance):
    """The median of the first fifth after the warm-up against that of the last fifth."""
    for rank in sorted(memory.pids):
        early = memory.between(rank, seconds * 0.2, seconds * 0.4)
        late = memory.between(rank, seconds * 0.8, seconds)
        if not checks.check(f"rank {rank}: memory was looked at", bool(early and late), f"{len(memory.looks)} times"):
            continue
        tenths = [memory.between(rank, seconds * i / 10, seconds * (i + 1) / 10) for i in range(10)]
        print(f"  rank {rank}, MiB by tenth: " + " ".join(f"{statistics.median(each) / 1024:.1f}" for each in tenths if each))
        first, last = statistics.median(early), statistics.median(late)
        growth = (last - first) / first
        checks.check(f"rank {rank}: memory is flat", growth <= tolerance,
                     f"{first / 1024:.1f} MiB after the warm-up, {last / 1024:.1f} MiB at the end, {growth:+.2%}")


def check_load(checks, result, report):
    checks.equal("bench serve ends with", result, 0)
    if report is None:
        return
    level = report["levels"][0]
    checks.check("requests were completed", level["completed"] > 0,
                 f"{level['requests']} requests, {level['completed']} completed, {level['left']} dropped by their clients, "
                 f"{level['malformed_refused']} malformed ones refused")
    checks.check("clients left", level["left"] > 0, level["left"])
    checks.check("malformed requests were refused", level["malformed_refused"] > 0, level["malformed_refused"])
    bad = {kind: error for kind, error in level["errors"].items() if kind != "status 429 queue_full"}
    checks.check("no other error than a full queue", not bad, bad or level["errors"])
    check = report.get("check", {})
    checks.check("hashes equal a serial run's", check.get("different") == 0 and check.get("compared", 0) > 0,
                 {key: check.get(key) for key in ("compared", "different", "first")})


def check_idle(checks, cluster):
    """Nothing runs or waits, and no client's connection is held."""
    def idle():
        ready = cluster.client.get("/ready").json()
        return ready if ready.get("running") == 0 and ready.get("queued") == 0 else None
    try:
        wait_until(idle, 20, "the last requests to be cleared away")
        checks.check("no slot is stuck", True)
    except TimeoutError as error:
        checks.check("no slot is stuck", False, f"{error}: {cluster.client.get('/ready').body}")
    def alone():  # but for the connection that asks
        return cluster.client.metric("tensorfold_http_connections") <= 1
    try:
        wait_until(alone, 20, "the last connections to be closed", every=0.2)
        checks.check("no connection is left", True)
    except TimeoutError as error:
        checks.check("no connection is left", False, error)


def run(checks, args):
    # Pages of keys and values cost memory once they were written: few of them, so that all are in use when the warm-up is
    # over, and what grows after it is a leak.
    sections = {
        "cache": {"snapshot_bytes": "16MiB"},
        "memory": {"kv_bytes": "48MiB", "floor_free": "16MiB"},
        "schedule": {"max_sequences": 8, "queue_limit": 14},
    }
    with Cluster(args.binary, **sections) as cluster:
        cluster.start().wait_ready()
        out = os.path.join(cluster.folder, "soak.json")
        command = [args.binary, "bench", "serve", "--url", f"http://127.0.0.1:{cluster.http_port}", "--mix", "mixed",
                   "--concurrency", str(args.users), "--duration", str(args.seconds), "--disconnect", "0.15",
                   "--malformed", "0.1", "--prompt-tokens", "3000", "--prefix-tokens", "1000", "--reply-tokens", "96",
                   "--background", "0.2", "--timeout", str(LONGEST_WAIT), "--seed", str(args.seed), "--check", "--check-share", str(args.check_share), "--json", out]
        load = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        memory = Memory(cluster)
        said = threading.Event()

        def listen():
            for line in load.stderr:
                print(f"  {line.rstrip()}", flush=True)
                if line.startswith("checking "):
                    said.set()
            said.set()

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        said.wait(args.seconds + 600)
        memory.stop()
        checks.section("after the load", lambda c: check_memory(c, memory, args.seconds, args.tolerance))
        table, _ = load.communicate(timeout=args.seconds * 10 + 600)
        print(table, flush=True)
        report = None
        if os.path.exists(out):
            with open(out, encoding="utf-8") as file:
                report = json.load(file)
        checks.section("the load", lambda c: check_load(c, load.returncode, report))
        checks.section("afterwards", lambda c: check_idle(c, cluster))
        checks.equal("the ranks end with", cluster.terminate(60), {0: 0, 1: 0})
    return checks.failures


def main():
    args = arguments(__doc__,
                     ("--seconds", {"type": float, "default": 1800, "help": "of load; a fifth of it is warm-up"}),
                     ("--users", {"type": int, "default": 24, "help": "more than lanes and queue together: some get 429"}),
                     ("--seed", {"type": int, "default": 1, "help": "of the load"}),
                     ("--check-share", {"type": float, "default": 0.1, "help": "of conversations that are repeated"}),
                     ("--tolerance", {"type": float, "default": 0.01, "help": "how much memory may grow"}))
    return run(Checks(), args)


if __name__ == "__main__":
    finish("soak", main)
