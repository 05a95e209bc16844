{{/* Values that each are right and together do harm, or nothing: see _checks.tpl. */}}
{{- define "finetune-operator.check.together" -}}
{{- $replicas := int .Values.replicas -}}
{{- $monitoring := .Values.monitoring -}}
{{- if and (include "finetune-operator.isAlone" .) (gt $replicas 1) }}
replicas is {{ $replicas }}, but settings.leaderElection is false or settings.identity is set, so that several would lead at once; write --set replicas=1
{{- end }}
{{- range .Values.admissionPolicy.create | ternary .Values.settings.namespaces list }}
{{- if or (hasPrefix "kube-" .) (has . $.Values.admissionPolicy.systemNamespaces) }}
settings.namespaces holds {{ . }}, but admissionPolicy lets the operator write nothing in kube-* and in its systemNamespaces; leave it out of one of them
{{- end }}
{{- end }}
{{- if and $monitoring.monitors.create (not .Values.service.create) }}
monitoring.monitors.create is true, but a ServiceMonitor finds the operator by its Service; write --set service.create=true
{{- end }}
{{- if and $monitoring.rules.create (eq $monitoring.group "azmonitoring.coreos.com") }}
monitoring.rules.create is true, but AKS's managed Prometheus has no PrometheusRule; write --set monitoring.rules.create=false, and deploy files/azure-rules.json of the chart: az deployment group create
{{- end }}
{{- /* helm itself cannot create both at once. What only renders can be applied in order, and sees no namespaces. */ -}}
{{- $isKnown := .Capabilities.APIVersions.Has "finetune.dev/v1alpha1/FineTuneProfile" -}}
{{- if and .Values.exampleProfile.create (not $isKnown) (lookup "v1" "Namespace" "" "default") }}
exampleProfile.create is true, but the cluster does not know FineTuneProfiles yet; install with --set exampleProfile.create=false, then set it: helm upgrade
{{- end }}
{{- end -}}

{{/* What is set for something that is not made. */}}
{{- define "finetune-operator.check.effect" -}}
{{- $monitoring := .Values.monitoring -}}
{{- $idle := dict -}}
{{- range $name, $values := dict "monitors" (list "labels" "namespaces") "rules" (list "labels") "dashboards" (list "annotations" "namespace") -}}
{{- $one := get $monitoring $name -}}
{{- range ternary list $values $one.create -}}
{{- if get $one . -}}{{- $_ := set $idle (printf "monitoring.%s.%s" $name .) (printf "monitoring.%s.create" $name) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.exampleProfile.spec (not .Values.exampleProfile.create) -}}
{{- $_ := set $idle "exampleProfile.spec" "exampleProfile.create" -}}
{{- end -}}
{{- if and .Values.serviceAccount.annotations (not .Values.serviceAccount.create) -}}
{{- $_ := set $idle "serviceAccount.annotations" "serviceAccount.create" -}}
{{- end -}}
{{- range $value, $create := $idle }}
{{ $value }} has no effect, as {{ $create }} is false; write --set {{ $create }}=true, or leave it out
{{- end }}
{{- if and .Values.azure.tenantId (not .Values.azure.clientId) }}
azure.tenantId has no effect without azure.clientId; write --set azure.clientId=00000000-0000-0000-0000-000000000000, or leave it out
{{- end }}
{{- if and .Values.nameOverride .Values.fullnameOverride }}
nameOverride is {{ .Values.nameOverride }}, but has no effect beside fullnameOverride {{ .Values.fullnameOverride }}; leave one of them out
{{- end }}
{{- end -}}
