{{/* A pod of any role: everything of a pod template but what only one kind of process needs. */}}
{{- define "tandem.podTemplate" -}}
{{- $values := index .root.Values .role -}}
metadata:
  labels:
    {{- include "tandem.selectorLabels" . | nindent 4 }}
    {{- with mergeOverwrite (deepCopy .root.Values.commonLabels) $values.podLabels }}
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
  {{- with include "tandem.placement" . | trim }}{{ nindent 2 . }}{{ end }}
  {{- if eq .root.Values.model.source "download" }}
  initContainers:
    {{- include "tandem.modelDownload" . | nindent 4 }}
  {{- end }}
  containers:
    {{- include "tandem.container" . | nindent 4 }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- if ne .role "proxy" }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}}
    {{- end }}
    {{- with include "tandem.modelVolume" .root | trim }}{{ nindent 4 . }}{{ end }}
    {{- with include "tandem.secretVolumes" . | trim }}{{ nindent 4 . }}{{ end }}
{{- end }}

{{/* Which nodes a pod may go to, and before whom. */}}
{{- define "tandem.placement" -}}
{{- $values := index .root.Values .role -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $values $field }}
{{ $field }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ mergeOverwrite (dict "labelSelector" (dict "matchLabels" (include "tandem.selectorLabels" $ | fromYaml))) (deepCopy .) | toJson }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tandem.container" -}}
{{- $values := index .root.Values .role -}}
- name: {{ eq .role "proxy" | ternary "proxy" "engine" }}
  image: {{ include "tandem.image" . | quote }}
  imagePullPolicy: {{ include "tandem.pullPolicy" . }}
  command: {{ list "python" "-m" (eq .role "proxy" | ternary "proxy" (printf "%s_service" .role)) | toJson }}
  env:
    {{- include "tandem.environment" . | nindent 4 }}
  ports:
    - {name: http, containerPort: {{ include "tandem.port" . }}, protocol: TCP}
  {{- include "tandem.probes" . | nindent 2 }}
  lifecycle:
    preStop: {exec: {command: [sleep, {{ $values.preStopSeconds | toString | quote }}]}}
  securityContext:
    {{- include "tandem.containerSecurity" . | nindent 4 }}
  resources:
    {{- include "tandem.resources" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if ne .role "proxy" }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- with include "tandem.modelMount" .root | trim }}{{ nindent 4 . }}{{ end }}
    {{- with include "tandem.secretMounts" . | trim }}{{ nindent 4 . }}{{ end }}
{{- end }}

{{/* With RDMA, memory is pinned: IPC_LOCK, and no privilege beside it. */}}
{{- define "tandem.containerSecurity" -}}
{{- $security := deepCopy .root.Values.containerSecurityContext -}}
{{- $rdma := .root.Values.rdma -}}
{{- if and (ne .role "proxy") $rdma.enabled -}}
{{- $capabilities := $security.capabilities | default dict -}}
{{- $security = set $security "capabilities" (set $capabilities "add" (append ($capabilities.add | default list) "IPC_LOCK" | uniq)) -}}
{{- if not (kindIs "invalid" $rdma.runAsUser) -}}
{{- $security = mergeOverwrite $security (dict "runAsUser" $rdma.runAsUser "runAsNonRoot" (ne (int64 $rdma.runAsUser) 0)) -}}
{{- end -}}
{{- end -}}
{{ toYaml $security }}
{{- end }}

{{/* Devices are asked for as limits; Kubernetes takes the same as the request. */}}
{{- define "tandem.resources" -}}
{{- $values := index .root.Values .role -}}
{{- $resources := deepCopy $values.resources -}}
{{- if ne .role "proxy" -}}
{{- $limits := $resources.limits | default dict -}}
{{- with $values.gpu }}{{ if .count }}{{ $limits = set $limits .resource (int64 .count | toString) }}{{ end }}{{ end -}}
{{- with .root.Values.rdma }}{{ if .enabled }}{{ $limits = set $limits .resource (int64 .count | toString) }}{{ end }}{{ end -}}
{{- $resources = set $resources "limits" $limits -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Liveness asks whether the HTTP process answers at all: an engine that is busy for long is ended by its own service.
A proxy is started before engines are there, and not ready until they are. */}}
{{- define "tandem.probes" -}}
{{- $probes := (index .root.Values .role).probes -}}
startupProbe:
  httpGet: {path: {{ eq .role "proxy" | ternary "/health/live" "/health/ready" }}, port: http}
  periodSeconds: {{ $probes.startupPeriodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ divf $probes.startupSeconds $probes.startupPeriodSeconds | ceil | int }}
readinessProbe:
  httpGet: {path: /health/ready, port: http}
  periodSeconds: {{ $probes.readinessPeriodSeconds }}
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
{{- $grace := get $values.settings "grace_s" -}}
{{- if not (kindIs "float64" $grace) }}{{ $grace = (kindIs "int64" $grace | ternary $grace 30) }}{{ end -}}
{{ add $values.preStopSeconds (ceil $grace) 10 }}
{{- end }}
