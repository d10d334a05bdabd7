"""An engine's interpreter that is none: it takes SGLang's command line and serves what a start asks for."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

# /generate prints what an engine says when it runs out of memory, and dies.
_SCRIPT = """
import http.server, json, os, sys
words = sys.argv
assert words[1:3] == ["-m", "sglang.launch_server"], words
print("pid", os.getpid(), "command", *words[3:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"version": "0.0.fake", "model_path": "models/target"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        print("RuntimeError: out of memory", flush=True)
        os._exit(3)
    def log_message(self, *arguments):
        pass
port = int(words[words.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def write_engine(folder: Path) -> Path:
    """The interpreter, for serving.sglang.python."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{_SCRIPT}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def told(log: Path, word: str) -> str:
    """What follows a word in the fake engine's log."""
    return log.read_text().split(f"{word} ")[1].split()[0]
