#!/usr/bin/env python3
"""A rank dies or stalls while replies are being made: it is named within a second or two, new requests are refused at
once, and when it is back the parked replies go on to the very same bytes.

Usage: test_rank_loss.py [--binary PATH]
"""
import signal
import threading
import time

from cluster import PATIENCE, Checks, Cluster, arguments, finish, show, wait_until
from requests_set import REQUESTS, long_request

LONG = long_request(4000)
NOTICE = 2.5  # seconds until the loss must be known: heartbeat_timeout is 1 s


def begin(cluster, body=LONG, events=20):
    stream = cluster.client.stream("/v1/chat/completions", body)
    wait_until(lambda: stream.reply.events > events or not stream.running(), 30, "the stream to begin")
    if not stream.running():
        raise RuntimeError(f"the reply was over before anything could be broken: {stream.reply.facts}")
    return stream


def check_noticed(checks, cluster, what, since):
    """/ready names rank 1 soon; /health stays; new requests get 503 + Retry-After at once."""
    ready = cluster.wait_not_ready(15)
    took = time.monotonic() - since
    checks.check(f"{what}: /ready is 503 soon", took < NOTICE * PATIENCE, f"{took:.2f} s")
    reason = ready.json().get("reason") or ""
    checks.check(f"{what}: and names rank 1", "rank 1" in reason, reason)
    checks.equal(f"{what}: /health", cluster.client.get("/health").status, 200)
    response = cluster.client.post("/v1/chat/completions", {"messages": LONG["messages"]}, 10)
    checks.check(f"{what}: a new request gets 503 with Retry-After", response.status == 503 and
                 "Retry-After" in response.headers, f"{response.status} {show(response.body)}")
    checks.check(f"{what}: at once, and the message names rank 1", response.seconds < 0.5 * PATIENCE and
                 "rank 1" in response.error().get("message", ""), f"{response.seconds:.3f} s")


def check_same(checks, what, stream, expected, seconds=90):
    reply = stream.wait(seconds * PATIENCE)
    checks.check(f"{what}: the reply goes on to the same bytes", reply.same(expected) and reply.done,
                 f"{reply.sha} {expected.sha}, {reply.finish} {reply.error or ''} {stream.broken or ''}")


def check_killed(checks, cluster, expected):
    """kill -9, restarted alone."""
    stream = begin(cluster)
    start = time.monotonic()
    cluster.kill(1)
    check_noticed(checks, cluster, "rank 1 killed", start)
    checks.check("rank 1 killed: the reply is parked, not failed", stream.running() and not stream.reply.error,
                 stream.reply.error or "")
    start = time.monotonic()
    cluster.start(1).wait_ready()
    checks.check("rank 1 restarted: ready again", True, f"{time.monotonic() - start:.2f} s")
    check_same(checks, "rank 1 killed", stream, expected)


def check_stalled(checks, cluster, expected):
    """SIGSTOP: silent, its sockets open. First it wakes up again, then a new process takes its place."""
    stream = begin(cluster)
    start = time.monotonic()
    cluster.ranks[1].signal(signal.SIGSTOP)
    check_noticed(checks, cluster, "rank 1 stalled", start)
    cluster.ranks[1].signal(signal.SIGCONT)
    check_same(checks, "rank 1 stalled and woke", stream, expected)

    stream = begin(cluster)
    old = cluster.ranks[1]
    old.signal(signal.SIGSTOP)
    cluster.wait_not_ready(15)
    cluster.start(1).wait_ready()
    check_same(checks, "rank 1 stalled, replaced", stream, expected)
    old.signal(signal.SIGKILL)
    old.wait(10)


def check_short_stall(checks, cluster, expected):
    """A stall shorter than the heartbeat timeout harms nobody."""
    stream = begin(cluster)
    cluster.ranks[1].signal(signal.SIGSTOP)
    time.sleep(0.3)
    cluster.ranks[1].signal(signal.SIGCONT)
    check_same(checks, "rank 1 stalled for 0.3 s", stream, expected)


def check_many(checks, cluster, expected):
    """Several replies of all kinds in flight, plain and streamed, when rank 1 is killed."""
    alone = {name: cluster.client.replies(path, body)[0] for name, (path, body) in REQUESTS.items()}
    found = {}
    def ask(name, path, body):
        try:
            found[name] = cluster.client.replies(path, body)[0]
        except Exception as error:  # noqa: BLE001
            found[name] = error
    streams = [begin(cluster), begin(cluster)]
    threads = [threading.Thread(target=ask, args=(name, *request), daemon=True) for name, request in REQUESTS.items()]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    before = cluster.client.metric("tensorfold_sequences_replayed_total")
    cluster.kill(1)
    time.sleep(0.5)
    cluster.start(1).wait_ready()
    for thread in threads:
        thread.join(90 * PATIENCE)
    replayed = cluster.client.metric("tensorfold_sequences_replayed_total") - before
    checks.check("one of many: several were in flight, and were replayed", replayed >= 3, replayed)
    for stream in streams:
        check_same(checks, "one of many", stream, expected)
    for name, reply in alone.items():
        other = found.get(name)
        # One that was not yet admitted when the rank was lost gets 503, as it should.
        refused = isinstance(other, RuntimeError) and ": 503 " in str(other)
        checks.check(f"one of many, {name}", refused or (not isinstance(other, Exception) and other.same(reply)),
                     "refused while down" if refused else getattr(other, "sha", other))


