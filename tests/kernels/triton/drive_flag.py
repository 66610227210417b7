"""Interpreted flags: the reference's own tests, looking by loads and by atomics. One launch after another: a wait finds its flag or not."""

import interpreted

from kernels.flag import kernel


def main() -> None:
    for loads in (True, False):
        kernel.LOADS = loads
        interpreted.run_reference_tests("test_flag.py", without=())


if __name__ == "__main__":
    main()
