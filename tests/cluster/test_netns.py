#!/usr/bin/env python3
"""Two hosts, each a network namespace of its own, joined by a cable that delays every frame.

A two-rank cluster over TCP between them gives the same bytes as on one machine, and survives the cable being cut.

Usage: test_netns.py [--binary PATH]       needs: root, ip (apt: iproute2), /dev/net/tun
"""
import os
import time

from cluster import PATIENCE, Checks, Cluster, arguments, finish, wait_until
from requests_set import REQUESTS, long_request
from two_hosts import TwoHosts

LONG = long_request(150)


def two_host_cluster(binary, hosts):
    cluster = Cluster(binary, cluster={
        "coordinator": f"{hosts.addresses[0]}:7070", "hosts": ["host-a", "host-b"], "token_file": "token",
        "ucx": {"tls": ["self", "tcp"], "net_devices": hosts.links, "expect_transport": "tcp", "on_slow": "refuse"}})
    token = os.path.join(cluster.folder, "token")
    with open(token, "w", encoding="utf-8") as file:
        file.write(os.urandom(16).hex() + "\n")
    os.chmod(token, 0o600)
    # `ip netns exec` also mounts the namespace's own /sys, where UCX looks for network devices.
    cluster.prefix = {rank: ["ip", "netns", "exec", hosts.names[rank]] for rank in range(2)}
    return cluster


def check_replies(checks, cluster, hosts, expected):
    before, start = list(hosts.cable.carried), time.monotonic()
    for name, (path, body) in REQUESTS.items():
        reply = cluster.client.replies(path, body)[0]
        checks.check(f"{name}: the same over the delayed cable", reply.sha == expected[name].sha,
                     f"{reply.sha} {expected[name].sha}, {reply.facts['decode_s']:.2f} s")
    reply = cluster.client.replies("/v1/chat/completions", LONG)[0]
    checks.equal("serial reply: the same", reply.sha, expected["long"].sha)
    tokens = reply.usage["completion_tokens"]
    far, near = (each.facts["decode_s"] / tokens * 1e3 for each in (reply, expected["long"]))
    print(f"  a serial token takes {far:.2f} ms over the cable, {near:.2f} ms on one machine")
    sent = [hosts.cable.carried[i] - before[i] for i in range(2)]
    checks.check("the activations went over the cable", min(sent) > 1 << 20,
                 f"{sent[0] / 1e6:.1f} and {sent[1] / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")


def check_cut(checks, cluster, hosts, expected):
    """The cable is cut during a reply, without either end being told, and mended."""
    stream = cluster.client.stream("/v1/chat/completions", LONG)
    wait_until(lambda: stream.reply.events > 5, 30, "the stream to begin")
    start = time.monotonic()
    hosts.cable.cut = True
    reason = cluster.wait_not_ready(30).json().get("reason") or ""
    took = time.monotonic() - start
    checks.check("cable cut: noticed, by name", took < 3 * PATIENCE and "rank 1" in reason, f"{took:.2f} s, {reason}")
    text = cluster.ranks[0].text()
    checks.check("cable cut: rank 0's log names the host", "host-b" in text, "")
    time.sleep(1)
    hosts.cable.cut = False
    start = time.monotonic()
    reply = stream.wait(90 * PATIENCE)
    checks.check("cable mended: the reply goes on to the same bytes", reply.same(expected["long"]) and reply.done,
                 f"{reply.sha} {expected['long'].sha} {reply.error or ''} {stream.broken or ''}")
    print(f"  it was whole {time.monotonic() - start:.1f} s after the cable was mended")


def main():
    args = arguments(__doc__)
    checks = Checks()
    with TwoHosts() as hosts:
        with Cluster(args.binary) as cluster:
            cluster.start().wait_ready()
            expected = {name: cluster.client.replies(path, body)[0] for name, (path, body) in REQUESTS.items()}
            expected["long"] = cluster.client.replies("/v1/chat/completions", LONG)[0]
            cluster.terminate()
        hosts.enter(0)  # this thread: the client's connections start on host 0
        trip = hosts.round_trip()
        checks.check("the cable delays", trip > 2 * hosts.delay, f"a round trip takes {trip * 1e3:.2f} ms")
        with two_host_cluster(args.binary, hosts) as cluster:
            cluster.start().wait_ready()
            checks.section("two hosts", check_replies, cluster, hosts, expected)
            checks.section("cable cut", check_cut, cluster, hosts, expected)
            checks.equal("exit codes after SIGTERM", cluster.terminate(), {0: 0, 1: 0})
    return checks.failures


if __name__ == "__main__":
    finish("test_netns", main)
