"""The manifests and the example of each block on the pages of both kinds; `kind_pages` uses them.

A test validates each example as a part of the manifest of its kind.
"""

JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata:
  name: support
spec:
  model:
    source: hf://Qwen/Qwen3-0.6B
  dataset:
    source: pvc://datasets/support.jsonl
  method:
    type: lora
  training:
    globalBatchSize: 16
    epochs: 3
    learningRate: 2e-4
  checkpoint:
    uri: pvc://checkpoints/{name}
  output:
    uri: pvc://models/{name}
"""

PROFILE = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneProfile
metadata:
  name: default
spec:
  image: registry.example.com/finetune-trainer:0.1.0
  allow:
    namespaces: [team-a]
    claims: [datasets, checkpoints, models]
"""

OF_JOB = {
    "model": """\
spec:
  model:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    revision: main
    tokenSecretRef: {name: hub, key: token}
""",
    "dataset": """\
spec:
  dataset:
    source: pvc://datasets/support.jsonl
    format: chat
    evalShare: 0.05
    also:
      - source: hf://HuggingFaceH4/ultrachat_200k
        split: train_sft
        weight: 0.1
""",
    "method": """\
spec:
  method:
    type: qlora
    quantization: nf4
    lora:
      r: 16
      alpha: 32
      targetModules: [q_proj, k_proj, v_proj, o_proj]
""",
    "training": """\
spec:
  training:
    globalBatchSize: 64
    maxSeqLength: 4096
    epochs: 2
    learningRate: 2e-4
    warmup: 0.03
    schedule: cosine
    earlyStopping: {patience: 3}
    evalEverySteps: 100
  dataset:
    source: pvc://datasets/support.jsonl
    evalShare: 0.05
""",
    "topology": """\
spec:
  topology:
    nodes: 2
    gpusPerNode: 8
    instanceType: Standard_ND96isr_H100_v5
    rdma: required
""",
    "backend": """\
spec:
  backend:
    type: kubernetes
    kubernetes:
      profile: h100
      serviceAccountName: trainer
""",
    "checkpoint": """\
spec:
  checkpoint:
    uri: pvc://checkpoints/{name}
    everySteps: 200
    keep: 3
""",
    "output": """\
spec:
  output:
    uri: pvc://models/{name}
    format: both
    dtype: bfloat16
""",
    "strategy": """\
spec:
  strategy:
    type: fsdp
    activationCheckpointing: full
  topology:
    gpusPerNode: 8
""",
    "restartPolicy": """\
spec:
  restartPolicy:
    maxRestarts: 5
    maxDisruptions: 50
    backoff: {baseSeconds: 10, maxSeconds: 600}
    rules:
      - onClass: OutOfMemory
        action: Fail
""",
    "deadlines": """\
spec:
  deadlines:
    pendingSeconds: 3600
    activeSeconds: 86400
    hangSeconds: 900
    terminationGraceSeconds: 180
""",
    "observability": """\
spec:
  observability:
    samplePrompts: ["How do I reset my password?"]
    profile: {steps: 10-12}
    trackers:
      - type: wandb
        project: support
        secretRef: {name: wandb, key: api-key}
""",
    "queue": """\
spec:
  queue:
    name: training
    priorityClass: production
""",
    "podTemplate": """\
spec:
  podTemplate:
    metadata:
      labels: {cost-center: "1234"}
    spec:
      containers:
        - name: trainer
          env:
            - {name: NCCL_DEBUG, value: INFO}
""",
}
"""By block of a FineTuneJob. An example may contain other blocks that its fields require."""

OF_PROFILE = {
    "azureml": """\
spec:
  azureml:
    subscriptionId: 00000000-0000-0000-0000-000000000000
    resourceGroup: ml-platform
    workspace: fine-tuning
    compute: h100-cluster
    environment: azureml:finetune-trainer:1
    identity: {type: managed}
""",
    "allow": """\
spec:
  allow:
    namespaces: ["team-*"]
    claims: [datasets, checkpoints, models]
    secrets: [hub]
    maxNodes: 4
    requireQueue: true
""",
    "volumes": """\
spec:
  volumes:
    - name: cache
      mountPath: /cache
      source: {persistentVolumeClaim: {claimName: cache}}
    - name: scratch
      mountPath: /scratch
      subPath: "{namespace}"
      source: {nfs: {server: files.example.com, path: /scratch}}
  cacheDirectory: /cache
""",
    "nodes": """\
spec:
  nodes:
    agentPools: [h100spot]
    instanceTypes: [Standard_ND96isr_H100_v5]
    tolerations:
      - {key: dedicated, operator: Equal, value: training, effect: NoSchedule}
""",
    "resources": """\
spec:
  resources:
    cpu: "80"
    memory: 1700Gi
    sharedMemory: 64Gi
    rdma: {name: rdma/ib, count: 8}
""",
    "network": """\
spec:
  network:
    metricsReaders:
      - namespace: monitoring
        labels: {app.kubernetes.io/name: prometheus}
""",
    "security": """\
spec:
  security:
    runAsUser: 2000
    runAsGroup: 2000
    fsGroup: 2000
""",
}
"""By block of a FineTuneProfile."""
