"""A process that scores answers; started and watched by `reward.py`. Never imports torch.

    reward_worker SOCKET_FD PROGRESS_FD PARENT_PID

One socket, frames of a 4-byte little-endian length and JSON:
    in   {"sys_path": […], "function": "module:name"}     once          out  {"error": "" or why it cannot be loaded}
    in   [[response, ground_truth, data_source, prompt, extra], …]      out  [[reward, extras, prediction] or "what went wrong", …]
The progress file holds the number of answers done since the process began, so that the watcher knows which one hangs or kills.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError
from stretto.rewards import PARAMETERS, Reward, as_prediction, resolve

LENGTH = struct.Struct("<I")
PROGRESS = struct.Struct("<Q")
PR_SET_PDEATHSIG = 1
_NOT_EXTRAS = ("reward", "prediction")


def main(socket_fd: int, progress_fd: int, parent: int) -> None:
    """Serve until the parent closes the socket or dies."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which drains
    progress = mmap.mmap(progress_fd, PROGRESS.size)
    with socket.socket(fileno=socket_fd) as parent_socket, parent_socket.makefile("rwb") as stream:
        hello = _read(stream)
        sys.path[:] = hello["sys_path"]
        try:
            function = resolve(hello["function"])
        except RecipeError as err:
            _write(stream, {"error": err.message})
            return
        _write(stream, {"error": ""})
        num_done = 0
        while (answers := _read(stream)) is not None:
            results: list[Any] = []
            for answer in answers:
                results.append(_score(function, answer))
                num_done += 1
                PROGRESS.pack_into(progress, 0, num_done)
            _write(stream, results)


def _die_with(parent: int) -> None:
    """An answer may hang in C code that never looks at the socket again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)


def _score(function: Reward, answer: list[Any]) -> list[Any] | str:
    try:
        return checked(function(**dict(zip(PARAMETERS, answer, strict=True))))
    except (Exception, SystemExit) as err:  # noqa: BLE001 - whatever a user's function raises fails this one answer
        return f"{type(err).__name__}: {err}{_place(err)}"


def _place(err: BaseException) -> str:
    """Function, file and line where the user's code raised; nothing when we did."""
    frame = traceback.extract_tb(err.__traceback__)[-1]
    return "" if frame.filename == __file__ else f" ({frame.name}, {Path(frame.filename).name}:{frame.lineno})"


def checked(result: Any) -> list[Any]:
    """[reward, extras, prediction] of what a reward function returned. Raises ValueError with the broken rule."""
    if not isinstance(result, Mapping):
        return [_number("the reward", result), {}, None]
    if "reward" not in result:
        raise ValueError(f"the reward function returned a mapping without 'reward': {sorted(map(str, result))}")
    extras = {str(k): _number(f"extra {k!r}", v) for k, v in result.items() if k not in _NOT_EXTRAS and v is not None}
    if not 0 <= extras.get("acc", 0) <= 1:
        raise ValueError(f"extra 'acc' is {extras['acc']}; it must lie in 0..1")
    return [_number("the reward", result["reward"]), extras, as_prediction(result.get("prediction"))]


def _number(what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {value!r}; it must be a finite number")
    return number


def _read(stream: Any) -> Any:
    """The next frame; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    return json.loads(stream.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def _write(stream: Any, value: Any) -> None:
    payload = json.dumps(value).encode()
    stream.write(LENGTH.pack(len(payload)) + payload)
    stream.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
