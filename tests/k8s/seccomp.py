"""Runs a command under what matters here of container runtimes' default seccomp profile: `seccomp.py COMMAND…`.

Without CAP_SYS_NICE those refuse to say where memory lies, which is what vLLM asks on a CPU. Linux on x86_64.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

REFUSED = {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "migrate_pages": 256, "move_pages": 279}
_LOAD_NUMBER, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001  # linux/seccomp.h
_SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38  # linux/prctl.h


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def confine() -> None:
    """This process and its children. Raises OSError if the kernel does not take the filter."""
    numbers = list(REFUSED.values())
    steps = [(_LOAD_NUMBER, 0, 0, 0)]
    steps += [(_JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), code)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    confine()
    os.execvp(sys.argv[1], sys.argv[1:])
