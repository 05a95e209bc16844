{{/*
No namespace that another release serves, as two operators undo each other's work: see _checks.tpl. They
are seen by the ClusterRoles that are bound to their accounts: one that may change jobs is of an operator
that serves every namespace; of any other a Role is in each namespace that it serves. An upgrade may rename
those of this release (nameOverride), so its annotations count before the name. `helm template` sees none.
*/}}
{{- define "finetune-operator.check.alone" -}}
{{- if .Values.rbac.create -}}
{{- $root := . -}}
{{- range dig "items" list (lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "") -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $annotations := .metadata.annotations | default dict -}}
{{- $release := get $annotations "meta.helm.sh/release-name" -}}
{{- $namespace := get $annotations "meta.helm.sh/release-namespace" -}}
{{- $isNamedOurs := eq .metadata.name (include "finetune-operator.clusterName" $root) -}}
{{- $isOurs := $release | empty | ternary $isNamedOurs (and (eq $release $root.Release.Name) (eq $namespace $root.Release.Namespace)) -}}
{{- $account := first (.subjects | default (list dict)) -}}
{{- $isOperator := and (eq (get $labels "app.kubernetes.io/name") "finetune-operator") (eq (get $account "kind") "ServiceAccount") -}}
{{- if and $isOperator (not $isOurs) -}}
{{- $both := "" -}}
{{- with lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" .roleRef.name -}}
{{- $both = include "finetune-operator.servedByBoth" (dict "root" $root "role" .) -}}
{{- end -}}
{{- if $both -}}
{{- $who := $release | empty | ternary (printf "the operator of the ClusterRoleBinding %s" .metadata.name) (printf "release %s of namespace %s" $release $namespace) -}}
{{- $instance := printf "app.kubernetes.io/name=finetune-operator,app.kubernetes.io/instance=%s" (get $labels "app.kubernetes.io/instance") -}}
{{- $remove := $release | empty | ternary (printf "kubectl delete deployment,clusterrole,clusterrolebinding --all-namespaces --selector %s" $instance) (printf "helm uninstall %s --namespace %s" $release $namespace) }}
{{ $who }} serves {{ $both }} already, and two operators undo each other's work; name other namespaces (--set 'settings.namespaces={team-a}'), or first run: {{ $remove }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Which namespaces this release would serve together with the operator of a ClusterRole; empty for none. */}}
{{- define "finetune-operator.servedByBoth" -}}
{{- $namespaces := .root.Values.settings.namespaces -}}
{{- $servesAll := false -}}
{{- range .role.rules -}}
{{- if and (has "finetunejobs" (.resources | default list)) (has "patch" .verbs) -}}
{{- $servesAll = true -}}
{{- end -}}
{{- end -}}
{{- if $servesAll -}}
{{- $namespaces | empty | ternary "every namespace" (join ", " $namespaces) -}}
{{- else if not $namespaces -}}
some namespaces
{{- else -}}
{{- $both := list -}}
{{- $role := printf "%s-jobs" .role.metadata.name -}}
{{- range $namespaces -}}
{{- if lookup "rbac.authorization.k8s.io/v1" "Role" . $role -}}
{{- $both = append $both . -}}
{{- end -}}
{{- end -}}
{{- join ", " $both -}}
{{- end -}}
{{- end -}}

{{/*
No Lease that the operator of another release in this namespace waits for: only one of them would ever
work. And no namespace that it serves, where somebody else makes the roles by which the check above knows.
*/}}
{{- define "finetune-operator.check.ownLease" -}}
{{- if .Values.settings.leaderElection -}}
{{- $root := . -}}
{{- $own := .Values.settings.leaseName -}}
{{- $name := include "finetune-operator.name" . -}}
{{- $other := eq $name $own | ternary (printf "%s-2" $name) $name -}}
{{- range dig "items" list (lookup "apps/v1" "Deployment" .Release.Namespace "") -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $isOperator := eq (get $labels "app.kubernetes.io/name") "finetune-operator" -}}
{{- $instance := get $labels "app.kubernetes.io/instance" -}}
{{- if and $isOperator (ne $instance $root.Release.Name) -}}
{{- $settings := dict -}}
{{- range (first .spec.template.spec.containers).env -}}
{{- $_ := set $settings .name (.value | default "") -}}
{{- end -}}
{{- $elects := get $settings "FINETUNE_OPERATOR_LEADER_ELECTION" | default "true" | lower | eq "true" -}}
{{- $isSame := and $elects (eq $own (get $settings "FINETUNE_OPERATOR_LEASE_NAME" | default "finetune-operator")) -}}
{{- $served := get $settings "FINETUNE_OPERATOR_NAMESPACES" | splitList "," | compact -}}
{{- $isApart := and $served $root.Values.settings.namespaces -}}
{{- range $served -}}
{{- $isApart = and $isApart (not (has . $root.Values.settings.namespaces)) -}}
{{- end -}}
{{- if and $isApart $isSame }}
settings.leaseName is {{ $own }}, the Lease of release {{ $instance }} in this namespace, so that only one of both would work; write --set settings.leaseName={{ $other }}
{{- else if not (or $isApart $root.Values.rbac.create) }}
release {{ $instance }} of this namespace serves {{ $served | empty | ternary "every namespace" (join ", " $served) }} already, and two operators undo each other's work; name other namespaces (--set 'settings.namespaces={team-a}'), or first run: helm uninstall {{ $instance }} --namespace {{ $root.Release.Namespace }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
