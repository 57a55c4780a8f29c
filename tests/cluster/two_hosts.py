"""Two network namespaces that stand for two hosts, and a cable between them that delays every frame and can be cut.

Linux, root, iproute2 and /dev/net/tun. The cable is this process: each namespace has a TAP device, and threads carry
the frames from one to the other. (The kernel's own delay, netem, is missing in many machines' kernels.) All traffic
stays in the two namespaces, which vanish with the `with` block.
"""
import collections
import ctypes
import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time

from outcome import Skip

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def enter_namespace(descriptor):
    """This thread, and what it starts from now on, is in that network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Cable:
    """Carries frames between two TAP descriptors, each `delay` seconds late; drops them while `cut`."""

    def __init__(self, ends, delay):
        self.ends, self.delay, self.cut, self.closed = ends, delay, False, False
        self.carried = [0, 0]  # bytes from end 0, from end 1
        self.thread = threading.Thread(target=self._carry, daemon=True)
        self.thread.start()

    def _carry(self):
        flight = collections.deque()  # (due, to, frame), in order since all are delayed alike
        while not self.closed:
            wait = min(0.1, max(0.0, flight[0][0] - time.monotonic())) if flight else 0.1
            readable, _, _ = select.select(self.ends, [], [], wait)
            now = time.monotonic()
            for source in readable:
                self._read(self.ends.index(source), flight, now)
            while flight and flight[0][0] <= time.monotonic():
                _, to, frame = flight.popleft()
                try:
                    os.write(self.ends[to], frame)
                except OSError:
                    pass  # the device is down: a lost frame

    def _read(self, end, flight, now):
        try:
            while True:
                frame = os.read(self.ends[end], 65536)
                if not self.cut:
                    self.carried[end] += len(frame)
                    flight.append((now + self.delay, 1 - end, frame))
        except OSError:
            pass  # no more frames now

    def close(self):
        self.closed = True
        self.thread.join()
        for end in self.ends:
            os.close(end)


class TwoHosts:
    """hosts.names: the namespaces of host 0 and 1; hosts.links: their devices; hosts.addresses; hosts.cable."""

    def __init__(self, network="10.213.77", delay=0.001):
        self.names = [f"tf{os.getpid()}{side}" for side in "ab"]
        self.links = [f"{name}t" for name in self.names]
        self.addresses = [f"{network}.1", f"{network}.2"]
        self.delay, self.cable = delay, None
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY)

    def __enter__(self):
        if os.geteuid() != 0:
            raise Skip("needs root, to make network namespaces")
        if shutil.which("ip") is None:
            raise Skip("needs the command ip (apt: iproute2)")
        ends = []
        try:
            for i, name in enumerate(self.names):
                run("ip", "netns", "add", name)
                ends.append(self._tap(i))
                self.inside(i, "ip", "addr", "add", f"{self.addresses[i]}/24", "dev", self.links[i])
                self.inside(i, "ip", "link", "set", self.links[i], "up")
                self.inside(i, "ip", "link", "set", "lo", "up")
        except (RuntimeError, OSError) as error:
            self.__exit__()
            raise Skip(f"this machine does not let us make network namespaces and TAP devices: {error}") from None
        self.cable = Cable(ends, self.delay)
        return self

    def __exit__(self, *_):
        enter_namespace(self.home)
        if self.cable is not None:
            self.cable.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)

    def _tap(self, host):
        self.enter(host)
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", self.links[host].encode(), IFF_TAP | IFF_NO_PI))
            return device
        finally:
            enter_namespace(self.home)

    def enter(self, host):
        descriptor = os.open(f"/run/netns/{self.names[host]}", os.O_RDONLY)
        try:
            enter_namespace(descriptor)
        finally:
            os.close(descriptor)

    def inside(self, host, *command):
        return run("ip", "netns", "exec", self.names[host], *command)

    def round_trip(self):
        """Seconds that a TCP connection from this namespace (host 0) to a closed port of host 1 takes to be refused."""
        best = 1.0
        for _ in range(5):
            start = time.monotonic()
            with socket.socket() as probe:
                probe.settimeout(5)
                if probe.connect_ex((self.addresses[1], 9)) == 0:
                    raise RuntimeError("something listens on port 9")
            best = min(best, time.monotonic() - start)
        return best
