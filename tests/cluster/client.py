"""A small HTTP and SSE client on http.client: what the tests ask a cluster with."""
import http.client
import json
import threading
import time


class Response:
    def __init__(self, status, headers, body, seconds):
        self.status, self.headers, self.body, self.seconds = status, headers, body, seconds

    def json(self):
        return json.loads(self.body)

    def error(self):
        """The error object of an OpenAI-style error body, or {}."""
        try:
            return self.json().get("error") or {}
        except ValueError:
            return {}


class Reply:
    """One choice of a whole or streamed reply."""

    def __init__(self):
        self.text, self.finish, self.error, self.usage, self.facts = "", None, None, None, {}
        self.tool_calls, self.events, self.done = [], 0, False

    sha = property(lambda self: self.facts.get("token_sha"))
    ids = property(lambda self: self.facts.get("token_ids"))

    def same(self, other):
        return (self.text, self.sha, self.finish) == (other.text, other.sha, other.finish)


class Stream:
    """A streamed reply, read on its own thread; `reply` grows while it runs."""

    def __init__(self, connection, response):
        self.reply, self.broken = Reply(), None
        self.connection, self.response, self.socket = connection, response, connection.sock or response.fp.raw._sock
        self.started = self.last_event = time.monotonic()
        self.raw_events = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        try:
            for line in self.response:
                if line.startswith(b"data: "):
                    self._event(line[6:].strip())
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.broken = error

    def _event(self, data):
        self.last_event = time.monotonic()
        if data == b"[DONE]":
            self.reply.done = True
            return
        event = json.loads(data)
        self.raw_events.append(event)
        self.reply.events += 1
        if "error" in event:
            self.reply.error = event["error"]
        if event.get("usage"):
            self.reply.usage = event["usage"]
        for choice in event.get("choices", []):
            if choice["index"] != 0:
                continue
            delta = choice.get("delta", {})
            self.reply.text += (delta.get("content") or "") + (choice.get("text") or "")
            self.reply.tool_calls += delta.get("tool_calls") or []
            self.reply.finish = choice.get("finish_reason") or self.reply.finish
        if event.get("tensorfold"):
            self.reply.facts = event["tensorfold"]

    def running(self):
        return self.thread.is_alive()

    def wait(self, seconds):
        self.thread.join(seconds)
        if self.thread.is_alive():
            self.close()
            raise TimeoutError(f"the stream did not end within {seconds:.0f} s ({self.reply.events} events so far)")
        return self.reply

    def close(self):
        """Leaves at once, as a client that is gone."""
        try:
            self.socket.shutdown(2)
        except OSError:
            pass
        self.connection.close()


class Client:
    def __init__(self, host, port, patience=1.0):
        self.host, self.port, self.patience = host, port, patience

    def _connection(self, seconds):
        return http.client.HTTPConnection(self.host, self.port, timeout=seconds * self.patience)

    def request(self, method, path, body=None, seconds=120, headers=None):
        start = time.monotonic()
        connection = self._connection(seconds)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "strict")
            return Response(answer.status, dict(answer.getheaders()), text, time.monotonic() - start)
        finally:
            connection.close()

    def get(self, path, seconds=10):
        return self.request("GET", path, seconds=seconds)

    def post(self, path, body, seconds=120):
        return self.request("POST", path, body, seconds)

    def ready_status(self):
        """/ready's status, or None while nothing listens."""
        try:
            return self.get("/ready", seconds=5).status
        except (OSError, http.client.HTTPException):
            return None

    def metric(self, name):
        """The sum of a counter or gauge over its labels."""
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").body.splitlines() if not line.startswith("#"))
        return sum(float(value) for key, value in lines if key.split("{")[0] == name)

    def replies(self, path, body, seconds=120):
        """All choices of a plain reply; an error status raises."""
        response = self.post(path, body, seconds)
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {response.body[:500]}")
        data = response.json()
        out = []
        for choice in data["choices"]:
            reply = Reply()
            message = choice.get("message", {})
            reply.text = (message.get("content") or "") + (choice.get("text") or "")
            reply.tool_calls = message.get("tool_calls") or []
            reply.finish = choice["finish_reason"]
            # The block stands in each choice when there are several, else in the reply.
            reply.facts = choice.get("tensorfold") or data["tensorfold"]
            reply.usage, reply.done = data.get("usage"), True
            out.append(reply)
        return out

    def chat(self, prompt, seconds=120, **options):
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return self.replies("/v1/chat/completions", {"messages": messages, **options}, seconds)[0]

    def complete(self, prompt, seconds=120, **options):
        return self.replies("/v1/completions", {"prompt": prompt, **options}, seconds)[0]

    def stream(self, path, body, seconds=120):
        """A running Stream, or the Response when the answer is no stream."""
        start = time.monotonic()
        connection = self._connection(seconds)
        connection.request("POST", path, json.dumps({**body, "stream": True}).encode(),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read().decode()
            connection.close()
            return Response(answer.status, dict(answer.getheaders()), text, time.monotonic() - start)
        return Stream(connection, answer)

    def stream_chat(self, prompt, seconds=120, **options):
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return self.stream("/v1/chat/completions", {"messages": messages, **options}, seconds)

    def stream_complete(self, prompt, seconds=120, **options):
        return self.stream("/v1/completions", {"prompt": prompt, **options}, seconds)
