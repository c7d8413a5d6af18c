"""``python -m flamia``: the same program as the ``flamia`` command."""

from flamia.cli import main

if __name__ == "__main__":
    main()
