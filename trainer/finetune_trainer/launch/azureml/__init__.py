"""Main process of a node of an Azure ML job: `python -P -m finetune_trainer.launch.azureml`.

It is the whole command of the job. Azure ML's information about mounts and this node is translated
for the supervisor, which does the rest as in a pod. Beside it, a thread of node 0 reports to the
run and receives stop requests from it.
"""
