{{- define "ballast.name" -}}
{{- regexReplaceAll "[-_.]+$" (default .Chart.Name .Values.nameOverride | trunc 63) "" }}
{{- end }}

{{- define "ballast.fullname" -}}
{{- $name := include "ballast.name" . }}
{{- $derived := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- $prefix := default $derived .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $prefix) }}
{{- fail (printf "The prefix of names %q has a dot, an uppercase letter, or a digit first, which no name of a Service may have. Set fullnameOverride to another prefix" $prefix) }}
{{- end }}
{{- $prefix }}
{{- end }}

{{- /* Labels of every object of the chart. The selector of a Deployment is a part of them. */ -}}
{{- define "ballast.labels" -}}
{{- include "ballast.labelsWith" (list . dict) }}
{{- end }}

{{- /* The same with more labels, from a list of the root and a map. Each name appears once, and the last value counts. */ -}}
{{- define "ballast.labelsWith" -}}
{{- $root := first . }}
{{- include "ballast.refuseSelector" (list "commonLabels" $root.Values.commonLabels) }}
{{- $labels := dict
  "app.kubernetes.io/name" (include "ballast.name" $root)
  "app.kubernetes.io/instance" $root.Release.Name
  "app.kubernetes.io/part-of" "ballast"
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_")
}}
{{- toYaml (mergeOverwrite $labels (default dict $root.Values.commonLabels) (default dict (last .))) }}
{{- end }}

{{- /* Fail if labels, from a list of their value's path and a map, would hide pods from the selectors below. */ -}}
{{- define "ballast.refuseSelector" -}}
{{- $path := first . }}
{{- range $name := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" }}
{{- if hasKey (default dict (last $)) $name }}
{{- fail (printf "%s sets the label %s, by which the chart selects its pods. Remove the label" $path $name) }}
{{- end }}
{{- end }}
{{- end }}

{{- /*
The metadata of an object, from a dict of root and name, and if there are any, component, labels, and namespace if it is
another than that of the release.
*/ -}}
{{- define "ballast.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
labels:
  {{- include "ballast.labelsWith" (list .root .labels) | nindent 2 }}
  {{- with .component }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end }}

{{- /* The fields of a pod that choose its node and its priority, from a section of the values that has them. */ -}}
{{- define "ballast.placement" -}}
{{- range $field := list "priorityClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $field }}
{{ toYaml (dict $field .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ballast.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* The end of a binding of a role to the account of the operator, from a list of the root, and kind and name of the role. */ -}}
{{- define "ballast.binding" -}}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ index . 1 }}
  name: {{ index . 2 }}
subjects:
  - kind: ServiceAccount
    name: {{ include "ballast.serviceAccount" (first .) | quote }}
    namespace: {{ (first .).Release.Namespace | quote }}
{{- end }}

{{- define "ballast.operatorName" -}}
{{ include "ballast.fullname" . }}-operator
{{- end }}

{{- define "ballast.selector" -}}
app.kubernetes.io/name: {{ include "ballast.name" (first .) | quote }}
app.kubernetes.io/instance: {{ (first .).Release.Name | quote }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- define "ballast.operatorSelector" -}}
{{- include "ballast.selector" (list . "operator") }}
{{- end }}

{{- define "ballast.valkeySelector" -}}
{{- include "ballast.selector" (list . "queue") }}
{{- end }}

{{- define "ballast.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (printf "%s-operator" (include "ballast.fullname" .)) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.create is false. Set serviceAccount.name to the name of an existing account" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* An image from a dict of registry, tag, and image with repository and digest. A digest wins over a tag. */ -}}
{{- define "ballast.imageFrom" -}}
{{- $repository := .image.repository }}
{{- if .registry }}
{{- $repository = printf "%s/%s" (trimSuffix "/" .registry) $repository }}
{{- end }}
{{- if .image.digest }}
{{- printf "%s@%s" $repository .image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (required (printf "The image %s needs a tag or a digest" $repository) .tag) }}
{{- end }}
{{- end }}

{{- /* An image of Ballast, from a dict of root and image. */ -}}
{{- define "ballast.image" -}}
{{- $tag := default .root.Chart.AppVersion .image.tag }}
{{- include "ballast.imageFrom" (dict "registry" .root.Values.image.registry "image" .image "tag" $tag) }}
{{- end }}

{{- /* The image of Valkey, for the queue and for the heads of Ray clusters. It has a registry of its own. */ -}}
{{- define "ballast.valkeyImage" -}}
{{- with .Values.valkey.image }}
{{- include "ballast.imageFrom" (dict "registry" .registry "image" . "tag" .tag) }}
{{- end }}
{{- end }}

{{- /* The bytes of a size in the notation of Valkey or of Kubernetes. Empty if it has another unit, or is empty. */ -}}
{{- define "ballast.bytes" -}}
{{- $number := toString . | regexFind "^[0-9.]+(e[-+]?[0-9]+)?" }}
{{- $units := dict "" 1 "k" 1e3 "m" 1e6 "g" 1e9 "kb" 1024 "mb" 1048576 "gb" 1073741824
  "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776
}}
{{- $unit := get $units (toString . | trimPrefix $number) }}
{{- if and $number $unit }}{{ mulf $number $unit }}{{ end }}
{{- end }}

{{- /*
The bytes of `maxmemory-clients` in the bundled Valkey. The longest results need 72 MB. Of a larger Valkey, more suffices for
more workers.
*/ -}}
{{- define "ballast.valkeyClientBytes" -}}
{{- $data := include "ballast.bytes" .Values.valkey.maxMemory }}
{{- minf (mulf $data 0.15) (maxf 83886080 (mulf $data 0.04)) | int64 }}
{{- end }}

{{- /* The Secret with the certificate of the bundled Valkey. Empty if there is none. */ -}}
{{- define "ballast.valkeyTlsSecret" -}}
{{- if and .Values.valkey.enabled .Values.valkey.tls.enabled }}
{{- default (printf "%s-valkey-tls" (include "ballast.fullname" .)) .Values.valkey.tls.existingSecret }}
{{- end }}
{{- end }}

{{- /*
Whether the bundled Valkey serves the port without TLS. Workers of a release without TLS use this port until they are
replaced, so their upgrade keeps it open.
*/ -}}
{{- define "ballast.hasPlainPort" -}}
{{- if and (include "ballast.valkeyTlsSecret" .) (eq .Values.valkey.tls.plainPort "auto") }}
{{- $before := lookup "v1" "Secret" .Release.Namespace (include "ballast.redisSecret" .) | default dict }}
{{- dig "data" "url" "" $before | b64dec | hasPrefix "redis://" }}
{{- else }}
{{- or (not .Values.valkey.tls.enabled) (eq .Values.valkey.tls.plainPort "open") }}
{{- end }}
{{- end }}

{{- /* The Secret with url and password of the Redis for resources that name none. Empty if there is no such Redis. */ -}}
{{- define "ballast.redisSecret" -}}
{{- if and .Values.redis.existingSecret .Values.valkey.enabled }}
{{- fail "redis.existingSecret names a Redis, and valkey.enabled installs another. Set valkey.enabled to false, or remove redis.existingSecret" }}
{{- end }}
{{- if .Values.redis.existingSecret }}
{{- .Values.redis.existingSecret }}
{{- else if .Values.valkey.enabled }}
{{- printf "%s-redis" (include "ballast.fullname" .) }}
{{- end }}
{{- end }}
