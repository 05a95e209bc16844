{{/*
True, or empty: whether this release makes or changes a CustomResourceDefinition, given with its text.
One of the cluster that is newer stays as it is, as an older one would drop fields of running jobs.
So does one of the same revision that is another's, or that a release of this name left: helm 4.0.0
cannot install over it, and the next upgrade takes it. Where nothing can be looked up, it is made.
*/}}
{{- define "finetune-operator.crd.isOurs" -}}
{{- $name := regexFind "\n  name: [a-z.]+" .text | trimPrefix "\n  name: " -}}
{{- $wanted := regexFind "finetune\\.dev/schema-revision: '[0-9]+'" .text | regexFind "[0-9]+" | int -}}
{{- $there := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $name -}}
{{- if not $there -}}
true
{{- else -}}
{{- $annotations := $there.metadata.annotations | default dict -}}
{{- $revision := get $annotations "finetune.dev/schema-revision" | default "0" | int -}}
{{- $release := get $annotations "meta.helm.sh/release-name" -}}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- $command := "ftctl crd | kubectl apply --server-side --force-conflicts -f -" -}}
{{- $isOurs := and (eq $release .root.Release.Name) (eq $namespace .root.Release.Namespace) -}}
{{- if gt $revision $wanted -}}
{{- if and $isOurs (ne (get $annotations "helm.sh/resource-policy") "keep") -}}
{{- fail (printf "the cluster has %s of revision %d, newer than %d of this release, which leaves it alone; helm would delete it and every job with it. First run: kubectl annotate crd %s helm.sh/resource-policy=keep" $name $revision $wanted $name) -}}
{{- end -}}
{{- else if and $isOurs .root.Release.IsInstall (lt $revision $wanted) (hasPrefix "v4.0" .root.Capabilities.HelmVersion.Version) -}}
{{- fail (printf "the cluster has %s of revision %d, left by a release of this name, and this one needs %d; helm 4.0 cannot install over it. First run: %s" $name $revision $wanted $command) -}}
{{- else if and $isOurs (or .root.Release.IsUpgrade (lt $revision $wanted)) -}}
true
{{- else if lt $revision $wanted -}}
{{- $owner := $release | empty | ternary "was not made by helm" (printf "belongs to release %s of namespace %s" $release $namespace) -}}
{{- fail (printf "the cluster has %s of revision %d, and this release needs %d; it %s, so that this release may not change it. First run: %s" $name $revision $wanted $owner $command) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not those of the operator, by which its own policies are found. */}}
{{- define "finetune-operator.crdguard.labels" -}}
app.kubernetes.io/part-of: finetune-operator
{{- end -}}

{{/* It stays with what it guards. */}}
{{- define "finetune-operator.crdguard.annotations" -}}
{{- if .Values.crds.keep -}}
helm.sh/resource-policy: keep
argocd.argoproj.io/sync-options: Prune=false
kustomize.toolkit.fluxcd.io/prune: disabled
{{- else -}}
{}
{{- end -}}
{{- end -}}