def check_idle(checks, cluster, expected):
    """Lost while nothing runs: known without a request, and well again without one."""
    start = time.monotonic()
    cluster.kill(1)
    check_noticed(checks, cluster, "rank 1 killed while idle", start)
    cluster.start(1).wait_ready()
    reply = cluster.client.replies("/v1/chat/completions", LONG)[0]
    checks.check("after it: the same bytes", reply.same(expected), reply.sha)


def check_coordinator(checks, cluster, expected):
    """Rank 0 is killed and restarted: rank 1 stays, joins again, and the request sent again gives the same."""
    stream = begin(cluster)
    worker = cluster.ranks[1].process.pid
    cluster.kill(0)
    stream.wait(10 * PATIENCE)
    checks.check("rank 0 killed: its stream ends", not stream.reply.done, stream.broken or "")
    cluster.start(0).wait_ready()
    checks.equal("rank 0 restarted: rank 1 is the same process", cluster.ranks[1].process.pid, worker)
    reply = cluster.client.replies("/v1/chat/completions", LONG)[0]
    checks.check("rank 0 restarted: the same bytes", reply.same(expected), reply.sha)
    checks.equal("exit codes after SIGTERM", cluster.terminate(), {0: 0, 1: 0})


def check_flapping(checks, binary, expected):
    """Three ranks; one is lost again and again, also while they form anew; the rest must not wait for each other."""
    with Cluster(binary, world=3) as cluster:
        cluster.start().wait_ready()
        stream = begin(cluster)
        for pause in (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.0):
            cluster.kill(2)
            cluster.start(2)
            time.sleep(pause)
        start = time.monotonic()
        cluster.wait_ready(30)
        checks.check("rank 2 of 3 lost eight times: ready again", True, f"{time.monotonic() - start:.2f} s")
        check_same(checks, "rank 2 of 3 lost eight times", stream, expected)
        checks.equal("three ranks: exit codes after SIGTERM", cluster.terminate(), {0: 0, 1: 0, 2: 0})


def check_deadline(checks, binary, expected):
    """Nobody comes back: parked replies end with a clean error after park_deadline; later the cluster is well again."""
    with Cluster(binary, cluster={"park_deadline": "2s"}) as cluster:
        cluster.start().wait_ready()
        stream = begin(cluster)
        plain = []
        thread = threading.Thread(target=lambda: plain.append(cluster.client.post("/v1/chat/completions", LONG)))
        thread.start()
        time.sleep(0.3)
        start = time.monotonic()
        cluster.kill(1)
        reply = stream.wait(20 * PATIENCE)
        took = time.monotonic() - start
        checks.check("park deadline: the stream ends in time", 1.5 < took < 5 * PATIENCE, f"{took:.2f} s")
        checks.check("park deadline: with an error event that names rank 1", reply.error is not None and
                     "rank 1" in reply.error["message"] and reply.error["code"] in ("rank_failed", "cluster_down"),
                     reply.error or stream.broken or reply.finish)
        checks.check("park deadline: cleanly closed", stream.broken is None, stream.broken or "")
        thread.join(20 * PATIENCE)
        checks.check("park deadline: a plain request gets 503 with Retry-After", bool(plain) and plain[0].status == 503
                     and "Retry-After" in plain[0].headers, show(plain[0].body) if plain else "no answer")
        cluster.start(1).wait_ready()
        reply = cluster.client.replies("/v1/chat/completions", LONG)[0]
        checks.check("park deadline: well again, the same bytes", reply.same(expected), reply.sha)
        # Drain while a rank is missing must end too.
        cluster.kill(1)
        cluster.ranks[0].signal(signal.SIGTERM)
        checks.equal("SIGTERM while rank 1 is missing: exit code", cluster.ranks[0].wait(20), 0)


def main():
    args = arguments(__doc__)
    checks = Checks()
    with Cluster(args.binary) as cluster:
        cluster.start().wait_ready()
        expected = cluster.client.replies("/v1/chat/completions", LONG)[0]
        print(f"undisturbed: {expected.sha}, {expected.usage['completion_tokens']} tokens in "
              f"{expected.facts['decode_s']:.2f} s", flush=True)
        for name, part in (("killed", check_killed), ("stalled", check_stalled), ("short stall", check_short_stall),
                           ("many", check_many), ("idle", check_idle), ("coordinator", check_coordinator)):
            checks.section(name, part, cluster, expected)
            if 1 in cluster.ranks and cluster.ranks[0].alive() and cluster.client.ready_status() != 200:
                print("  (starting both ranks anew: the part before left the cluster broken)", flush=True)
                restart(cluster)
    checks.section("flapping", check_flapping, args.binary, expected)
    checks.section("park deadline", check_deadline, args.binary, expected)
    return checks.failures


def restart(cluster):
    for rank in cluster.ranks.values():
        if rank.alive():
            rank.signal(signal.SIGCONT)
            rank.signal(signal.SIGKILL)
            rank.wait(10)
    cluster.start().wait_ready()


if __name__ == "__main__":
    finish("test_rank_loss", main)
