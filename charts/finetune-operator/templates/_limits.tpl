{{/* The spec of the admission policy for the operator's account; admissionpolicy.yaml names it. Defaults are
written out: helm 4.0 takes those of an object that an upgrade added for another client's. */}}
{{- define "finetune-operator.limits" -}}
{{- $account := printf "system:serviceaccount:%s:%s" .Release.Namespace (include "finetune-operator.serviceAccount" .) -}}
{{- $closed := .Values.admissionPolicy.systemNamespaces | toJson -}}
{{- $folders := .Values.admissionPolicy.hostPaths | toJson -}}
{{- $kinds := .Values.admissionPolicy.volumes | toJson -}}
{{- $drivers := .Values.admissionPolicy.csiDrivers | toJson -}}
failurePolicy: Fail
matchConstraints:
  matchPolicy: Equivalent
  namespaceSelector: {}
  objectSelector: {}
  resourceRules:
    - {apiGroups: [batch], apiVersions: ["*"], resources: [jobs, jobs/status], operations: [CREATE, UPDATE, DELETE], scope: "*"}
    - {apiGroups: [""], apiVersions: ["*"], resources: [services], operations: [CREATE, UPDATE, DELETE], scope: "*"}
    - {apiGroups: [discovery.k8s.io], apiVersions: ["*"], resources: [endpointslices], operations: [CREATE, UPDATE, DELETE], scope: "*"}
    - {apiGroups: [networking.k8s.io], apiVersions: ["*"], resources: [networkpolicies], operations: [CREATE, UPDATE, DELETE], scope: "*"}
    - {apiGroups: [""], apiVersions: ["*"], resources: [pods], operations: [DELETE], scope: "*"}
    - {apiGroups: [finetune.dev], apiVersions: ["*"], resources: [finetunejobs], operations: [UPDATE, DELETE], scope: "*"}
matchConditions:
  - name: asked-by-the-operator
    expression: request.userInfo.username == {{ $account | squote }}
variables:
  # dyn, as kinds differ in their fields.
  - {name: kind, expression: request.resource.resource}
  - {name: made, expression: dyn(object)}
  - {name: old, expression: dyn(oldObject)}
  - {name: references, expression: "variables.made.metadata.?ownerReferences.orValue([])"}
  - name: jobs
    expression: >-
      variables.references.filter(one, one.apiVersion == 'finetune.dev/v1alpha1' && one.kind == 'FineTuneJob')
  - {name: owners, expression: "variables.jobs.filter(one, one.?controller.orValue(false))"}
  - {name: isWritten, expression: "request.operation != 'DELETE' && variables.kind != 'finetunejobs'"}
  # Pods that run already have what an earlier policy admitted.
  - name: isJob
    expression: >-
      variables.kind == 'jobs' && (request.operation == 'CREATE' || (request.operation == 'UPDATE' &&
      variables.made.spec.template != variables.old.spec.template))
  - {name: pod, expression: variables.made.spec.template.spec}
  - {name: containers, expression: "variables.pod.containers + variables.pod.?initContainers.orValue([])"}
  - {name: volumes, expression: "variables.pod.?volumes.orValue([])"}
