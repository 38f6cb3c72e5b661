"""What the first process of a container must do for itself.

The kernel gives process 1 no default actions: a SIGTERM that comes before a handler is there would be lost,
and the container killed once its whole grace is over.
"""

import os
import signal

EXIT_CODE = 128 + signal.SIGTERM


def end_when_told() -> None:
    """End at SIGTERM as other processes do, until another handler takes its place.

    For the first lines of a program: imports and the model take seconds. Of other processes the kernel
    does it.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_CODE))
