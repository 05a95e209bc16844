"""The main process of a node of an Azure ML job: `python -P -m finetune_trainer.launch.azureml`.

It is the whole command of the job. What Azure ML says of mounts and of this node becomes what the
supervisor takes, which does the rest, as in a pod. Beside it, a thread of node 0 reports to
the run, and hears there that it shall stop.
"""
