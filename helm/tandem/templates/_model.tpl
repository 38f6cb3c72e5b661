{{/* Where the model is, for all three kinds of process. One that is not embedded is mounted at /models/NAME, so that
NAME is also what clients call it. */}}
{{- define "tandem.modelArgument" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "embedded" -}}
{{ $model.name }}
{{- else -}}
/models/{{ $model.name }}{{ with $model.file }}/{{ . }}{{ end }}
{{- end -}}
{{- end }}

{{/* What clients call it: that of a file is the file's. */}}
{{- define "tandem.clientsModel" -}}
{{- with .Values.model }}{{ ternary .name (.file | base | trimSuffix ".gguf") (empty .file) }}{{ end -}}
{{- end }}

{{- define "tandem.modelVolume" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "pvc" }}
- {name: model, persistentVolumeClaim: {claimName: {{ $model.pvc.claimName | quote }}, readOnly: true}}
{{- else if eq $model.source "image" }}
{{- if semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version }}
{{- fail (printf "model.source: image needs Kubernetes 1.31 or newer; this is %s" .Capabilities.KubeVersion.Version) }}
{{- end }}
- {name: model, image: {reference: {{ $model.image.reference | quote }}, pullPolicy: {{ $model.image.pullPolicy }}}}
{{- else if eq $model.source "download" }}
{{- if $model.download.claimName }}
- {name: model, persistentVolumeClaim: {claimName: {{ $model.download.claimName | quote }}}}
{{- else }}
- {name: model, emptyDir: {sizeLimit: {{ $model.download.size }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* A claim that is downloaded into is mounted whole: the kubelet would make a subPath that only root may write to. */}}
{{- define "tandem.modelFolder" -}}
/models
{{- if not (and (eq .Values.model.source "download") .Values.model.download.claimName) }}/{{ .Values.model.name }}{{ end -}}
{{- end }}

{{- define "tandem.modelMount" -}}
{{- $model := .Values.model -}}
{{- if ne $model.source "embedded" }}
- name: model
  mountPath: {{ include "tandem.modelFolder" . }}
  readOnly: true
  {{- if and (eq $model.source "pvc") $model.pvc.subPath }}
  subPath: {{ $model.pvc.subPath | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Fetches what is not there yet. The proxy needs no weights. */}}
{{- define "tandem.modelDownload" -}}
{{- $download := .root.Values.model.download -}}
- name: download
  image: {{ include "tandem.image" . | quote }}
  imagePullPolicy: {{ include "tandem.pullPolicy" . }}
  command: [python, -c, {{ .root.Files.Get "files/download.py" | toJson }}]
  env:
    - {name: REPOSITORY, value: {{ $download.repository | quote }}}
    - {name: REVISION, value: {{ $download.revision | quote }}}
    - {name: FOLDER, value: /models/{{ .root.Values.model.name }}}
    - {name: FILE, value: {{ .root.Values.model.file | quote }}}
    - {name: WITHOUT_WEIGHTS, value: {{ and (eq .role "proxy") (not $download.claimName) | ternary "1" "" | quote }}}
    - {name: HF_HOME, value: /tmp/huggingface}
    {{- with $download.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- if $download.tokenSecret.name }}
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {{ toJson $download.tokenSecret }}}}
    {{- end }}
  securityContext:
    {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  resources:
    {{- toYaml $download.resources | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: {{ include "tandem.modelFolder" .root }}}
{{- end }}
