"""A server that speaks as vLLM's does, with made-up drafting: three tokens a step, one without a drafter.

As in vLLM, drafts that are accepted behind the end of a text count. In the environment: with NO_COUNTERS it counts
nothing; with REFUSE=METHOD it does not start with such a speculative config; with DIE_ONCE=FILE it ends in the middle
of its fifth answer, unless FILE exists, which it makes.
"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

SLOTS = 6
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--model")
parser.add_argument("--no-enable-prefix-caching", action="store_true", required=True)
parser.add_argument("--no-async-scheduling", action="store_true")
parser.add_argument("--speculative-config", type=json.loads, default=None)
args = parser.parse_args()
if (args.speculative_config or {}).get("method") == os.environ.get("REFUSE", "nothing"):
    raise SystemExit("ValueError: found no such method")
accepted_a_step = {None: 0, "custom_class": 0, "dflash": 2}[(args.speculative_config or {}).get("method")]
totals = {"requests": 0, "rounds": 0, "accepted": 0}
lock = Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, kind="application/json", status=200):
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": args.model}]}))
        elif self.path == "/metrics":
            name = "vllm:spec_decode_num_"
            lines = ["# TYPE vllm:spec_decode_num_drafts counter"]
            if args.speculative_config and "NO_COUNTERS" not in os.environ:
                counts = {"drafts": totals["rounds"], "draft_tokens": SLOTS * totals["rounds"]}
                counts["accepted_tokens"] = totals["accepted"]
                lines += [f'{name}{key}_total{{engine="0"}} {float(value)}' for key, value in counts.items()]
                slots = [totals["rounds"] if slot < accepted_a_step else 0 for slot in range(SLOTS)]
                lines += [
                    f'{name}accepted_tokens_per_pos_total{{engine="0",position="{slot}"}} {float(count)}'
                    for slot, count in enumerate(slots)
                ]
            self.answer("\n".join(lines), "text/plain")
        else:
            self.answer("")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["prompt"] == [0]:
            self.answer(json.dumps({"error": {"message": "no such prompt"}}), status=400)
            return
        with lock:
            totals["requests"] += 1
            number = totals["requests"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        wanted, tokens = request["max_tokens"], 1
        self.event({"choices": [{"text": "a"}], "usage": None})
        marker = os.environ.get("DIE_ONCE")
        if marker and number == 5 and not Path(marker).exists():
            Path(marker).touch()
            os._exit(1)
        while tokens < wanted:
            with lock:
                totals["rounds"] += 1
                totals["accepted"] += accepted_a_step
            tokens = min(wanted, tokens + 1 + accepted_a_step)
            self.event({"choices": [{"text": "b"}], "usage": None})
        self.event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, body):
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())


ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
