"""`python -m finetune_operator` is `ftctl`."""

from finetune_operator.cli.app import main

if __name__ == "__main__":
    main()
