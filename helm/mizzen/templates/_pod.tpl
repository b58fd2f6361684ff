{{/* The pod, the same in a Deployment and in a StatefulSet. */}}
{{- define "mizzen.pod" -}}
{{- $v := .Values -}}
metadata:
  labels:
    {{- include "mizzen.labels" . | nindent 4 }}
    {{- with $v.queueName }}
    kueue.x-k8s.io/queue-name: {{ . }}
    {{- end }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed key or token makes new pods.
    checksum/secrets: {{ toJson (list $v.apiKeys $v.huggingface) | sha256sum }}
    {{- if $v.doNotDisrupt }}
    karpenter.sh/do-not-disrupt: "true"
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    {{- end }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "mizzen.serviceAccount" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # preStop, the drain, and 15 s for the processes to end
  terminationGracePeriodSeconds: {{ include "mizzen.graceSeconds" . }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  {{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "resourceClaims" }}
  {{- with index $v $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if include "mizzen.downloads" . }}
  initContainers:
    # Goes on where it stopped, and counts against no probe's budget. The pod's node is chosen by then, GPUs and all.
    - name: download
      image: {{ include "mizzen.image" . }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args: [download]
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      env:
        {{- include "mizzen.env" . | trim | nindent 8 }}
        - name: NVIDIA_VISIBLE_DEVICES  # the image says "all", which some runtimes do without being asked for a GPU
          value: void
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml $v.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /cache/models}
        {{- if include "mizzen.apiKeysSecret" . }}
        - {name: api-keys, mountPath: /etc/mizzen/api-keys, readOnly: true}
        {{- end }}
        {{- if include "mizzen.tokenSecret" . }}
        - {name: huggingface, mountPath: /etc/mizzen/huggingface, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  {{- end }}
  containers:
    - name: mizzen
      image: {{ include "mizzen.image" . }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args: [serve]
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      env:
        {{- include "mizzen.env" . | trim | nindent 8 }}
        - name: HF_HUB_OFFLINE  # an init container downloads, or nobody needs to
          value: "1"
        {{- with $v.otlp.endpoint }}
        - name: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
          value: {{ . | trimSuffix "/" }}/v1/traces
        - name: OTEL_TRACES_SAMPLER
          value: parentbased_traceidratio
        - name: OTEL_TRACES_SAMPLER_ARG
          value: {{ $v.otlp.sampleRatio | quote }}
        {{- end }}
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: http, containerPort: {{ int64 $v.config.port }}}
        - {name: health, containerPort: {{ int64 $v.config.health_port }}}
      # All three ask the supervisor's own threads, which load does not touch. Before it has served once, liveness is not probed.
      startupProbe:
        httpGet: {path: /health/startup, port: health}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add (include "mizzen.startupSeconds" .) 4) 5 }}
      # Ready says what /v1 would answer: one "no" counts.
      readinessProbe:
        httpGet: {path: /health/ready, port: health}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 1
      # It stays 200 while the supervisor restarts, loads or drains: 503 means that only a restart from outside helps.
      livenessProbe:
        httpGet: {path: /health/live, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      {{- if gt (int64 $v.preStopSeconds) 0 }}
      lifecycle:
        preStop:
          {{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}
          sleep: {seconds: {{ int64 $v.preStopSeconds }}}
          {{- else }}
          exec: {command: [mizzen, sleep, {{ int64 $v.preStopSeconds | quote }}]}
          {{- end }}
      {{- end }}
      {{- $resources := deepCopy $v.resources }}
      {{- if $v.resourceClaims }}
      {{- $claims := list }}
      {{- range $v.resourceClaims }}{{ $claims = append $claims (pick . "name") }}{{ end }}
      {{- $_ := set $resources "claims" $claims }}
      {{- else if include "mizzen.usesGpu" . }}
      {{- $gpus := dict $v.gpu.resource (int64 $v.config.tensor_parallel_size) }}
      {{- $resources = merge $resources (dict "limits" $gpus "requests" $gpus) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: models, mountPath: /cache/models}
        - {name: compiled, mountPath: /cache/compiled}
        {{- if or $v.model.existingClaim $v.model.image }}
        - {name: model, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if include "mizzen.apiKeysSecret" . }}
        - {name: api-keys, mountPath: /etc/mizzen/api-keys, readOnly: true}
        {{- end }}
        {{- if include "mizzen.tokenSecret" . }}
        - {name: huggingface, mountPath: /etc/mizzen/huggingface, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $v.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $v.shm.sizeLimit }}}
    {{- range $name := list "models" "compiled" }}
    {{- with include "mizzen.cacheVolume" (dict "root" $ "name" $name) }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with $v.model.existingClaim }}
    - name: model
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    {{- with $v.model.image }}
    - name: model
      image: {reference: {{ . | quote }}, pullPolicy: IfNotPresent}
    {{- end }}
    {{- with include "mizzen.apiKeysSecret" . }}
    - name: api-keys
      secret: {secretName: {{ . }}, defaultMode: 288}  # 0440
    {{- end }}
    {{- with include "mizzen.tokenSecret" . }}
    - name: huggingface
      secret: {secretName: {{ . }}, defaultMode: 288}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
