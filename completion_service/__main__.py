"""`python -m completion_service`."""

import sys

from processes.first_process import end_when_told

if __name__ == "__main__":
    end_when_told()
    from completion_service.main import main

    sys.exit(main(sys.argv[1:]))
