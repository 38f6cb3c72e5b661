{{/* A pod of any role: everything of a pod template but what only one kind of process needs. */}}
{{- define "tandem.podTemplate" -}}
{{- $values := index .root.Values .role -}}
metadata:
  labels:
    {{- include "tandem.selectorLabels" . | nindent 4 }}
    {{- with .root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/settings: {{ include "tandem.environment" . | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccount" . }}
  automountServiceAccountToken: {{ and (eq .role "proxy") (eq .root.Values.proxy.discovery "kubernetes") }}
  # A Service called tandem-proxy would give every pod TANDEM_PROXY_PORT=tcp://…, which the proxy refuses.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "tandem.terminationGrace" . }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    {{- include "tandem.container" . | nindent 4 }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if ne .role "proxy" }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}}
    {{- end }}
{{- end }}

{{- define "tandem.container" -}}
{{- $values := index .root.Values .role -}}
- name: {{ eq .role "proxy" | ternary "proxy" "engine" }}
  image: {{ include "tandem.image" . | quote }}
  imagePullPolicy: {{ index .root.Values.images (eq .role "proxy" | ternary "proxy" "engine") "pullPolicy" }}
  command: {{ list "python" "-m" (eq .role "proxy" | ternary "proxy" (printf "%s_service" .role)) | toJson }}
  env:
    {{- include "tandem.environment" . | nindent 4 }}
  ports:
    - {name: http, containerPort: {{ include "tandem.port" . }}, protocol: TCP}
  {{- include "tandem.probes" . | nindent 2 }}
  lifecycle:
    preStop: {exec: {command: [sleep, {{ $values.preStopSeconds | toString | quote }}]}}
  securityContext:
    {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  resources:
    {{- toYaml $values.resources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if ne .role "proxy" }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
{{- end }}

{{/* Liveness asks whether the HTTP process answers at all: an engine that is busy for long is ended by its own service.
A proxy is started before engines are there, and not ready until they are. */}}
{{- define "tandem.probes" -}}
{{- $values := index .root.Values .role -}}
startupProbe:
  httpGet: {path: {{ eq .role "proxy" | ternary "/health/live" "/health/ready" }}, port: http}
  periodSeconds: {{ $values.probes.startupPeriodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ divf $values.probes.startupSeconds $values.probes.startupPeriodSeconds | ceil | int }}
readinessProbe:
  httpGet: {path: /health/ready, port: http}
  periodSeconds: {{ $values.probes.readinessPeriodSeconds }}
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health/live, port: http}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{/* The process has left before the kubelet kills it: the wait before SIGTERM, its own grace, and a margin. */}}
{{- define "tandem.terminationGrace" -}}
{{- $values := index .root.Values .role -}}
{{ add $values.preStopSeconds (ceil ($values.settings.grace_s | default 30)) 10 }}
{{- end }}
