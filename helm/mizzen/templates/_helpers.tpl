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
{{- add (include "mizzen.drainSeconds" .) 15 -}}
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

{{/* Whose a cache's claim is: existing, created (one of the release), template (one of each pod), or nothing. */}}
{{- define "mizzen.claimOf" -}}
{{- $cache := index .root.Values.cache .name -}}
{{- if $cache.existingClaim -}}existing
{{- else if $cache.create -}}{{ ternary "template" "created" (eq .root.Values.kind "StatefulSet") }}
{{- end -}}
{{- end -}}

{{- define "mizzen.claimSpec" -}}
accessModes: {{ toJson .accessModes }}
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end -}}

{{/* Nothing where a claim template makes the volume. */}}
{{- define "mizzen.cacheVolume" -}}
{{- $cache := index .root.Values.cache .name -}}
{{- $claim := include "mizzen.claimOf" . -}}
{{- if ne $claim "template" -}}
- name: {{ .name }}
{{- if $claim }}
  persistentVolumeClaim:
    claimName: {{ $cache.existingClaim | default (printf "%s-%s" (include "mizzen.fullname" .root) .name) }}
{{- else }}
  emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- end }}
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

{{/* Only a ClusterIP Service has the health port; /metrics is the same on both. */}}
{{- define "mizzen.monitorPort" -}}
{{ ternary "health" "http" (eq .Values.service.type "ClusterIP") }}
{{- end -}}

{{/* 4318 of http://collector:4318, or the scheme's own. */}}
{{- define "mizzen.urlPort" -}}
{{- $url := urlParse . -}}
{{- $given := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- $given | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}

{{/* What tests and load tests call. */}}
{{- define "mizzen.url" -}}
http://{{ include "mizzen.fullname" . }}:{{ int64 .Values.service.port }}
{{- end -}}

{{- define "mizzen.healthUrl" -}}
{{ if eq (include "mizzen.monitorPort" .) "http" }}{{ include "mizzen.url" . }}
{{- else }}http://{{ include "mizzen.fullname" . }}:{{ int64 .Values.config.health_port }}{{ end }}
{{- end -}}

{{/* Of what calls the release: no server's selector finds it, the network policy lets it in. */}}
{{- define "mizzen.clientLabels" -}}
app.kubernetes.io/name: {{ include "mizzen.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end -}}

{{/* Seconds that what stands before the server must wait for an answer: its own 504 says more than theirs. */}}
{{- define "mizzen.answerSeconds" -}}
{{- add 10 (ceil (.Values.config.request_timeout_s | default 600) | int64) -}}
{{- end -}}

{{/* Seconds that connections of a pod that ends may last. */}}
{{- define "mizzen.drainSeconds" -}}
{{- add .Values.preStopSeconds (ceil .Values.config.drain_timeout_s | int64) -}}
{{- end -}}

{{- define "mizzen.albAnnotations" -}}
alb.ingress.kubernetes.io/target-type: ip
alb.ingress.kubernetes.io/healthcheck-path: /health/ready
alb.ingress.kubernetes.io/healthcheck-interval-seconds: "5"
alb.ingress.kubernetes.io/healthcheck-timeout-seconds: "4"
alb.ingress.kubernetes.io/healthy-threshold-count: "2"
alb.ingress.kubernetes.io/unhealthy-threshold-count: "2"
alb.ingress.kubernetes.io/success-codes: "200"
alb.ingress.kubernetes.io/load-balancer-attributes: idle_timeout.timeout_seconds={{ min 4000 (include "mizzen.answerSeconds" .) }}
alb.ingress.kubernetes.io/target-group-attributes: deregistration_delay.timeout_seconds={{ min 3600 (include "mizzen.drainSeconds" .) }},load_balancing.algorithm.type=least_outstanding_requests
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
