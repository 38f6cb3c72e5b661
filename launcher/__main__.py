"""`tandem` and `python -m launcher`."""

from processes.first_process import end_when_told


def main() -> int:
    end_when_told()
    from launcher.main import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
