"""A cluster of rank processes on this machine, for tests: started, killed, restarted, asked over HTTP.

Standard library only. A Cluster writes its own profile into a temporary folder, with free ports; each rank is one
`tensorfold serve` process, whose output goes to a file there. Every wait has a deadline, and its error shows the end of
the ranks' logs.
"""
import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "real"))

from client import Client  # noqa: E402
from outcome import Skip, finish  # noqa: E402,F401  (for the tests)

SPROUT = os.path.join(ROOT, "deploy", "models", "sprout")
# Sanitizer builds and busy machines are slower: all deadlines are multiplied by this.
PATIENCE = float(os.environ.get("TENSORFOLD_TEST_PATIENCE", "1"))


def free_ports(count):
    """Ports of 127.0.0.1 that nobody listens on. All are held until all are known, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def yaml_lines(value, indent=0):
    """Nested dicts of plain scalars and lists, as block YAML."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield " " * indent + f"{key}:"
            yield from yaml_lines(item, indent + 2)
        else:
            text = "[" + ", ".join(map(str, item)) + "]" if isinstance(item, list) else item
            yield " " * indent + f"{key}: {str(text).lower() if isinstance(text, bool) else text}"


def merged(base, more):
    """`more` over `base`, dict by dict; None removes a key."""
    out = dict(base)
    for key, value in more.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict):
            out[key] = merged(out.get(key, {}), value)
        else:
            out[key] = value
    return out


def wait_until(condition, seconds, what, every=0.02):
    """The first true value of condition(); TimeoutError naming `what` after `seconds` (times PATIENCE)."""
    deadline = time.monotonic() + seconds * PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds * PATIENCE:.0f} s for {what}")
        time.sleep(every)


class Rank:
    """One process and its log."""

    def __init__(self, number, command, log):
        self.number, self.log = number, log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def alive(self):
        return self.process.poll() is None

    def signal(self, number):
        if self.alive():
            self.process.send_signal(number)

    def wait(self, seconds):
        """The exit code; TimeoutError if it does not end."""
        try:
            return self.process.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"rank {self.number} did not end within {seconds * PATIENCE:.0f} s") from None

    def text(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()


class Cluster:
    """As a context manager: leaves no process behind, and shows the logs when a test breaks."""

    def __init__(self, binary, world=2, **sections):
        self.binary, self.world = binary, world
        self.folder = tempfile.mkdtemp(prefix="tensorfold-cluster-")
        self.http_port, grpc_port, control_port = free_ports(3)
        base = {
            "model": {"path": SPROUT},
            "cluster": {"world": world, "transport": "ucx" if world > 1 else "local", "join_timeout": "60s",
                        "coordinator": f"127.0.0.1:{control_port}"},
            "compute": {"threads": 1},
            "memory": {"kv_bytes": "128MiB", "floor_free": "16MiB"},
            "http": {"listen": f"127.0.0.1:{self.http_port}"},
            "grpc": {"listen": f"127.0.0.1:{grpc_port}"},
        }
        if world > 1:
            base["cluster"]["ucx"] = {"tls": ["self", "sm", "tcp"], "net_devices": ["lo"]}
        self.settings = merged(base, sections)
        self.profile = self.write_profile("profile.yaml", {})
        self.ranks = {}
        self.prefix = {}  # rank -> words before the command (to enter a network namespace)
        self.started = 0
        self.client = Client("127.0.0.1", self.http_port, PATIENCE)

    def write_profile(self, name, sections):
        """A profile like this cluster's with some options changed; returns its path."""
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(yaml_lines(merged(self.settings, sections))) + "\n")
        os.chmod(path, 0o600)
        return path

    def start(self, *ranks, profile=None):
        """Starts the ranks in this order (all, 1 before 0, when none are given)."""
        for number in ranks or [*range(1, self.world), 0]:
            self.started += 1
            log = os.path.join(self.folder, f"rank{number}-{self.started}.log")
            command = [self.binary, "serve", "--profile", profile or self.profile, "--rank", str(number)]
            self.ranks[number] = Rank(number, self.prefix.get(number, []) + command, log)
        return self

    def wait_ready(self, seconds=60):
        def ready():
            gone = [rank for rank in self.ranks.values() if not rank.alive()]
            if gone:
                code = gone[0].process.returncode
                raise RuntimeError(f"rank {gone[0].number} ended with {code}: {gone[0].text()[-1500:]}")
            return self.client.ready_status() == 200
        try:
            wait_until(ready, seconds, "the cluster to be ready", every=0.05)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None
        return self

    def wait_not_ready(self, seconds):
        """/ready's answer once it is 503."""
        def down():
            response = self.client.get("/ready")
            return response if response.status == 503 else None
        return wait_until(down, seconds, "/ready to say 503")

    def kill(self, number):
        """kill -9, and waits until the process is gone."""
        self.ranks[number].signal(signal.SIGKILL)
        self.ranks[number].wait(10)

    def terminate(self, seconds=20):
        """SIGTERM to rank 0 (which ends the others); the exit codes by rank."""
        self.ranks[0].signal(signal.SIGTERM)
        return {number: rank.wait(seconds) for number, rank in sorted(self.ranks.items())}

    def logs(self):
        """The ends of all ranks' logs, without the lines about the tests' own polling."""
        out = []
        for number, rank in sorted(self.ranks.items()):
            lines = [line for line in rank.text().splitlines() if "GET /ready" not in line]
            out.append(f"--- rank {number} ---\n" + "\n".join(lines[-40:]))
        return "\n".join(out)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            print(self.logs(), flush=True)
        for rank in self.ranks.values():
            if rank.alive():
                rank.signal(signal.SIGCONT)
                rank.signal(signal.SIGKILL)
                rank.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Checks:
    """Collects what failed; prints each check."""

    def __init__(self):
        self.failures = []

    def check(self, name, ok, detail=""):
        print(f"  {'ok    ' if ok else 'FAILED'} {name}{': ' + str(detail) if detail != '' else ''}", flush=True)
        if not ok:
            self.failures.append(f"{name}: {detail}" if detail != "" else name)
        return ok

    def equal(self, name, found, expected):
        return self.check(name, found == expected, found if found == expected else f"{found!r}, expected {expected!r}")

    def section(self, name, function, *args):
        """Runs one part of a test; an exception in it fails it, and the other parts still run."""
        print(name, flush=True)
        try:
            function(self, *args)
        except Exception as error:  # noqa: BLE001
            self.check(f"{name}: ran to its end", False, f"{type(error).__name__}: {error}")


def default_binary():
    found = os.environ.get("TENSORFOLD_BINARY")
    if found:
        return found
    for preset in ("release", "dev"):
        path = os.path.join(ROOT, "build", preset, "coordinator", "commands", "tensorfold")
        if os.path.exists(path):
            return path
    return None


def arguments(description, *flags):
    """--binary PATH (or TENSORFOLD_BINARY, or the build folder's), and `flags`: (name, keyword arguments)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=default_binary(), help="the tensorfold program")
    for name, keywords in flags:
        parser.add_argument(name, **keywords)
    args = parser.parse_args()
    if args.binary is None:
        raise Skip("no tensorfold program: build it, or give --binary")
    commands = subprocess.run([args.binary, "--help"], capture_output=True, text=True, timeout=60, check=False).stdout
    if " serve " not in commands:
        raise Skip(f"{args.binary} has no command serve")
    return args


def show(data, limit=200):
    """A short form for messages."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return text if len(text) <= limit else text[:limit] + "…"
