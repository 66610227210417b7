"""Runs drivers of interpreted kernels, each in a process of its own that begins where torch, Triton and pytest are imported already.

A process that reads drivers' paths on its standard input, one a line, and answers each with a line of JSON: `status` and `output`.
Importing takes longer than most drivers do; a fork of a process with one thread has it done. What a driver changes, kernels' tiles and
Triton itself, goes with its process. Only with TRITON_INTERPRET=1, see `interpreted`.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import BinaryIO, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as Python does for a driver that is run by itself

import interpreted  # noqa: F401  (it must come before anything of kernels/)


def _become(driver: str, output: BinaryIO) -> NoReturn:
    """Run a driver with both of its streams in a file and end this process with its status, whatever happens."""
    status = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        runpy.run_path(driver, run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _become(line.strip(), output)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps({"status": status, "output": output.read().decode(errors="replace")}), flush=True)


if __name__ == "__main__":
    main()
