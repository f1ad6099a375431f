"""`python -m radixserve`."""

from radixserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
