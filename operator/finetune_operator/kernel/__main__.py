"""`python -m finetune_operator.kernel`: the operator."""

from finetune_operator.kernel.run import main

if __name__ == "__main__":
    main()
