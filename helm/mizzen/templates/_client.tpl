{{/* A pod that calls the release: `helm test` and the load test. Takes root, name, image, arguments of files/test.py, resources. */}}
{{- define "mizzen.client" -}}
{{- $v := .root.Values -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if not .image }}
# The server's image is large: where the server may run, a node has it already.
{{- range $key := list "nodeSelector" "tolerations" }}
{{- with index $v $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
securityContext:
  {{- toYaml $v.podSecurityContext | nindent 2 }}
containers:
  - name: {{ .name }}
    image: {{ .image | default (include "mizzen.image" .root) }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    command: [python3, -c, {{ .root.Files.Get "files/test.py" | toJson }}]
    args: {{ toJson .arguments }}
    env:
      - {name: NVIDIA_VISIBLE_DEVICES, value: void}
      - {name: API, value: {{ include "mizzen.url" .root | quote }}}
      - {name: HEALTH, value: {{ include "mizzen.healthUrl" .root | quote }}}
      - {name: WAIT_S, value: {{ include "mizzen.startupSeconds" .root | quote }}}
      {{- if include "mizzen.apiKeysSecret" .root }}
      - {name: KEYS_FILE, value: /etc/mizzen/api-keys/{{ $v.apiKeys.key }}}
      {{- end }}
    securityContext:
      {{- toYaml $v.securityContext | nindent 6 }}
    resources:
      {{- toYaml .resources | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      {{- if include "mizzen.apiKeysSecret" .root }}
      - {name: api-keys, mountPath: /etc/mizzen/api-keys, readOnly: true}
      {{- end }}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 1Gi}
  {{- with include "mizzen.apiKeysSecret" .root }}
  - name: api-keys
    secret: {secretName: {{ . }}, defaultMode: 288}  # 0440
  {{- end }}
{{- end -}}
