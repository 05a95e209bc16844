{{/*
Ask for what only an administrator of the cluster may read, before anything else does. No template can
catch a refusal, but helm shows the name of the one that was refused; so the name says what to do.
*/}}
{{- define "finetune-operator.askFirst" -}}
{{- block "this needs rights in the whole cluster; an administrator first runs: helm template RELEASE charts/finetune-operator --namespace NAMESPACE --set image.repository=IMAGE --kube-version 1.30.0 --show-only templates/crds.yaml --show-only templates/crdguard.yaml --show-only templates/rbac.yaml --show-only templates/admissionpolicy.yaml | kubectl apply --server-side --force-conflicts -f - and then you install with --set crds.install=false --set rbac.create=false --set admissionPolicy.create=false" . -}}
{{- if .Values.rbac.create -}}
{{- $_ := lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "" -}}
{{- end -}}
{{- if .Values.crds.install -}}
{{- $_ := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "finetunejobs.finetune.dev" -}}
{{- end -}}
{{- end -}}
{{- block "admissionPolicy.create needs rights in the whole cluster; an administrator first runs: helm template RELEASE charts/finetune-operator --namespace NAMESPACE --set image.repository=IMAGE --kube-version 1.30.0 --show-only templates/admissionpolicy.yaml | kubectl apply --server-side --force-conflicts -f - and then you install with --set admissionPolicy.create=false" . -}}
{{- if .Values.admissionPolicy.create -}}
{{- $_ := lookup "admissionregistration.k8s.io/v1" "ValidatingAdmissionPolicy" "" "" -}}
{{- end -}}
{{- end -}}
{{- end -}}
