"""`python -m proxy`."""

from processes.first_process import end_when_told

if __name__ == "__main__":
    end_when_told()
    from proxy.main import main

    raise SystemExit(main())
