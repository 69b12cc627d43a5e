"""A helper process that misbehaves as its questions say."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from scheduler_service.engine.helper_process import Answer, confine, serve


def main() -> None:
    serve(get_ready)


def get_ready(greeting: dict[str, Any]) -> Answer:
    confine(64 << 20)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        deed = request["do"]
        if deed == "exit":
            os._exit(1)
        elif deed == "eat_memory":
            bytearray(256 << 20)
        elif deed == "write_file":
            Path("/tmp/odd_helper").write_text("x")
        elif deed == "sleep":
            time.sleep(60)
        return {**greeting, "pid": os.getpid(), "modules": len(sys.modules)}

    return answer
