"""Main process of a node of an Azure ML job: `python -P -m finetune_trainer.launch.azureml`.

It is the whole command of the job. It translates Azure ML's information about mounts and this node
for the supervisor, which does the rest as in a pod. A thread of node 0 reports to the run and
receives stop requests from it.
"""
