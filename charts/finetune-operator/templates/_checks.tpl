{{/*
Refuse values that cannot work before anything is installed: one sentence each, with the option of
helm that mends it. What the schema of the values can say (names, types, bounds) stands there.

A check prints a line for each fault, and nothing where there is none.
*/}}
{{- define "finetune-operator.check" -}}
{{- $said := list -}}
{{- range $check := list "image" "names" "account" "labels" "settings" "namespaces" "lease" "resources" "pod" "together" "profiles" "effect" "alone" "ownLease" -}}
{{- $said = concat $said (include (printf "finetune-operator.check.%s" $check) $ | splitList "\n") -}}
{{- end -}}
{{- with compact $said -}}
{{- fail (join "\n" .) -}}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.check.image" -}}
{{- with .Values.image -}}
{{- $path := `[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*` -}}
{{- $host := `[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?(:[0-9]+)?` -}}
{{- $last := regexFind `[^/]*$` .repository -}}
{{- $digestless := regexFind `^[^@]*` .repository -}}
{{- $tagged := regexFind `:[^:@]*$` $last -}}
{{- if not .repository }}
image.repository is empty, and only a released chart knows its image; make one (make images) and name it: --set image.repository=registry.example.com/finetune-operator
{{- else if contains "://" .repository }}
image.repository is {{ .repository }}, but an image has no scheme; write --set image.repository={{ regexReplaceAll `^[^/]*//` .repository "" }}
{{- else if contains "@" .repository }}
image.repository is {{ .repository }}, which holds a digest; write --set image.repository={{ regexReplaceAll `:[^:/]*$` $digestless "" }} --set image.digest={{ regexFind `[^@]*$` .repository }}
{{- else if $tagged }}
image.repository is {{ .repository }}, which holds a tag; write --set image.repository={{ trimSuffix $tagged .repository }} --set-string image.tag={{ trimPrefix ":" $tagged }}
{{- else if not (regexMatch (printf `^(%s/)?%s(/%s)*$` $host $path $path) .repository) }}
image.repository is {{ .repository }}, which is no name of an image (lower case, no spaces); write --set image.repository=registry.example.com/finetune-operator
{{- end }}
{{- $tag := include "finetune-operator.tag" $ -}}
{{- if and (kindIs "float64" .tag) (or (ne (float64 (int64 .tag)) .tag) (gt .tag 9007199254740991.0)) }}
image.tag is the number {{ .tag }}, and YAML reads other tags as this number, too (1.10 is 1.1); put the tag in quotes, or write --set-string image.tag=TAG
{{- else if and $tag (not (regexMatch `^[A-Za-z0-9_][-A-Za-z0-9_.]{0,127}$` $tag)) }}
image.tag is {{ $tag }}, which is no tag; write --set image.tag={{ $.Chart.AppVersion }}
{{- else if and (eq $tag "latest") (not .digest) }}
image.tag is latest, which is another image each time (AKS refuses it, too); name a version: --set image.tag={{ $.Chart.AppVersion }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.check.settings" -}}
{{- $levels := list "DEBUG" "INFO" "WARNING" "ERROR" -}}
{{- with .Values.settings -}}
{{- if not (has (upper .logLevel) $levels) }}
settings.logLevel is {{ .logLevel }}, which is none of {{ join ", " $levels }}; write --set settings.logLevel=INFO
{{- end }}
{{- if not (has .logFormat (list "text" "json")) }}
settings.logFormat is {{ .logFormat }}, which is none of text, json; write --set settings.logFormat=json
{{- end }}
{{- if gt (float64 .retrySeconds) (float64 .maxRetrySeconds) }}
settings.retrySeconds is {{ .retrySeconds }} and settings.maxRetrySeconds {{ .maxRetrySeconds }}, which is shorter; write --set settings.maxRetrySeconds={{ .retrySeconds }}
{{- end }}
{{- if regexMatch `^(127\.|localhost$|::1$)` .healthHost }}
settings.healthHost is {{ .healthHost }}, where no probe reaches it; write --set settings.healthHost=0.0.0.0
{{- end }}
{{- range .backends }}
{{- if not (regexMatch `^[^=\s]+=[\w.]+:[\w.]+$` .) }}
settings.backends holds {{ . }}, which is not NAME=MODULE:CLASS; write --set 'settings.backends={mine=package.module:Class}'
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.check.lease" -}}
{{- with .Values.settings -}}
{{- $times := printf "settings.renewSeconds, .renewDeadlineSeconds and .leaseSeconds are %v, %v and %v" .renewSeconds .renewDeadlineSeconds .leaseSeconds -}}
{{- if not (and (lt (float64 .renewSeconds) (float64 .renewDeadlineSeconds)) (lt (float64 .renewDeadlineSeconds) (float64 .leaseSeconds))) }}
{{ $times }}, and each must be longer than the one before; write --set settings.renewSeconds=2 --set settings.renewDeadlineSeconds=10 --set settings.leaseSeconds=15
{{- end }}
{{- if or (gt (len .leaseName) 253) (not (regexMatch `^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$` .leaseName)) }}
settings.leaseName is {{ .leaseName }}, which is no name of a Lease (a-z, 0-9, and - or . between them); write --set settings.leaseName=finetune-operator
{{- end }}
{{- end -}}
{{- end -}}

{{/* Namespaces that could be none, and, where helm asks a cluster, those that are not in it. */}}
{{- define "finetune-operator.check.namespaces" -}}
{{- $served := .Values.settings.namespaces -}}
{{- $lists := dict "settings.namespaces" $served "monitoring.monitors.namespaces" .Values.monitoring.monitors.namespaces -}}
{{- $label := `^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$` -}}
{{- range $value, $names := $lists -}}
{{- range $names }}
{{- if not (regexMatch $label .) }}
{{ $value }} holds {{ . }}, which is no name of a namespace (up to 63 of a-z, 0-9, and - between them); write --set '{{ $value }}={team-a,team-b}'
{{- end }}
{{- end }}
{{- end -}}
{{- with .Values.monitoring.dashboards.namespace }}
{{- if not (regexMatch $label .) }}
monitoring.dashboards.namespace is {{ . }}, which is no name of a namespace; write --set monitoring.dashboards.namespace=grafana
{{- end }}
{{- end -}}
{{- /* helm template asks no cluster, and finds none of them. The release's own may be made with it. */ -}}
{{- if and $served .Values.rbac.create (lookup "v1" "Namespace" "" "default") -}}
{{- range without $served .Release.Namespace | uniq }}
{{- if and (regexMatch $label .) (not (lookup "v1" "Namespace" "" .)) }}
settings.namespaces holds {{ . }}, which is not in the cluster; make it: kubectl create namespace {{ . }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.check.names" -}}
{{- $name := include "finetune-operator.name" . -}}
{{- if not (regexMatch `^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$` $name) }}
the release {{ .Release.Name }} gives the name {{ $name }}, which a Service cannot have (up to 50 of a-z, 0-9, and - between them, a letter first); write --set fullnameOverride=finetune-operator
{{- end }}
{{- $subdomain := `^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$` -}}
{{- $names := dict "serviceAccount.name" .Values.serviceAccount.name "priorityClassName" .Values.priorityClassName "runtimeClassName" .Values.runtimeClassName "exampleProfile.name" .Values.exampleProfile.name -}}
{{- range $value, $given := $names }}
{{- if and $given (or (gt (len $given) 253) (not (regexMatch $subdomain $given))) }}
{{ $value }} is {{ $given }}, which is no name in Kubernetes (a-z, 0-9, and - or . between them); write --set {{ $value }}=finetune-operator
{{- end }}
{{- end }}
{{- end -}}

{{- define "finetune-operator.check.account" -}}
{{- with .Values.serviceAccount -}}
{{- if and (not .create) (not .name) $.Values.rbac.create }}
serviceAccount.create is false and serviceAccount.name empty, so that every pod of the namespace would have the operator's rights; write --set serviceAccount.name=finetune-operator
{{- end }}
{{- end -}}
{{- end -}}
