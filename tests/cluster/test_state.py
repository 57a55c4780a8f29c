#!/usr/bin/env python3
"""The prefix cache and states on disk of a whole cluster: what is resent, continued or branched starts late, also after
kill -9 of every rank, and always gives the bytes of a run without any cache; damaged files are computed again; pinned
contexts are back before ready; `tensorfold state` and /admin/states say what there is.

Usage: test_state.py [--binary PATH] [--tokens N]
"""
import glob
import hashlib
import os
import subprocess
import time

from cluster import Checks, Cluster, arguments, finish, wait_until

ADMIN = "an admin key for tests"
WORDS = "the fox named Lily found a small blue stone near the river and asked the old owl what it was for "


def prompt_of(tokens, seed=0):
    """Text of about so many tokens; beginnings differ by seed."""
    return f"Story {seed}. " + (WORDS * (tokens // 18 + 1))[: tokens * 4]


def ask(cluster, prompt, **options):
    reply = cluster.client.complete(prompt, temperature=0.8, seed=9, max_tokens=40, return_token_ids=True,
                                    ignore_eos=True, **options)
    return reply


def same_as_cold(checks, cluster, what, prompt, cold=None):
    """Asks with the cache; the reply must be the cold one's. Returns it."""
    cold = cold or ask(cluster, prompt, cache=False)
    warm = ask(cluster, prompt)
    checks.check(f"{what}: the bytes of a cold run", warm.same(cold) and warm.ids == cold.ids,
                 f"{warm.sha} {cold.sha}, cached {warm.facts['cached']} of {warm.usage['prompt_tokens']}")
    return warm


def wait_written(cluster):
    """Until no more states have been written for a while."""
    seen = [-1.0, time.monotonic()]

    def settled():
        saved = cluster.client.metric("tensorfold_state_saved_total")
        if saved != seen[0]:
            seen[:] = [saved, time.monotonic()]
        return saved > 0 and time.monotonic() - seen[1] > 1.0
    wait_until(settled, 60, "states to be written", every=0.1)


def restart(cluster):
    """kill -9 of every rank at once, then all again."""
    for number in cluster.ranks:
        cluster.kill(number)
    cluster.start().wait_ready()


def tool(cluster, *words):
    return subprocess.run([cluster.binary, "state", *words], capture_output=True, text=True, timeout=120, check=False)


def check_memory(checks, cluster, tokens):
    prompt = prompt_of(tokens)
    cold = ask(cluster, prompt, cache=False)
    first = same_as_cold(checks, cluster, "first", prompt, cold)
    again = same_as_cold(checks, cluster, "resent", prompt, cold)
    count = again.usage["prompt_tokens"]
    checks.check("resent: all but the last page is there", count - 64 <= again.facts["cached"] < count,
                 again.facts["cached"])
    print(f"         prompt of {count} tokens: cold {cold.facts['prefill_s']:.3f} s, resent "
          f"{again.facts['prefill_s']:.4f} s ({100 * again.facts['prefill_s'] / cold.facts['prefill_s']:.2f} %)")
    # A turn after the reply, by ids so that nothing is tokenised anew.
    ids = cluster.client.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    turn = ids + first.ids + [5, 6, 7, 8]
    after = same_as_cold(checks, cluster, "a turn after the reply", turn)
    checks.check("a turn after the reply: only new tokens are read", after.facts["cached"] >= len(turn) - 4 - 2,
                 f"{after.facts['cached']} of {len(turn)}")
    same_as_cold(checks, cluster, "branched in the middle", ids[: len(ids) // 2] + [9, 8, 7])
    several = {"prompt": prompt_of(400, 7), "temperature": 1, "seed": 3, "max_tokens": 12, "n": 3}
    cold_choices = cluster.client.replies("/v1/completions", {**several, "cache": False})
    choices = cluster.client.replies("/v1/completions", several)
    checks.check("choices of one request", all(a.same(b) for a, b in zip(choices, cold_choices)),
                 [c.facts["cached"] for c in choices])
    checks.check("choices share their prompt", all(c.facts["cached"] > 300 for c in choices[1:]),
                 [c.facts["cached"] for c in choices])


def check_killed(checks, cluster):
    prompt = prompt_of(3000, 1)
    cold = ask(cluster, prompt, cache=False)
    same_as_cold(checks, cluster, "before kill -9", prompt, cold)
    wait_written(cluster)
    restart(cluster)
    warm = same_as_cold(checks, cluster, "after kill -9", prompt, cold)
    count = warm.usage["prompt_tokens"]
    checks.check("after kill -9: from disk", warm.facts["cached"] >= count - 64, f"{warm.facts['cached']} of {count}")
    print(f"         cold {cold.facts['prefill_s']:.3f} s, from disk {warm.facts['prefill_s']:.3f} s")
    # Killed while it writes: whatever is there under its name is whole.
    for number in range(3):
        ask(cluster, prompt_of(1500, 20 + number))
        time.sleep(0.05 * number)
        restart(cluster)
        found = tool(cluster, "verify", "--directory", cluster.states)
        checks.check(f"killed while writing, {number}: no damaged file", found.returncode == 0 and
                     " 0 damaged" in found.stdout, found.stdout.strip().splitlines()[-1:])
    same_as_cold(checks, cluster, "after three more", prompt, cold)


def check_damage(checks, cluster):
    prompt = prompt_of(2600, 2)
    cold = ask(cluster, prompt, cache=False)
    same_as_cold(checks, cluster, "damage: before", prompt, cold)
    wait_written(cluster)
    for number in cluster.ranks:
        cluster.kill(number)
    files = sorted(glob.glob(os.path.join(cluster.states, "*", "rank1of*", "*.tfst")))
    for index, path in enumerate(files):
        with open(path, "r+b") as file:
            size = os.path.getsize(path)
            if index % 3 == 0:
                file.truncate(size // 2)
            else:
                file.seek(size - 5000 if index % 3 == 1 else 40)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 4]))
    checks.check("damage: state verify finds all of it", tool(cluster, "verify", "--directory", cluster.states)
                 .stdout.count("damaged: ") == len(files), len(files))
    cluster.start().wait_ready()
    warm = same_as_cold(checks, cluster, "damage: computed again", prompt, cold)
    checks.equal("damage: nothing of it was used", warm.facts["cached"], 0)
    checks.check("damage: and it is counted", cluster.client.metric("tensorfold_state_restore_failures_total") > 0)


def check_admin(checks, cluster):
    def admin(method, body=None, key=ADMIN):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return cluster.client.request(method, "/admin/states", body, headers=headers)
    prompt = prompt_of(2500, 3)
    cold = ask(cluster, prompt, cache=False)
    first = same_as_cold(checks, cluster, "pinned", prompt, cold)
    wait_written(cluster)
    checks.equal("admin: without a key", admin("GET", key=None).status, 401)
    checks.equal("admin: with another key", admin("GET", key="guess").status, 401)
    data = admin("GET").json()["data"]
    last = max(data, key=lambda entry: (entry["first_position"] + entry["tokens"], entry["snapshot"]))
    checks.equal("admin: pin", admin("POST", {"action": "pin", "key": last["key"], "name": "story"}).status, 200)
    for body in ({"action": "pin", "key": "0" * 32, "name": "x"}, {"action": "pin", "key": last["key"], "name": "../x"},
                 {"action": "dance"}, {"action": "unpin", "name": "nobody"}, []):
        checks.equal(f"admin: refused {body}", admin("POST", body).status, 400)
    time.sleep(0.5)
    restart(cluster)
    checks.check("pinned: back before ready", cluster.client.metric("tensorfold_state_restored_total") >= 2,
                 cluster.client.metric("tensorfold_state_restored_total"))
    ids = cluster.client.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    turn = same_as_cold(checks, cluster, "pinned: a turn after it", ids + first.ids + [4])
    checks.check("pinned: from memory", turn.facts["cached"] > 2000, turn.facts["cached"])
    checks.equal("admin: unpin", admin("POST", {"action": "unpin", "name": "story"}).status, 200)
    checks.equal("admin: drop", admin("POST", {"action": "drop", "key": last["key"]}).status, 200)
    checks.check("admin: dropped", all(entry["key"] != last["key"] for entry in admin("GET").json()["data"]))


def check_tool(checks, cluster):
    elsewhere = os.path.join(cluster.folder, "elsewhere")
    listed = tool(cluster, "ls", "--directory", cluster.states)
    checks.check("state ls", listed.returncode == 0 and "rank0of2" in listed.stdout and "rank1of2" in listed.stdout,
                 len(listed.stdout.splitlines()))
    saved = tool(cluster, "save", "--directory", cluster.states, "--to", elsewhere)
    checks.check("state save", saved.returncode == 0 and " states copied" in saved.stdout, saved.stdout.strip()[-60:])
    pruned = tool(cluster, "prune", "--directory", cluster.states, "--quota", "0")
    checks.check("state prune", pruned.returncode == 0 and not glob.glob(cluster.states + "/*/*/*.tfst"), pruned.stdout)
    back = tool(cluster, "restore", "--directory", cluster.states, "--from", elsewhere)
    checks.check("state restore", back.returncode == 0 and bool(glob.glob(cluster.states + "/*/*/*.tfst")), back.stdout)
    checks.equal("state verify", tool(cluster, "verify", "--directory", cluster.states).returncode, 0)
    checks.check("state of no folder", tool(cluster, "ls", "--directory", elsewhere + "x").returncode != 0)


def main():
    args = arguments(__doc__, ("--tokens", {"type": int, "default": 3000, "help": "of the resent prompt"}))
    checks = Checks()
    key_hash = hashlib.sha256(ADMIN.encode()).hexdigest()
    with Cluster(args.binary, state={"min_tokens": 128}, http={"admin_keys": [key_hash]}) as cluster:
        cluster.states = os.path.join(cluster.folder, "states")
        cluster.settings["state"]["directory"] = cluster.states
        cluster.profile = cluster.write_profile("profile.yaml", {})
        cluster.start().wait_ready()
        checks.section("memory", check_memory, cluster, args.tokens)
        checks.section("kill -9", check_killed, cluster)
        checks.section("damage", check_damage, cluster)
        checks.section("admin and pins", check_admin, cluster)
        checks.section("tensorfold state", check_tool, cluster)
        checks.equal("exit codes after SIGTERM", cluster.terminate(), {0: 0, 1: 0})
    return checks.failures


if __name__ == "__main__":
    finish("test_state", main)