validations:
  - message: the operator writes nothing in a system namespace; admissionPolicy.systemNamespaces of its chart lists them
    reason: Forbidden
    expression: >-
      !request.namespace.startsWith('kube-') && !(request.namespace in {{ $closed }})
  - message: the operator makes and changes only children of a FineTuneJob
    reason: Forbidden
    expression: "!variables.isWritten || variables.owners.size() == 1"
  - message: the operator creates objects whose only owner is their FineTuneJob, and adds no other owner
    reason: Forbidden
    # A second owner would keep an object whose FineTuneJob does not exist. Others may add owners.
    expression: >-
      !variables.isWritten || (request.operation == 'CREATE' ? variables.references.size() == 1 :
      variables.references.all(one, one in variables.jobs ||
      one in variables.old.metadata.?ownerReferences.orValue([])))
  - message: the operator changes and deletes only what carries the label finetune.dev/job-uid
    reason: Forbidden
    expression: >-
      request.operation == 'CREATE' || variables.kind == 'finetunejobs' ||
      'finetune.dev/job-uid' in variables.old.metadata.?labels.orValue({})
  - message: the operator changes no spec of a FineTuneJob
    reason: Forbidden
    expression: >-
      variables.kind != 'finetunejobs' || request.operation != 'UPDATE' ||
      variables.made.spec == variables.old.spec
  - message: the operator changes no owner of a FineTuneJob
    reason: Forbidden
    # Kubernetes deletes what names an owner that there is not.
    expression: >-
      variables.kind != 'finetunejobs' || request.operation != 'UPDATE' ||
      variables.made.metadata.?ownerReferences.orValue([]) ==
      variables.old.metadata.?ownerReferences.orValue([])
  - message: the operator deletes only FineTuneJobs that set ttlSecondsAfterFinished
    reason: Forbidden
    expression: >-
      variables.kind != 'finetunejobs' || request.operation != 'DELETE' ||
      has(variables.old.spec.ttlSecondsAfterFinished)
  - message: the operator makes no pods in a namespace of their node or of other containers (hostNetwork, hostPID, hostIPC, hostPort, shareProcessNamespace), and sets no sysctls
    reason: Forbidden
    expression: >-
      !variables.isJob || (
      !variables.pod.?hostNetwork.orValue(false) && !variables.pod.?hostPID.orValue(false) &&
      !variables.pod.?hostIPC.orValue(false) && !variables.pod.?shareProcessNamespace.orValue(false) &&
      variables.pod.?securityContext.?sysctls.orValue([]).size() == 0 && variables.containers.all(one,
      one.?ports.orValue([]).all(port, port.?hostPort.orValue(0) == 0)))
  - message: the operator makes no pods that run as root or privileged, or with a capability but IPC_LOCK
    reason: Forbidden
    expression: >-
      !variables.isJob || (
      variables.pod.?securityContext.?runAsNonRoot.orValue(false) &&
      !variables.pod.?securityContext.?windowsOptions.?hostProcess.orValue(false) &&
      variables.containers.all(one, has(one.securityContext) &&
      !one.securityContext.?privileged.orValue(false) &&
      !one.securityContext.?allowPrivilegeEscalation.orValue(true) &&
      one.securityContext.?runAsNonRoot.orValue(true) &&
      one.securityContext.?procMount.orValue('Default') == 'Default' &&
      !one.securityContext.?windowsOptions.?hostProcess.orValue(false) &&
      one.securityContext.?capabilities.?add.orValue([]).all(added, added == 'IPC_LOCK')))
  - message: the operator makes no pods without seccomp, with AppArmor Unconfined or with SELinux options
    reason: Forbidden
    # Without a seccompProfile the container runtime filters no system calls.
    expression: >-
      !variables.isJob || (
      variables.pod.?securityContext.?seccompProfile.?type.orValue('Unconfined') != 'Unconfined' &&
      variables.pod.?securityContext.?appArmorProfile.?type.orValue('') != 'Unconfined' &&
      !variables.pod.?securityContext.?seLinuxOptions.hasValue() &&
      variables.containers.all(one,
      one.?securityContext.?seccompProfile.?type.orValue('') != 'Unconfined' &&
      one.?securityContext.?appArmorProfile.?type.orValue('') != 'Unconfined' &&
      !one.?securityContext.?seLinuxOptions.hasValue()) &&
      variables.made.spec.template.?metadata.?annotations.orValue({}).all(key,
      !key.startsWith('container.apparmor.security.beta.kubernetes.io/')))
  - message: the operator makes no pods with a priority class of the system, or with nodeName, by which they ignore taints
    reason: Forbidden
    expression: >-
      !variables.isJob || (!variables.pod.?priorityClassName.orValue('').startsWith('system-') &&
      !variables.pod.?nodeName.hasValue())
  - message: the operator makes no pods that hold a token of the cluster
    reason: Forbidden
    expression: >-
      !variables.isJob || (!variables.pod.?automountServiceAccountToken.orValue(true) &&
      variables.volumes.all(one,
      one.?projected.?sources.orValue([]).all(source, !has(source.serviceAccountToken) && !has(source.podCertificate))))
  - message: the operator makes no pods with volumes that admissionPolicy.volumes of its chart does not name
    reason: Forbidden
    expression: >-
      !variables.isJob || variables.volumes.all(one, one.all(key, key == 'name' || key in {{ $kinds }}))
  - message: the operator makes no pods with inline CSI volumes of drivers that admissionPolicy.csiDrivers of its chart does not name, or with a Secret of another namespace
    reason: Forbidden
    # Drivers read attributes without regard to case; those of csi.storage.k8s.io name a claim's namespace.
    expression: >-
      !variables.isJob || variables.volumes.all(one, !has(one.csi) || (one.csi.driver in {{ $drivers }} &&
      one.csi.?volumeAttributes.orValue({}).all(key, key.lowerAscii() != 'secretnamespace' &&
      !key.lowerAscii().startsWith('csi.storage.k8s.io/'))))
  - message: the operator makes no pods that mount a folder of their node, but those that admissionPolicy.hostPaths of its chart names
    reason: Forbidden
    expression: >-
      !variables.isJob || variables.volumes.all(one, !has(one.hostPath) ||
      (!one.hostPath.path.contains('..') && {{ $folders }}.exists(folder,
      one.hostPath.path == folder || one.hostPath.path.startsWith(folder + '/'))))
  - message: the operator makes only headless Services, which select at most the pods of their job
    reason: Forbidden
    expression: >-
      variables.kind != 'services' || request.operation == 'DELETE' ||
      (variables.made.spec.?clusterIP.orValue('') == 'None' &&
      variables.made.spec.?externalIPs.orValue([]).size() == 0 &&
      (!has(variables.made.spec.selector) || variables.owners.exists(one,
      variables.made.spec.selector[?'finetune.dev/job-uid'].orValue('') == one.uid)))
  - message: the operator makes only EndpointSlices of the Service of their job
    reason: Forbidden
    expression: >-
      variables.kind != 'endpointslices' || request.operation == 'DELETE' ||
      variables.owners.exists(one, one.name + '-finetune' ==
      variables.made.metadata.?labels[?'kubernetes.io/service-name'].orValue(''))
  - message: the operator makes only NetworkPolicies for the pods of their job
    reason: Forbidden
    expression: >-
      variables.kind != 'networkpolicies' || request.operation == 'DELETE' ||
      variables.owners.exists(one, one.uid ==
      variables.made.spec.podSelector.?matchLabels[?'finetune.dev/job-uid'].orValue(''))
{{- end -}}
