"""An engine process without an engine: what `corun_bench.engine` is from outside, and the ways in which it ends.

`python -m tests.bench.fake_engine SETTINGS COMMANDS EVENTS`; the model's name says what it does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import msgspec
import zmq


def main() -> None:
    settings, commands, events = sys.argv[1:]
    does = json.loads(settings)["model"]
    if does == "fails":
        print("(EngineCore pid=1) ValueError: no such weights", flush=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    while does == "starts for ever":
        time.sleep(1)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outbox.connect(events)
    if does == "answers late":
        tell(outbox, "ready", {"max_num_seqs": 1024})
        time.sleep(0.3)
        inbox.connect(commands)
    else:
        inbox.connect(commands)
        tell(outbox, "ready", {"max_num_seqs": 1024})
    while (command := msgspec.msgpack.decode(inbox.recv()))[0] != "stop":
        if command[0] == "forget":
            tell(outbox, "forgot", True)
        elif command[0] == "start":
            start(does, outbox, command)
    context.destroy(linger=0)


def start(does: str, outbox: Any, command: list[Any]) -> None:
    if does == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif does == "dies":
        tell(outbox, "died", "the engine's output loop ended")
    elif does.startswith("answers"):
        count = command[3]["max_tokens"]
        tell(outbox, "step", [(command[1], [7] * count, [-1.0] * count, "length", None)])


def tell(outbox: Any, kind: str, value: Any) -> None:
    outbox.send(msgspec.msgpack.encode((kind, value)))


if __name__ == "__main__":
    main()
