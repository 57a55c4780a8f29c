#!/usr/bin/env python3
"""Two hosts, each a network namespace of its own, joined by a link that delays every packet.

A two-rank cluster over TCP between them gives the same bytes as on one machine, and survives the link going down.

Usage: test_netns.py [--binary PATH]       needs: root, and the commands ip and tc (apt: iproute2)

All traffic stays inside the two namespaces, which the test makes and removes.
"""
import ctypes
import json
import os
import shutil
import subprocess
import time

from cluster import PATIENCE, Checks, Cluster, Skip, arguments, finish, wait_until
from requests_set import REQUESTS, long_request

NET = "10.213.77"
DELAY = "1ms"
LONG = long_request(150)
CLONE_NEWNET = 0x40000000


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class TwoHosts:
    """Namespaces tf<pid>a (rank 0) and tf<pid>b (rank 1), a delayed veth pair between them."""

    def __init__(self):
        self.names = [f"tf{os.getpid()}{side}" for side in "ab"]
        self.links = [f"{name}v" for name in self.names]
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY)

    def __enter__(self):
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", self.links[0], "netns", self.names[0], "type", "veth", "peer", "name",
                self.links[1], "netns", self.names[1])
            for i, (name, link) in enumerate(zip(self.names, self.links)):
                self.inside(i, "ip", "addr", "add", f"{NET}.{i + 1}/24", "dev", link)
                self.inside(i, "ip", "link", "set", link, "up")
                self.inside(i, "ip", "link", "set", "lo", "up")
                self.inside(i, "tc", "qdisc", "add", "dev", link, "root", "netem", "delay", DELAY)
        except RuntimeError as error:
            self.__exit__()
            raise Skip(f"this machine does not let us make network namespaces with a delayed link: {error}") from None
        return self

    def __exit__(self, *_):
        self.enter(self.home)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)

    @staticmethod
    def enter(descriptor):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")

    def inside(self, host, *command):
        return run("ip", "netns", "exec", self.names[host], *command)

    def sent(self, host):
        """Bytes that the host has sent over the link."""
        (link,) = json.loads(self.inside(host, "ip", "-s", "-j", "link", "show", self.links[host]))
        return link["stats64"]["tx"]["bytes"]


def two_host_cluster(binary, hosts):
    cluster = Cluster(binary, cluster={
        "coordinator": f"{NET}.1:7070", "hosts": ["host-a", "host-b"], "token_file": "token",
        "ucx": {"tls": ["self", "tcp"], "net_devices": hosts.links, "expect_transport": "tcp", "on_slow": "refuse"}})
    token = os.path.join(cluster.folder, "token")
    with open(token, "w", encoding="utf-8") as file:
        file.write(os.urandom(16).hex() + "\n")
    os.chmod(token, 0o600)
    cluster.prefix = {1: ["ip", "netns", "exec", hosts.names[1]]}  # rank 0 starts in this process's namespace
    return cluster


def check_replies(checks, cluster, hosts, expected):
    before = [hosts.sent(0), hosts.sent(1)]
    start = time.monotonic()
    for name, (path, body) in REQUESTS.items():
        reply = cluster.client.replies(path, body)[0]
        checks.check(f"{name}: the same over the delayed link", reply.sha == expected[name].sha,
                     f"{reply.sha} {expected[name].sha}, {reply.facts['decode_s']:.2f} s")
    reply = cluster.client.replies("/v1/chat/completions", LONG)[0]
    checks.equal("serial reply: the same", reply.sha, expected["long"].sha)
    tokens = reply.usage["completion_tokens"]
    local = expected["long"].facts["decode_s"] / tokens * 1e3
    far = reply.facts["decode_s"] / tokens * 1e3
    print(f"  a serial token takes {far:.2f} ms over the link, {local:.2f} ms on one machine")
    sent = [hosts.sent(i) - before[i] for i in range(2)]
    checks.check("the activations went over the link", min(sent) > 1 << 20,
                 f"{sent[0] / 1e6:.1f} and {sent[1] / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")


def check_cut(checks, cluster, hosts, expected):
    """The link goes down during a reply and comes back."""
    stream = cluster.client.stream("/v1/chat/completions", LONG)
    wait_until(lambda: stream.reply.events > 5, 30, "the stream to begin")
    start = time.monotonic()
    hosts.inside(1, "ip", "link", "set", hosts.links[1], "down")
    ready = cluster.wait_not_ready(30)
    took = time.monotonic() - start
    reason = ready.json().get("reason") or ""
    checks.check("link down: noticed, by name", took < 3 * PATIENCE and "host-b" in reason, f"{took:.2f} s, {reason}")
    time.sleep(1)
    hosts.inside(1, "ip", "link", "set", hosts.links[1], "up")
    reply = stream.wait(90 * PATIENCE)
    checks.check("link up: the reply goes on to the same bytes", reply.same(expected["long"]) and reply.done,
                 f"{reply.sha} {expected['long'].sha} {reply.error or ''} {stream.broken or ''}")


def main():
    args = arguments(__doc__)
    if os.geteuid() != 0:
        raise Skip("needs root, to make network namespaces")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise Skip(f"needs the command {command} (apt: iproute2)")
    checks = Checks()
    with TwoHosts() as hosts:
        with Cluster(args.binary) as cluster:
            cluster.start().wait_ready()
            expected = {name: cluster.client.replies(path, body)[0] for name, (path, body) in REQUESTS.items()}
            expected["long"] = cluster.client.replies("/v1/chat/completions", LONG)[0]
            cluster.terminate()
        hosts.enter(os.open(f"/run/netns/{hosts.names[0]}", os.O_RDONLY))  # this thread, and what it starts from now
        print(f"link: {hosts.inside(0, 'tc', 'qdisc', 'show', 'dev', hosts.links[0]).strip()}")
        with two_host_cluster(args.binary, hosts) as cluster:
            cluster.start().wait_ready()
            checks.section("two hosts", check_replies, cluster, hosts, expected)
            checks.section("link cut", check_cut, cluster, hosts, expected)
            checks.equal("exit codes after SIGTERM", cluster.terminate(), {0: 0, 1: 0})
    return checks.failures


if __name__ == "__main__":
    finish("test_netns", main)
