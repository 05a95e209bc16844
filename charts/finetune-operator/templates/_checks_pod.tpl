{{/* What goes into the operator's pods: see _checks.tpl. */}}
{{- define "finetune-operator.check.labels" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $key := `^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$` -}}
{{- $value := `^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$` -}}
{{- $labels := dict "commonLabels" .Values.commonLabels "podLabels" .Values.podLabels "nodeSelector" .Values.nodeSelector "monitoring.monitors.labels" $monitoring.monitors.labels "monitoring.rules.labels" $monitoring.rules.labels "monitoring.dashboards.labels" $monitoring.dashboards.labels -}}
{{- range $where, $given := $labels -}}
{{- range $name, $text := $given }}
{{- if not (and (regexMatch $key $name) (regexMatch $value $text)) }}
{{ $where }} holds {{ $name }}={{ $text }}, which is no label; write up to 63 letters, digits, and - _ . between them, as in --set-string {{ $where }}.team=research
{{- end }}
{{- end }}
{{- end -}}
{{- $annotations := dict "podAnnotations" .Values.podAnnotations "serviceAccount.annotations" .Values.serviceAccount.annotations "monitoring.dashboards.annotations" $monitoring.dashboards.annotations -}}
{{- range $where, $given := $annotations -}}
{{- range $name, $_ := $given }}
{{- if not (regexMatch $key $name) }}
{{ $where }} holds {{ $name }}, which is no key of an annotation; write up to 63 letters, digits, and - _ . between them, as in --set-string {{ $where }}.note=text
{{- end }}
{{- end }}
{{- end -}}
{{- $own := list "app.kubernetes.io/name" "app.kubernetes.io/instance" -}}
{{- $ofObjects := list "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart" | concat $own -}}
{{- range $where, $names := dict "commonLabels" $ofObjects "podLabels" $own -}}
{{- range $name, $_ := get $labels $where }}
{{- if has $name $names }}
{{ $where }} holds {{ $name }}, which the chart sets itself; leave it out
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.check.resources" -}}
{{- $resources := .Values.resources -}}
{{- with ($resources.limits | default dict).memory -}}
{{- $amount := include "finetune-operator.amount" . -}}
{{- if and $amount (lt (float64 $amount) 67108864.0) }}
resources.limits.memory is {{ . }}, which is {{ $amount }} bytes, and the operator starts with no less than 64Mi; write --set resources.limits.memory=512Mi
{{- $resources = dict "requests" $resources.requests "limits" (omit $resources.limits "memory") -}}
{{- end }}
{{- end -}}
{{- include "finetune-operator.quantities" (dict "where" "resources" "resources" $resources) -}}
{{- range $index, $one := .Values.initContainers -}}
{{- include "finetune-operator.quantities" (dict "where" (printf "initContainers[%d].resources" $index) "resources" ($one.resources | default dict)) -}}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.quantities" -}}
{{- $where := .where -}}
{{- range $kind, $amounts := .resources -}}
{{- range $name, $given := $amounts }}
{{- if not (or (has $name (list "cpu" "memory" "ephemeral-storage")) (contains "/" $name) (hasPrefix "hugepages-" $name)) }}
{{ $where }}.{{ $kind }} holds {{ $name }}, which is no resource of a container; write cpu, memory or ephemeral-storage
{{- else if not (include "finetune-operator.amount" $given) }}
{{ $where }}.{{ $kind }}.{{ $name }} is {{ $given }}, which is no quantity; write --set {{ $where }}.{{ $kind }}.{{ $name }}={{ eq $name "cpu" | ternary "500m" "512Mi" }}
{{- end }}
{{- end }}
{{- end -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $name, $given := .resources.requests }}
{{- $least := include "finetune-operator.amount" $given -}}
{{- $most := include "finetune-operator.amount" (get $limits $name) -}}
{{- if and $least $most (gt (float64 $least) (float64 $most)) }}
{{ $where }}.requests.{{ $name }} is {{ $given }}, which is more than the limit of {{ get $limits $name }}; write --set {{ $where }}.limits.{{ $name }}={{ $given }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A quantity of Kubernetes as a plain number; nothing where it is none. */}}
{{- define "finetune-operator.amount" -}}
{{- $units := dict "" 1.0 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $text := toString . -}}
{{- $number := regexFind `^([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?` $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- if and $number (hasKey $units $unit) -}}
{{- mulf (float64 $number) (get $units $unit) -}}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.check.pod" -}}
{{- range $where, $context := pick .Values "podSecurityContext" "securityContext" }}
{{- if and (hasKey $context "runAsUser") (eq (toString $context.runAsUser) "0") }}
{{ $where }}.runAsUser is 0, which is root, and the operator needs nothing of root's; write --set {{ $where }}.runAsUser=65532
{{- end }}
{{- if and (hasKey $context "runAsNonRoot") (not $context.runAsNonRoot) }}
{{ $where }}.runAsNonRoot is false, so that an image could run as root; write --set {{ $where }}.runAsNonRoot=true
{{- end }}
{{- end }}
{{- $variables := list "FINETUNE_AZUREML_REQUESTS_PER_SECOND" -}}
{{- range .Values.extraEnv }}
{{- if hasPrefix "FINETUNE_OPERATOR_" .name }}
extraEnv holds {{ .name }}, which is a setting; write --set settings.{{ trimPrefix "FINETUNE_OPERATOR_" .name | lower | camelcase | untitle }}={{ .value }}
{{- else if has .name $variables }}
extraEnv holds {{ .name }}, which the chart or another entry sets already; leave it out
{{- end }}
{{- $variables = append $variables .name -}}
{{- end }}
{{- $volumes := list "tmp" -}}
{{- range .Values.extraVolumes }}
{{- if has .name $volumes }}
extraVolumes holds {{ .name }}, which the chart or another entry has already; give it another name
{{- end }}
{{- $volumes = append $volumes .name -}}
{{- end }}
{{- $mounts := dict "extraVolumeMounts" .Values.extraVolumeMounts -}}
{{- $names := list "operator" -}}
{{- range $index, $one := .Values.initContainers }}
{{- if has $one.name $names }}
initContainers holds {{ $one.name }}, which is another container's name; give it one of its own
{{- end }}
{{- $names = append $names $one.name -}}
{{- $_ := set $mounts (printf "initContainers[%d].volumeMounts" $index) ($one.volumeMounts | default list) -}}
{{- end }}
{{- range $where, $given := $mounts -}}
{{- range $given }}
{{- if not (has .name $volumes) }}
{{ $where }} holds {{ .name }}, which is no volume; add it to extraVolumes: [{name: {{ .name }}, emptyDir: {}}]
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}
