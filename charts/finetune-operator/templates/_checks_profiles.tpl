{{/*
Compare the volumes of the FineTuneProfiles in the cluster, and of exampleProfile, with admissionPolicy,
which would refuse their pods. helm template sees no cluster. Without rbac.create helm may run for a user who may not list profiles;
with it, Kubernetes demands of the user each right of the operator, and that is one of them.
*/}}
{{- define "finetune-operator.check.profiles" -}}
{{- $policy := .Values.admissionPolicy -}}
{{- $isKnown := .Capabilities.APIVersions.Has "finetune.dev/v1alpha1/FineTuneProfile" -}}
{{- $found := dict "hostPaths" list "volumes" list "csiDrivers" list -}}
{{- $names := dict "hostPaths" list "volumes" list "csiDrivers" list -}}
{{- $profiles := list -}}
{{- if and $policy.create .Values.rbac.create $isKnown -}}
{{- $profiles = include "finetune-operator.profiles" . | fromJsonArray -}}
{{- end -}}
{{- if and $policy.create .Values.exampleProfile.create -}}
{{- $profiles = append $profiles (dict "name" .Values.exampleProfile.name "volumes" (.Values.exampleProfile.spec.volumes | default list)) -}}
{{- end -}}
{{- range $profiles -}}
{{- $name := .name -}}
{{- range .volumes -}}
{{- range $kind, $source := .source | default dict -}}
{{- if not (has $kind $policy.volumes) -}}
{{- $_ := set $found "volumes" (append $found.volumes $kind) -}}
{{- $_ := set $names "volumes" (append $names.volumes $name) -}}
{{- end -}}
{{- if not (kindIs "map" $source) -}}{{- continue -}}{{- end -}}
{{- if and (eq $kind "csi") (not (has $source.driver $policy.csiDrivers)) -}}
{{- $_ := set $found "csiDrivers" (append $found.csiDrivers $source.driver) -}}
{{- $_ := set $names "csiDrivers" (append $names.csiDrivers $name) -}}
{{- end -}}
{{- if eq $kind "hostPath" -}}
{{- $isNamed := false -}}
{{- range $policy.hostPaths -}}
{{- $isNamed = or $isNamed (eq $source.path .) (hasPrefix (printf "%s/" .) $source.path) -}}
{{- end -}}
{{- if not $isNamed -}}
{{- $_ := set $found "hostPaths" (append $found.hostPaths (trimSuffix "/" $source.path)) -}}
{{- $_ := set $names "hostPaths" (append $names.hostPaths $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $value, $missing := $found -}}
{{- if $missing }}
admissionPolicy.{{ $value }} lacks {{ join ", " ($missing | uniq) }} of FineTuneProfile {{ join ", " (get $names $value | uniq) }}, so that no new attempt of their jobs could start; write --set 'admissionPolicy.{{ $value }}={{ printf "{%s}" (concat (get $policy $value) $missing | uniq | join "," ) }}'
{{- end }}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.profiles" -}}
{{- block "admissionPolicy.create compares its values with the FineTuneProfiles, which you may not list; an administrator first runs: kubectl create clusterrolebinding profiles-for-helm --clusterrole=view --user=YOU" . -}}
{{- $found := list -}}
{{- range (lookup "finetune.dev/v1alpha1" "FineTuneProfile" "" "").items -}}
{{- $found = append $found (dict "name" .metadata.name "volumes" (.spec.volumes | default list)) -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}
{{- end -}}
