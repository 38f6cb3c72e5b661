"""`python -m proxy`."""

from proxy.main import main

if __name__ == "__main__":
    raise SystemExit(main())
