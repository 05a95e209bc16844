{{/* Name of everything in the namespace, and the start of names in the cluster. */}}
{{- define "finetune-operator.name" -}}
{{- $own := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains $own .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $own | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* Name of what lives in no namespace: two releases may share a name. */}}
{{- define "finetune-operator.clusterName" -}}
{{ printf "%s-%s" .Release.Namespace (include "finetune-operator.name" .) }}
{{- end -}}

{{- define "finetune-operator.serviceAccount" -}}
{{- if or .Values.serviceAccount.name .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "finetune-operator.name" .) }}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* The first of them is what the network policies of jobs let in. */}}
{{- define "finetune-operator.selector" -}}
app.kubernetes.io/name: finetune-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Another name: neither Service, policy nor budget of the operator is to take its test for it. */}}
{{- define "finetune-operator.testSelector" -}}
app.kubernetes.io/name: finetune-operator-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "finetune-operator.labels" -}}
{{ include "finetune-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "finetune-operator.monitorLabels" -}}
{{ include "finetune-operator.labels" . }}
{{- with .Values.monitoring.monitors.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Managed Prometheus drops a sample beyond its limits in silence; with these, a scrape fails. */}}
{{- define "finetune-operator.labelLimits" -}}
{{- if eq .Values.monitoring.group "azmonitoring.coreos.com" -}}
labelLimit: 63
labelNameLengthLimit: 511
labelValueLengthLimit: 1023
{{- end -}}
{{- end -}}

{{/* Tag of the image. A whole number in a file of values is a float64, which would print as 2.0e+07. */}}
{{- define "finetune-operator.tag" -}}
{{- $tag := .Values.image.tag -}}
{{- if not (kindIs "invalid" $tag) -}}
{{ kindIs "string" $tag | ternary $tag (int64 $tag) }}
{{- end -}}
{{- end -}}

{{/* Of a container: what it runs from, which is the same for the operator and its test. */}}
{{- define "finetune-operator.image" -}}
{{- with .Values.image -}}
{{- $tagged := printf "%s:%s" .repository (include "finetune-operator.tag" $ | default $.Chart.AppVersion) -}}
image: {{ .digest | empty | ternary $tagged (printf "%s@%s" .repository .digest) | quote }}
imagePullPolicy: {{ .pullPolicy }}
{{- end -}}
{{- end -}}

{{/* Of a pod: on which nodes it may run, and as whom. */}}
{{- define "finetune-operator.place" -}}
serviceAccountName: {{ include "finetune-operator.serviceAccount" . }}
# A Service called finetune-operator would add variables that look like settings.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* By default over nodes and zones where it can; a rollout counts its own pods alone. */}}
{{- define "finetune-operator.spread" -}}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "finetune-operator.selector" . | fromYaml)) -}}
{{- $default := list -}}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" -}}
{{- $default = append $default (dict "topologyKey" . "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway" "matchLabelKeys" (list "pod-template-hash")) -}}
{{- end -}}
{{- $made := list -}}
{{- range .Values.topologySpreadConstraints | default $default -}}
{{- $made = append $made (merge (deepCopy .) $own) -}}
{{- end -}}
{{- toYaml $made -}}
{{- end -}}

{{/* True, or empty: whether a second process at a time would do harm. */}}
{{- define "finetune-operator.isAlone" -}}
{{- if or (not .Values.settings.leaderElection) .Values.settings.identity -}}true{{- end -}}
{{- end -}}

{{/* Subject of every binding. */}}
{{- define "finetune-operator.subjects" -}}
- kind: ServiceAccount
  name: {{ include "finetune-operator.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
