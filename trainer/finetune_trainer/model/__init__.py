"""The model: loading it, adapting it, and the loss it is trained with."""
