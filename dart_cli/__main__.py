"""`python -m dart_cli` is `dart`."""

from dart_cli.cli.main import main

if __name__ == "__main__":
    main()
