{{- define "mizzen.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "mizzen.fullname" -}}
{{- $name := include "mizzen.name" . -}}
{{- if .Values.fullnameOverride -}}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{/* What a selector holds never changes in a release's life. */}}
{{- define "mizzen.selector" -}}
app.kubernetes.io/name: {{ include "mizzen.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "mizzen.labels" -}}
{{ include "mizzen.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "mizzen.metadata" -}}
name: {{ include "mizzen.fullname" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "mizzen.labels" . | nindent 2 }}
{{- end -}}

{{- define "mizzen.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ default (include "mizzen.fullname" .) .Values.serviceAccount.name }}
{{- else -}}{{ default "default" .Values.serviceAccount.name }}{{- end -}}
{{- end -}}

{{- define "mizzen.image" -}}
{{- $flavor := ternary "cpu" "cuda" (eq (.Values.config.device | default "") "cpu") -}}
{{- if .Values.image.digest -}}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $flavor) }}{{- end -}}
{{- end -}}

{{/* A number of a values file is a float64: 52428800 must not become 5.24288e+07. */}}
{{- define "mizzen.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}

{{- define "mizzen.graceSeconds" -}}
{{- add .Values.preStopSeconds (ceil .Values.config.drain_timeout_s | int64) 15 -}}
{{- end -}}

{{- define "mizzen.startupSeconds" -}}
{{- $derived := add 1800 (mul 60 (ceil .Values.model.sizeGiB | int64)) -}}
{{- .Values.startup.budgetSeconds | int64 | default $derived -}}
{{- end -}}

{{- define "mizzen.usesGpu" -}}{{ if ne (.Values.config.device | default "") "cpu" }}true{{ end }}{{- end -}}

{{/* A model in a volume, or made up, is not downloaded. */}}
{{- define "mizzen.downloads" -}}
{{- if not (or .Values.model.existingClaim .Values.model.image (hasPrefix "/" .Values.config.model)) }}true{{ end -}}
{{- end -}}

{{- define "mizzen.apiKeysSecret" -}}
{{- .Values.apiKeys.existingSecret | default (ternary (printf "%s-api-keys" (include "mizzen.fullname" .)) "" (not (empty .Values.apiKeys.keys))) -}}
{{- end -}}

{{- define "mizzen.tokenSecret" -}}
{{- .Values.huggingface.existingSecret | default (ternary (printf "%s-huggingface" (include "mizzen.fullname" .)) "" (not (empty .Values.huggingface.token))) -}}
{{- end -}}

{{- define "mizzen.cacheVolume" -}}
{{- $cache := index .root.Values.cache .name -}}
- name: {{ .name }}
{{- if or $cache.existingClaim $cache.create }}
  persistentVolumeClaim:
    claimName: {{ $cache.existingClaim | default (printf "%s-%s" (include "mizzen.fullname" .root) .name) }}
{{- else }}
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- end }}
{{- end -}}

{{/* Monitors: Mizzen's rules and dashboards select job="mizzen". */}}
{{- define "mizzen.endpoint" -}}
path: /metrics
interval: {{ .Values.monitoring.interval }}
relabelings:
  - targetLabel: job
    replacement: mizzen
{{- with .Values.monitoring.authorization }}
authorization:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables of the server and of what downloads for it. */}}
{{- define "mizzen.env" -}}
{{- $v := .Values -}}
{{- range $name, $value := $v.config }}
{{- if not (kindIs "invalid" $value) }}
- name: MIZZEN_{{ upper $name }}
  value: {{ include "mizzen.scalar" $value | quote }}
{{- end }}
{{- end }}
{{- if include "mizzen.apiKeysSecret" . }}
- name: MIZZEN_API_KEYS_FILE
  value: /etc/mizzen/api-keys/{{ $v.apiKeys.key }}
{{- end }}
{{- if include "mizzen.tokenSecret" . }}
- name: HF_TOKEN_PATH
  value: /etc/mizzen/huggingface/{{ $v.huggingface.key }}
{{- end }}
{{- end -}}
